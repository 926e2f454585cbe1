"""The disk cache: keys, entries, trust, bound, prebuilt directories, and what a hit does not load."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cuflash import cache, compiler, driver, files, kernels, params, render
from cuflash.cache import CacheKey, KernelCache, cache_key, load_prebuilt, open_cache
from cuflash.compiled import Compiled
from cuflash.errors import MissingKernelError
from cuflash.problem import AttentionProblem
from cuflash.settings import Settings
from tests import tiny

CHECKOUT = Path(cache.__file__).parents[1]
PROBLEM = AttentionProblem(128, 128, "bfloat16", "causal", 16, False, "sm_90")
CONFIG = kernels.select_config(PROBLEM)
BUILD = "13.0.88"


def key_of(n: int) -> CacheKey:
    return CacheKey(tiny.SYMBOL, f"{n:032x}")


def compiled_of(n: int, size: int = 1000, build: str = BUILD) -> Compiled:
    code = bytes((n * 7 + i) % 251 for i in range(size))
    return Compiled(code, tiny.SYMBOL, "sm_80", 32, 0, 0, 256, 0.25, "log of µ\n", build)


@pytest.fixture(autouse=True)
def fixed_build(monkeypatch, tmp_path):
    """An NVRTC whose build is known and that must not be loaded: the library is a text file."""
    library = tmp_path / "libnvrtc.so"
    library.write_text("library")
    asked = []

    def build():
        asked.append(1)
        return BUILD

    monkeypatch.setattr(compiler, "nvrtc_build", build)
    monkeypatch.setattr(compiler, "nvrtc_path", lambda: str(library))
    monkeypatch.setattr(driver, "bindings_version", lambda: "13.0.0")
    return asked


@pytest.fixture
def root(tmp_path):
    return tmp_path / "parent" / "kernels"


@pytest.fixture
def store(root):
    return KernelCache(root, 1 << 20)


def publish(store, n, **options):
    compiled = compiled_of(n, **options)
    return store.publish(key_of(n), tiny.source(), compiled, {"n": n}) and compiled


# --- keys ------------------------------------------------------------------------------------------------------


def test_a_key_holds_all_that_determines_a_cubin():
    seen = {cache_key(PROBLEM, CONFIG)}
    for field, value in {
        "head_dim": 64,
        "head_dim_v": 64,
        "dtype": "float16",
        "mask": "full",
        "access_bytes": 8,
        "scale_first": True,
        "arch": "sm_80",
        "task": "backward",
        "short": True,
        "input_dtype": "float8_e4m3fn",
    }.items():
        seen.add(cache_key(replace(PROBLEM, **{field: value}), CONFIG))
    for field in ("block_m", "block_n", "warps", "stages", "q_registers", "ctas"):
        seen.add(cache_key(PROBLEM, replace(CONFIG, **{field: getattr(CONFIG, field) + 16})))
    seen.add(cache_key(PROBLEM, CONFIG, lineinfo=True))
    seen.add(cache_key(PROBLEM, CONFIG, ptx=True))
    seen.add(cache_key(replace(PROBLEM, input_dtype="float8_e4m3fn", one_level=True), CONFIG))
    seen.add(cache_key(replace(PROBLEM, input_dtype="float8_e4m3fn", k_dtype="float8_e5m2"), CONFIG))
    seen.add(cache_key(replace(PROBLEM, input_dtype="float8_e4m3fn", v_dtype="float8_e5m2"), CONFIG))
    assert len(seen) == 22
    assert len({key.base for key in seen}) == 22


def test_a_key_holds_nothing_else():
    # B-131: lengths, strides and pointers are parameters of a launch and have no place in a problem or a key.
    assert cache_key(PROBLEM, CONFIG) == cache_key(replace(PROBLEM), replace(CONFIG, reason="another"))


def test_a_key_holds_the_templates_and_the_parameter_block(monkeypatch):
    # B-124, B-125, B-130: contents decide, not dates or versions; what the source takes from elsewhere is in the key.
    before = cache_key(PROBLEM, CONFIG)
    with monkeypatch.context() as patch:
        patch.setattr(render, "template_digest", lambda: "another")
        assert cache_key(PROBLEM, CONFIG).base != before.base
    fields = (*params.FORWARD_SM80.fields, params.Field("more", params.I32, ""))
    family = kernels.FAMILIES[CONFIG.family]._replace(params=params.ParameterBlock(fields))
    monkeypatch.setitem(kernels.FAMILIES, CONFIG.family, family)
    assert cache_key(PROBLEM, CONFIG).base != before.base


def test_shipped_kernels_have_keys_and_folders_of_their_own(store):
    keys = [
        cache_key(problem, kernels.select_config(problem))
        for arch in ("sm_80", "sm_90")
        for problem in kernels.shipped_problems(arch)
    ]
    assert len({store.path(key) for key in keys}) == len(keys)
    assert max(len(store.path(key).name) for key in keys) < 200


# --- entries ---------------------------------------------------------------------------------------------------


def test_what_is_published_comes_back(store):
    assert store.load(key_of(1)) is None
    compiled = publish(store, 1)
    assert store.load(key_of(1)) == compiled
    assert KernelCache(store.root, 0).load(key_of(1)) == compiled
    assert store.load(key_of(2)) is None
    assert store.load(CacheKey("another", key_of(1).base)) is None


def test_an_entry_is_the_debug_artefact(store):
    compiled = publish(store, 1)
    entry = store.path(key_of(1))
    assert entry.name == f"{tiny.SYMBOL}.{key_of(1).base}.{BUILD}"
    assert (entry / "kernel.cubin").read_bytes() == compiled.cubin
    assert (entry / "kernel.cu").read_text(encoding="utf-8") == tiny.TEXT
    meta = json.loads((entry / "meta.json").read_bytes())
    assert meta["compiled"]["registers"] == 32
    assert meta["compiled"]["nvrtc"] == BUILD
    assert meta["options"] == list(tiny.source().options)
    assert meta["about"] == {"n": 1}


def test_nothing_is_touched_before_the_first_publication(store, root):
    assert store.load(key_of(1)) is None
    assert (store.info().entries, store.clear()) == (0, 0)
    assert not root.parent.exists()


def test_everything_is_private_to_the_user(store, root):
    old = os.umask(0)
    try:
        publish(store, 1)
    finally:
        os.umask(old)
    for path in [root, *root.rglob("*")]:
        assert path.stat().st_mode & 0o077 == 0, path


def test_publishing_again_is_no_error(store):
    compiled = publish(store, 1)
    assert publish(store, 1) == compiled
    assert store.info().entries == 1
    assert not list(store._children(unfinished=True))


def test_a_process_out_of_descriptors_leaves_sound_entries_alone(store, monkeypatch):
    compiled = publish(store, 1)

    def exhausted(*_):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with monkeypatch.context() as patch:
        patch.setattr(cache, "_read_entry", exhausted)
        assert store.load(key_of(1)) is None
    assert store.load(key_of(1)) == compiled


def test_another_nvrtc_build_misses(store, root, monkeypatch):
    publish(store, 1)
    monkeypatch.setattr(compiler, "nvrtc_build", lambda: "12.9.86")
    store._forget_build()
    other = KernelCache(root, 1 << 20)
    assert other.load(key_of(1)) is None
    compiled = publish(other, 1, build="12.9.86")
    assert other.load(key_of(1)) == compiled
    assert other.info().entries == 2


def test_discard_and_clear(store, root):
    for n in range(3):
        publish(store, n)
    store.discard(key_of(1))
    store.discard(key_of(1))
    assert [store.load(key_of(n)) is not None for n in range(3)] == [True, False, True]
    assert store.info().entries == 2
    assert store.clear() == 2
    assert store.info().entries == store.info().size == 0
    assert store.load(key_of(0)) is None


# --- damage ----------------------------------------------------------------------------------------------------

FILES = ("meta.json", "kernel.cubin")


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("keep", [0.0, 0.3, 0.99, None])
def test_truncated_and_missing_files_heal(store, name, keep):
    compiled = publish(store, 1)
    path = store.path(key_of(1)) / name
    data = path.read_bytes()
    if keep is None:
        path.unlink()
    else:
        path.write_bytes(data[: int(keep * len(data))])
    assert store.load(key_of(1)) is None
    assert not store.path(key_of(1)).exists()
    assert publish(store, 1) == compiled
    assert store.load(key_of(1)) == compiled


@pytest.fixture(scope="module")
def module_root(tmp_path_factory):
    return tmp_path_factory.mktemp("module") / "kernels"


@given(st.sampled_from(FILES), st.integers(0, 2**30), st.integers(0, 7))
@settings(max_examples=60)
def test_no_flipped_bit_gets_through(module_root, name, place, bit):
    store = KernelCache(module_root, 1 << 20)
    store.nvrtc_build = BUILD
    compiled = publish(store, 1)
    path = store.path(key_of(1)) / name
    data = bytearray(path.read_bytes())
    data[place % len(data)] ^= 1 << bit
    path.write_bytes(data)
    loaded = store.load(key_of(1))
    assert loaded is None or loaded == compiled  # a blank between JSON's words may change into another
    assert (loaded is None) is not store.path(key_of(1)).exists()


@pytest.mark.parametrize(
    "meta",
    [b"", b"null", b"[]", b"7", b'"x"', b"{}", b'{"sha256": 1}', b"\xff\xfe", b"[" * 100_000],
    ids=range(9),
)
def test_metadata_of_any_kind_is_a_miss(store, meta):
    publish(store, 1)
    (store.path(key_of(1)) / "meta.json").write_bytes(meta)
    assert store.load(key_of(1)) is None
    assert publish(store, 1)


@pytest.mark.parametrize("thing", ["file", "empty folder", "dangling link", "link to itself"])
def test_something_else_in_an_entrys_place_heals(store, thing):
    publish(store, 0)
    path = store.path(key_of(1))
    if thing == "file":
        path.write_text("not a folder")
    elif thing == "empty folder":
        path.mkdir()
    else:
        path.symlink_to("nowhere" if thing == "dangling link" else path.name)
    assert store.load(key_of(1)) is None
    compiled = publish(store, 1)
    assert store.load(key_of(1)) == compiled


def test_an_entry_moved_to_another_key_is_refused(store):
    publish(store, 1)
    os.rename(store.path(key_of(1)), store.path(key_of(2)))
    assert store.load(key_of(2)) is None


# --- trust -----------------------------------------------------------------------------------------------------


def refused(store, match):
    with pytest.warns(RuntimeWarning, match=match) as caught:
        assert store.load(key_of(1)) is None
        assert not publish(store, 1)
        assert store.load(key_of(1)) is None
        assert not publish(store, 2)
    assert len(caught) == 1
    assert "CUFLASH_CACHE_DIR" in str(caught[0].message)


@pytest.mark.skipif(os.name != "posix", reason="POSIX permissions")
@pytest.mark.parametrize("mode", [0o770, 0o702, 0o777, 0o1777])
def test_a_root_that_others_can_write_is_refused(store, root, mode):
    publish(store, 1)
    root.chmod(mode)
    refused(store, "can be written by other users")
    root.chmod(0o755)
    assert store.load(key_of(1)) is not None


@pytest.mark.skipif(os.name != "posix", reason="POSIX permissions")
def test_a_root_of_somebody_else_is_refused(store, root, monkeypatch):
    # B-128
    publish(store, 1)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    refused(store, "belongs to another user")
    assert store.clear() == 0


@pytest.mark.parametrize("place", ["under a file", "is a file"])
def test_an_impossible_root_costs_one_warning(tmp_path, place):
    # B-127
    (tmp_path / "file").write_text("")
    store = KernelCache(tmp_path / "file" / "kernels" if place == "under a file" else tmp_path / "file", 1 << 20)
    refused(store, "cannot be written")


def test_the_settings_choose_the_cache(tmp_path):
    assert open_cache(Settings(cache_dir=None)) is None
    assert open_cache(Settings(cache_dir=tmp_path, cache_bytes=0)) is None
    store = open_cache(Settings(cache_dir=tmp_path / "c", cache_bytes=77))
    assert (store.root, store.max_bytes) == (tmp_path / "c", 77)
    assert not store.root.exists()


# --- the bound -------------------------------------------------------------------------------------------------


def date(store, n, seconds):
    os.utime(store.path(key_of(n)) / "meta.json", (seconds, seconds))


def test_the_least_recently_used_goes(root):
    store = KernelCache(root, 1 << 30)
    for n in range(4):
        publish(store, n, size=10_000)
        date(store, n, 1000 + n)
    entry_bytes = store.info().size // 4
    assert store.load(key_of(0)) is not None  # makes it the most recent one
    bounded = KernelCache(root, 4 * entry_bytes)
    publish(bounded, 4, size=10_000)
    assert [store.load(key_of(n)) is not None for n in range(5)] == [True, False, True, True, True]
    assert bounded.info().size <= bounded.max_bytes


def test_the_bound_holds_even_for_one_entry(root):
    store = KernelCache(root, 500)
    assert publish(store, 1)
    assert store.info().entries == 0
    assert store.load(key_of(1)) is None


def test_what_dead_processes_left_is_swept(store):
    publish(store, 1)
    stale, fresh = store._folder / f"{files.UNFINISHED}1-a", store._folder / f"{files.UNFINISHED}2-b"
    for path in (stale, fresh):
        path.mkdir()
        (path / "kernel.cubin").write_bytes(b"x" * 100)
    old = fresh.stat().st_mtime - cache.STALE_SECONDS - 60
    os.utime(stale, (old, old))
    publish(store, 2)
    assert (stale.exists(), fresh.exists()) == (False, True)
    assert store.info().entries == 2


# --- prebuilt kernels ------------------------------------------------------------------------------------------


def test_prebuilt_kernels_are_taken_whatever_nvrtc_built_them(store, monkeypatch):
    # B-139
    assert load_prebuilt(store.root, key_of(1)) is None
    builds = {"12.9.86": 1, "13.0.88": 2, "9.9.9": 3, "13.0.9": 4}
    for build, n in builds.items():
        assert store.publish(key_of(1), tiny.source(), compiled_of(n, build=build))

    def absent():
        raise MissingKernelError("no NVRTC")

    monkeypatch.setattr(compiler, "nvrtc_build", absent)
    before = sorted((path, path.stat().st_mtime_ns) for path in store.root.rglob("*"))
    assert load_prebuilt(store.root, key_of(1)) == compiled_of(2, build="13.0.88")
    assert load_prebuilt(store.root, key_of(2)) is None
    assert before == sorted((path, path.stat().st_mtime_ns) for path in store.root.rglob("*"))


def test_a_damaged_prebuilt_kernel_is_passed_over_and_left(store):
    for build in ("12.9.86", "13.0.88"):
        store.publish(key_of(1), tiny.source(), compiled_of(1, build=build))
    cubin = store._folder / f"{tiny.SYMBOL}.{key_of(1).base}.13.0.88" / "kernel.cubin"
    cubin.write_bytes(b"damaged")
    assert load_prebuilt(store.root, key_of(1)).nvrtc == "12.9.86"
    assert cubin.exists()


def test_without_nvrtc_the_cache_misses(store, root, monkeypatch):
    publish(store, 1)

    def absent():
        raise MissingKernelError("no NVRTC")

    store._forget_build()
    monkeypatch.setattr(compiler, "nvrtc_build", absent)
    assert KernelCache(root, 1 << 20).load(key_of(1)) is None


# --- the NVRTC build -------------------------------------------------------------------------------------------


def test_the_build_is_asked_for_once_per_library(store, root, fixed_build, tmp_path, monkeypatch):
    publish(store, 1)
    assert len(fixed_build) == 1
    assert KernelCache(root, 1).nvrtc_build == BUILD
    assert len(fixed_build) == 1
    (tmp_path / "libnvrtc.so").write_text("another library")
    assert KernelCache(root, 1).nvrtc_build == BUILD
    assert len(fixed_build) == 2
    (tmp_path / "libnvrtc.so").unlink()
    monkeypatch.setattr(compiler, "nvrtc_path", lambda: None)
    assert KernelCache(root, 1).nvrtc_build == BUILD
    assert len(fixed_build) == 3


def test_a_kernel_of_another_build_than_remembered_corrects_the_memory(store, root, monkeypatch):
    publish(store, 1)
    monkeypatch.setattr(compiler, "nvrtc_build", lambda: "13.1.5")
    assert store.load(key_of(2)) is None  # the remembered build is believed
    compiled = publish(store, 2, build="13.1.5")
    assert store.load(key_of(2)) == compiled
    assert KernelCache(root, 1).nvrtc_build == "13.1.5"


@pytest.mark.parametrize("record", [b"", b"{}", b"[]", b"null", b'{"path": 7, "stamp": [1, 2], "build": "1"}'])
def test_a_damaged_memory_is_asked_again(store, root, record):
    publish(store, 1)
    store._build_record().write_bytes(record)
    assert KernelCache(root, 1).nvrtc_build == BUILD


@pytest.mark.compile
def test_a_hit_loads_neither_jinja_nor_nvrtc(tmp_path):
    """Two processes: the first compiles the tiny kernel and publishes it, the second finds it."""
    script = f"""
import sys; sys.path.insert(0, {str(CHECKOUT)!r})
from pathlib import Path
from cuflash import cache, driver, jit, kernels
from cuflash.problem import AttentionProblem
problem = AttentionProblem(64, 64, "float16", "full", 16, False, "sm_80")
key = cache.cache_key(problem, kernels.select_config(problem))
store = cache.KernelCache(Path({str(tmp_path / "kernels")!r}), 1 << 20)
compiled = store.load(key)
if compiled is None:
    from cuflash.compiler import compile_source
    from tests import tiny
    compiled = compile_source(tiny.source())._replace(symbol=key.symbol)
    assert store.publish(key, tiny.source(), compiled)
    print("compiled")
else:
    mapped = Path("/proc/self/maps").read_text() if Path("/proc/self/maps").exists() else ""
    needless = {{"jinja2", "cuda.bindings.nvrtc", "cuflash.compiler", "numpy.testing"}}
    print(sorted(needless & sys.modules.keys()), "nvrtc" in mapped)
"""
    tiny.require_nvrtc()
    run = [sys.executable, "-c", script]
    outputs = [subprocess.run(run, check=True, capture_output=True, text=True).stdout for _ in range(2)]
    assert outputs == ["compiled\n", "[] False\n"]
