"""The cache under real processes, kills, faults of the file system, and eviction by many at once."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from pathlib import Path

import pytest

from cuflash import cache, compiler, driver
from cuflash.cache import CacheKey, KernelCache
from cuflash.compiled import Compiled
from tests import tiny

CHECKOUT = Path(cache.__file__).parents[1]
BUILD = "13.0.88"
KEY = CacheKey(tiny.SYMBOL, "0" * 32)
BOUND = 1 << 30

pytestmark = pytest.mark.skipif(os.name != "posix", reason="processes, signals and permissions of POSIX")


def compiled_of(n: int, size: int = 5000) -> Compiled:
    return Compiled(bytes([n % 251]) * size, tiny.SYMBOL, "sm_80", 32, 0, 0, 256, 0.25, "log", BUILD)


def open_store(root: Path, max_bytes: int = BOUND) -> KernelCache:
    """A cache that takes its NVRTC build as known."""
    store = KernelCache(root, max_bytes)
    store.nvrtc_build = BUILD
    return store


def publish(store: KernelCache, n: int = 1, key: CacheKey = KEY) -> bool:
    return store.publish(key, tiny.source(), compiled_of(n))


@pytest.fixture
def root(tmp_path):
    return tmp_path / "kernels"


def in_child(work, *, as_nobody: bool = False) -> int:
    """Run a function in a forked process; returns how the process ended, as `os.waitstatus_to_exitcode` says it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns where other modules keep threads
        child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    code = 1
    try:
        if as_nobody and os.geteuid() == 0:
            os.setgid(65534)
            os.setuid(65534)
        work()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


# --- many processes --------------------------------------------------------------------------------------------


def start(script: str, *arguments: object) -> subprocess.Popen:
    lines = (
        f"import sys; sys.path.insert(0, {str(CHECKOUT)!r}); sys.argv[0] = ''\n"
        "from pathlib import Path; from tests import tiny; from cuflash.cache import KernelCache, CacheKey\n"
        "from cuflash.compiled import Compiled; from cuflash.compiler import compile_source\n"
    )
    command = [sys.executable, "-W", "error", "-c", lines + script, *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def finish(processes: list[subprocess.Popen]) -> list[str]:
    outputs = [process.communicate(timeout=300)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * len(processes), "\n".join(outputs)
    return outputs


@pytest.mark.compile
def test_eight_processes_on_an_empty_cache(root):
    # B-121, B-122, B-140: the same kernel, under one file name, compiled and published by all at once.
    tiny.require_nvrtc()
    script = """
import hashlib, time
store, key = KernelCache(Path(sys.argv[1]), 1 << 30), CacheKey(tiny.SYMBOL, "0" * 32)
time.sleep(max(0, float(sys.argv[2]) - time.time()))
source = tiny.source(); found = store.load(key); compiled = found or compile_source(source)
assert found or store.publish(key, source, compiled)
assert store.load(key).cubin == compiled.cubin
print(hashlib.sha256(compiled.cubin).hexdigest())
"""
    outputs = finish([start(script, root, time.time() + 3) for _ in range(8)])
    assert len(set(outputs)) == 1
    store = KernelCache(root, BOUND)
    assert store.info().entries == 1
    assert not list(store._children(unfinished=True))


EVICTION = """
import random
rng, store, published = random.Random(int(sys.argv[2])), KernelCache(Path(sys.argv[1]), 60_000), 0
store.nvrtc_build = "13.0.88"
for _ in range(120):
    n = rng.randrange(30)
    key = CacheKey(tiny.SYMBOL, f"{n:032x}")
    compiled = Compiled(bytes([n]) * 5000, tiny.SYMBOL, "sm_80", 32, 0, 0, 256, 0.25, "log", "13.0.88")
    found = store.load(key)
    assert found is None or found == compiled
    if found is None or rng.random() < 0.1:
        assert store.publish(key, tiny.source(), compiled); published += 1
    if rng.random() < 0.05: store.discard(key)
print(published)
"""


def test_eviction_under_concurrency(root):
    published = finish([start(EVICTION, root, seed) for seed in range(4)])
    assert sum(map(int, published)) > 60
    store = open_store(root, 60_000)
    assert 0 < store.info().size <= store.max_bytes
    assert not list(store._children(unfinished=True))
    for n in range(30):
        found = store.load(CacheKey(tiny.SYMBOL, f"{n:032x}"))
        assert found is None or found == Compiled(
            bytes([n]) * 5000, tiny.SYMBOL, "sm_80", 32, 0, 0, 256, 0.25, "log", BUILD
        )


def test_processes_that_damage_and_heal(root):
    """Two processes damage entries while two read and publish: nobody ever gets a wrong cubin."""
    vandal = """
import random
rng = random.Random(int(sys.argv[2]))
for _ in range(400):
    entries = list(Path(sys.argv[1], "v1").iterdir())
    if not entries: continue
    path = rng.choice(entries) / rng.choice(["meta.json", "kernel.cubin"])
    try:
        size = path.stat().st_size
        with open(path, "r+b") as file:
            if rng.random() < 0.5: file.truncate(rng.randrange(size + 1))
            else:
                file.seek(rng.randrange(max(size, 1))); file.write(bytes([rng.randrange(256)]))
    except OSError: pass
"""
    publish(open_store(root), 0)
    finish([start(EVICTION if seed < 2 else vandal, root, seed) for seed in range(4)])


# --- kills -----------------------------------------------------------------------------------------------------


def counted_calls(monkeypatch, act) -> list[str]:
    """Replace the calls that change files by ones that run ``act(number, name)`` first; returns the growing list."""
    calls: list[str] = []

    def wrap(name, original):
        def call(*args, **kwargs):
            if name != "open" or args[1] & os.O_CREAT:
                calls.append(name)
                act(len(calls), name)
            return original(*args, **kwargs)

        return call

    for name in ("open", "fsync", "rename", "mkdir", "replace"):
        monkeypatch.setattr(os, name, wrap(name, getattr(os, name)))
    return calls


def number_of_steps(root, monkeypatch) -> int:
    with monkeypatch.context() as patch:
        calls = counted_calls(patch, lambda number, name: None)
        assert publish(open_store(root))
    assert calls.count("rename") == 1
    assert calls.count("fsync") >= 4
    return len(calls)


def test_killed_at_every_step_of_a_publication(tmp_path, monkeypatch):
    steps = number_of_steps(tmp_path / "counted", monkeypatch)
    whole = 0
    for step in range(1, steps + 1):
        root = tmp_path / f"killed{step}"

        def die(number, name, step=step):
            if number == step:
                os.kill(os.getpid(), signal.SIGKILL)

        with monkeypatch.context() as patch:
            counted_calls(patch, die)
            assert in_child(lambda root=root: publish(open_store(root))) == -signal.SIGKILL
        store = open_store(root)
        found = store.load(KEY)
        assert found in (None, compiled_of(1))
        whole += found is not None
        assert store.info().entries == (found is not None)
        assert publish(store)
        assert store.load(KEY) == compiled_of(1)
        for left in store._children(unfinished=True):
            os.utime(left, (1, 1))
        publish(store, 2, CacheKey(tiny.SYMBOL, "1" * 32))
        assert not list(store._children(unfinished=True))
    assert 1 <= whole < steps


# --- a file system that fails ----------------------------------------------------------------------------------


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EACCES])
def test_a_failure_at_every_step_costs_a_warning_and_leaves_nothing(tmp_path, monkeypatch, code):
    steps = number_of_steps(tmp_path / "counted", monkeypatch)
    for step in range(1, steps + 1):
        root = tmp_path / f"full{step}"

        def fail(number, name, step=step):
            if number >= step:
                raise OSError(code, os.strerror(code))

        with monkeypatch.context() as patch, warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            counted_calls(patch, fail)
            store = open_store(root)
            published = [publish(store), publish(store)]
        assert len(caught) == 1 or all(published), step
        assert all("cannot be written" in str(warning.message) for warning in caught)
        assert store.load(KEY) == (compiled_of(1) if store.info().entries else None)
        assert not list(store._children(unfinished=True))
        assert publish(store)
        assert store.load(KEY) == compiled_of(1)


def test_a_disk_that_fills_up(root):
    """A real short write: the process may not write files above 3000 bytes (EFBIG, as from a full disk)."""
    resource = pytest.importorskip("resource")

    def work():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (3000, 3000))
        store = open_store(root)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert not publish(store)
            assert not publish(store)
        assert len(caught) == 1 and "cannot be written" in str(caught[0].message)
        assert store.load(KEY) is None

    assert in_child(work) == 0
    store = open_store(root)
    assert store.info().entries == 0
    assert not list(store._children(unfinished=True))


@pytest.fixture
def public_folder():
    """A folder that user nobody can reach, which pytest's are not."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Path(name)


def owned_by_nobody(root: Path) -> None:
    if os.geteuid() == 0:
        for path in [root, *root.rglob("*")]:
            os.chown(path, 65534, 65534)


def test_a_read_only_cache_serves_and_warns_once(public_folder):
    # B-127
    root = public_folder / "kernels"
    publish(open_store(root))
    owned_by_nobody(root)
    (root / cache.LAYOUT).chmod(0o500)
    root.chmod(0o500)

    def work():
        store = open_store(root)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert store.load(KEY) == compiled_of(1)
            assert not publish(store, 2, CacheKey(tiny.SYMBOL, "1" * 32))
            assert not publish(store, 3, CacheKey(tiny.SYMBOL, "2" * 32))
            assert store.load(KEY) == compiled_of(1)
        assert len(caught) == 1

    try:
        assert in_child(work, as_nobody=True) == 0
    finally:
        (root / cache.LAYOUT).chmod(0o700)
        root.chmod(0o700)


def test_unreadable_entries_are_misses(public_folder):
    # B-128
    root = public_folder / "kernels"
    publish(open_store(root))
    owned_by_nobody(root)
    entry = open_store(root).path(KEY)
    for path in entry.iterdir():
        path.chmod(0)

    def work():
        store = open_store(root)
        assert store.load(KEY) is None
        assert publish(store)
        assert store.load(KEY) == compiled_of(1)

    assert in_child(work, as_nobody=True) == 0


def test_no_home_and_no_temporary_folder(public_folder):
    # B-127
    public_folder.chmod(0o555)

    def work():
        store = open_store(public_folder / "missing" / "kernels")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert store.load(KEY) is None
            assert not publish(store)
            assert store.load(KEY) is None
        assert len(caught) == 1

    assert in_child(work, as_nobody=True) == 0


def test_a_build_that_cannot_be_remembered_is_asked_for_and_warned_about(public_folder, monkeypatch):
    public_folder.chmod(0o555)
    monkeypatch.setattr(compiler, "nvrtc_build", lambda: BUILD)
    monkeypatch.setattr(compiler, "nvrtc_path", lambda: __file__)
    monkeypatch.setattr(driver, "bindings_version", lambda: "13.0.0")

    def work():
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert KernelCache(public_folder / "kernels", BOUND).nvrtc_build == BUILD
        assert len(caught) == 1

    assert in_child(work, as_nobody=True) == 0


@pytest.mark.skipif(os.name != "posix" or os.geteuid() != 0, reason="makes files of two users, which only root can")
def test_a_damaged_entry_that_another_user_left_is_moved_out_of_the_way(public_folder):
    # B-128: as after ``sudo python``; the folder cannot be emptied, but its name can be freed.
    root = public_folder / "kernels"
    publish(open_store(root))
    entry = open_store(root).path(KEY)
    for path in (root, entry.parent):
        os.chown(path, 65534, 65534)
    (entry / "kernel.cubin").chmod(0o644)
    (entry / "kernel.cubin").write_bytes(b"damaged")

    def work():
        store = open_store(root)
        assert store.load(KEY) is None
        assert publish(store)
        assert store.load(KEY) == compiled_of(1)

    assert in_child(work, as_nobody=True) == 0
