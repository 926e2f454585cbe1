"""The Hopper family's host side: which calls it takes, its tensor maps, parameters and grid."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cuflash
from cuflash import counters, driver, jit, kernels
from cuflash.arch import ARCHES, sm90
from cuflash.checks import MAX_BATCH_HEADS, make_request
from cuflash.errors import UnsupportedError
from cuflash.explanation import as_if_on_gpu
from cuflash.params import fast_div
from cuflash.problem import DTYPES, MASKS, AttentionProblem
from cuflash.request import MAX_WORK_TILES, Request
from cuflash.sm80_config import Sm80Config
from cuflash.sm90_config import Sm90Config
from tests.unit import fake_gpu
from tests.unit.fake_gpu import FakeGpu

pytest.importorskip("cupy")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGpu]:
    """A Hopper GPU that only takes notes."""
    installed = fake_gpu.install(monkeypatch, execute=False)
    yield installed
    fake_gpu.remove(installed)


# --- which calls -----------------------------------------------------------------------------------------------


def call(gpu: FakeGpu, change: dict[str, Any]) -> dict[str, Any]:
    """q, k, v and out of a call of which one thing is out of the ordinary."""

    def array(i: int, name: str, length: int, dim: int) -> Any:
        step = change.get(f"{name}_dim_stride", 2)
        head = change.get(f"{name}_head_stride", 2 * dim)
        seq = change.get(f"{name}_seq_stride", 4 * dim)
        strides = (change.get(f"{name}_batch_stride", length * 4 * dim), seq, head, step)
        return gpu.at((i << 52) + change.get(name, 0), (2, length, 2, dim), strides=strides)

    dim, dim_v = change.get("dim", 64), change.get("dim_v", change.get("dim", 64))
    dims = {"q": dim, "k": dim, "v": dim_v, "out": dim_v}
    return {n: array(i, n, 300 if n in ("q", "out") else 500, dims[n]) for i, n in enumerate(dims, 1)}


NAMES = ("q", "k", "v", "out")
EVERY_OTHER = {"dim": 4, "head": 256, "seq": 512, "batch": 2**20}
"""Strides of an array whose rows are every other element."""


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({}, None),
        *(({"dim": dim}, None) for dim in (8, 40, 256)),
        ({"dim_v": 128}, None),
        *(({name: 16}, None) for name in NAMES),
        *(({f"{name}_seq_stride": 2**39}, None) for name in NAMES),
        ({"dim": 60}, "head dim 60, which is no multiple of 8"),
        ({"dim_v": 4}, "head dim of v 4, which"),
        *(({name: 8}, f"the address of {name}, which is no multiple of 16") for name in NAMES),
        *(({f"{name}_{axis}_stride": stride for axis, stride in EVERY_OTHER.items()}, f"the last axis of {name}")
          for name in NAMES),
        *(
            ({f"{name}_{axis}_stride": stride}, f"the {full} stride of {name}, {stride} bytes")
            for name, (axis, full), stride in product(
                ("q", "k", "v"),
                (("batch", "batch"), ("seq", "seq"), ("head", "heads")),
                (0, -(2**20), 2**40, 2**20 + 8),
            )
        ),
        ({"out_seq_stride": -256, "out_batch_stride": 2**20}, "the seq stride of out, -256 bytes"),
    ],
    ids=str,
)  # fmt: skip
def test_what_tma_cannot_take_goes_to_the_ampere_kernel(
    gpu: FakeGpu, change: dict[str, Any], words: str | None
) -> None:
    arrays = call(gpu, change)
    out = arrays.pop("out")
    cuflash.attention(**arrays, out=out)
    problem = gpu.launches[-1].loaded.problem
    text = str(cuflash.explain(**arrays, out=out))
    assert problem.arch == ("sm_90" if words else "sm_90a")
    if words:
        assert f"TMA cannot take {words}" in text and "Ampere-style kernel" in text
        assert "cuflash_fwd_sm80_" in text
    else:
        assert problem.access_bytes == 16
        assert "TMA cannot" not in text and "cuflash_fwd_sm90_" in text


@pytest.mark.parametrize("axis", range(3))
def test_strides_of_single_elements_do_not_matter(gpu: FakeGpu, axis: int) -> None:
    """NumPy and CuPy leave any number there; in the tensor map it must be a legal one."""
    shape, contiguous = [2, 300, 2, 64], [300 * 256, 256, 128, 2]
    shape[axis] = 1
    for stride in (0, 7, -256, 2**61):
        strides = [stride if i == axis else s for i, s in enumerate(contiguous)]
        x = gpu.at(1 << 44, tuple(shape), strides=tuple(strides))
        cuflash.attention(x, x, x)
        launch = gpu.launches[-1]
        assert launch.loaded.problem.arch == "sm_90a"
        made = launch.params["k_map"]
        for i, place in ((0, 2), (1, 0), (2, 1)):
            assert made.strides[place] == (128 if i == axis else contiguous[i])


def work_tiles_request(batch: int, heads: int, seqlen: int) -> Request:
    x = np.broadcast_to(np.zeros(64, np.float16), (1, 1, 1, 64))
    request = as_if_on_gpu(make_request((x, x, x), None, causal=False, scale=None, layout="bshd", return_lse=False))
    shape, strides = (batch, seqlen, heads, 64), (16, 16, 16, 2)
    q, k, v = (o._replace(shape=shape, strides=strides, address=1 << 40) for o in (request.q, request.k, request.v))
    return dataclasses.replace(request, q=q, k=k, v=v)


def test_more_work_tiles_than_32_bits_count() -> None:
    assert work_tiles_request(1, MAX_WORK_TILES, 1).tma_refusal is None
    assert work_tiles_request(MAX_WORK_TILES // 2, 2, 64).tma_refusal is None
    for sizes in ((1, MAX_BATCH_HEADS, 1), (MAX_WORK_TILES // 2, 2, 65)):
        assert "query tiles" in str(work_tiles_request(*sizes).tma_refusal)


def test_scales_that_come_first_are_served_too(gpu: FakeGpu) -> None:
    arrays = call(gpu, {})
    del arrays["out"]
    cuflash.attention(**arrays, scale=-1.0)
    launch = gpu.launches[0]
    assert launch.loaded.problem.scale_first and launch.loaded.problem.arch == "sm_90a"
    assert launch.params["inverse_scale"] == 1.0


def test_rows_that_are_far_apart(gpu: FakeGpu) -> None:
    """The 32-bit offsets of the Ampere-style loads are no limit here."""
    x = gpu.at(1 << 50, (1, 300, 1, 64), strides=(1 << 39, 1 << 30, 128, 2))
    cuflash.attention(x, x, x)
    assert gpu.launches[0].loaded.problem == AttentionProblem(64, 64, "float16", "full", 16, False, "sm_90a")


def test_other_generations_have_no_such_kernels(gpu: FakeGpu) -> None:
    gpu.capability = (10, 0)
    arrays = call(gpu, {})
    del arrays["out"]
    cuflash.attention(**arrays)
    assert gpu.launches[0].loaded.problem.arch == "sm_100" and not gpu.encoded


# --- the override ----------------------------------------------------------------------------------------------


def test_a_family_can_be_asked_for(gpu: FakeGpu) -> None:
    arrays = call(gpu, {})
    del arrays["out"]
    cuflash.attention(**arrays)
    with kernels.use_family("forward_sm80"):
        assert not jit.PLANS
        cuflash.attention(**arrays)
        text = str(cuflash.explain(**arrays))
    assert not jit.PLANS
    cuflash.attention(**arrays)
    assert [launch.loaded.problem.arch for launch in gpu.launches] == ["sm_90a", "sm_90", "sm_90a"]
    assert "forward_sm80 is asked for" in text and "TMA cannot" not in text
    assert len(gpu.compiled) == 2, "kernels stay loaded"


def test_the_family_is_given_back_after_an_error() -> None:
    with pytest.raises(RuntimeError), kernels.use_family("forward_sm80"):
        raise RuntimeError
    assert kernels.family_in_use() is None
    with kernels.use_family("forward_sm80"), kernels.use_family("forward_sm90"):
        assert kernels.family_in_use() == "forward_sm90"
    assert kernels.family_in_use() is None
    with pytest.raises(KeyError, match="forward_sm70"), kernels.use_family("forward_sm70"):
        pass


def test_a_family_that_cannot_take_a_call_refuses_it(gpu: FakeGpu) -> None:
    arrays = call(gpu, {"k_seq_stride": 0})
    del arrays["out"]
    with kernels.use_family("forward_sm90"):
        with pytest.raises(
            UnsupportedError, match="forward_sm90 is asked for, and TMA cannot take the seq stride of k"
        ):
            cuflash.attention(**arrays)
        assert cuflash.explain(**arrays).rule == "UnsupportedError"
        gpu.capability = (8, 0)
        with pytest.raises(UnsupportedError, match="has no kernels for sm_80"):
            cuflash.attention(**arrays)
    assert not gpu.launches


# --- the launch ------------------------------------------------------------------------------------------------


def test_launch_parameters(gpu: FakeGpu) -> None:
    q = gpu.at(1 << 40, (2, 300, 6, 128), fake_gpu.bfloat16())
    k = gpu.at(2 << 40, (2, 500, 2, 128), fake_gpu.bfloat16())
    v = gpu.at(3 << 40, (2, 500, 2, 64), fake_gpu.bfloat16())
    gpu.streams[0] = 1234567
    cuflash.attention(q, k, v, causal=True)
    (launch,) = gpu.launches
    problem, config = launch.loaded.problem, launch.loaded.config
    assert problem == AttentionProblem(128, 64, "bfloat16", "causal", 16, False, "sm_90a")
    assert isinstance(config, Sm90Config) and config == kernels.select_config(problem)
    assert launch.block == (config.threads, 1, 1) and launch.smem_bytes == config.smem_bytes(problem)
    assert launch.grid == (gpu.multiprocessors, 1, 1) and launch.stream == 1234567
    p = launch.params
    made = fake_gpu.TensorMap
    assert p["q_map"] == made(1 << 40, "bfloat16", (128, 300, 6, 2), (1536, 256, 300 * 1536), 64)
    assert p["k_map"] == made(2 << 40, "bfloat16", (128, 500, 2, 2), (512, 256, 500 * 512), config.block_n)
    assert p["v_map"] == made(3 << 40, "bfloat16", (64, 500, 2, 2), (256, 128, 500 * 256), config.block_n)
    assert p["out_map"] == made(7 << 40, "bfloat16", (64, 300, 6, 2), (768, 128, 300 * 768), 64)
    assert (p["out"], p["lse"], p["tile_counter"]) == (7 << 40, 0, 0)
    assert [p[f"out_{axis}_stride"] for axis in ("batch", "seq", "head")] == [300 * 384, 384, 64]
    assert (p["heads"], p["group"], p["batch_heads"]) == (fast_div(6), fast_div(3), 12)
    assert p["m_tiles"] == -(-300 // config.block_m) and p["tiles"] == 12 * p["m_tiles"]
    assert p["section"] == p["last_section"] == fast_div(12) and p["section_tiles"] == fast_div(p["tiles"])
    assert (p["seqlen_q"], p["seqlen_k"], p["causal_offset"]) == (300, 500, 200)
    assert p["inverse_scale"] == pytest.approx(1 / p["scale_log2"])
    cuflash.attention(q, k, v, causal="top_left", return_lse=True)
    assert gpu.launches[1].params["causal_offset"] == 0 and gpu.launches[1].params["lse"] != 0
    cuflash.attention(q, k, v)
    assert gpu.launches[2].params["section"] == fast_div(1)


def test_layouts_are_strides(gpu: FakeGpu) -> None:
    x = gpu.at(1 << 40, (2, 6, 300, 64))
    cuflash.attention(x, x, x, layout="bhsd")
    made = gpu.launches[0].params["q_map"]
    assert made.extents == (64, 300, 6, 2) and made.strides == (128, 300 * 128, 6 * 300 * 128)


@settings(max_examples=40)
@given(
    batch=st.integers(1, 5), heads_k=st.integers(1, 5), group=st.integers(1, 7), causal=st.booleans(),
    lengths=st.tuples(st.integers(1, 700), st.integers(1, 200_000)), multiprocessors=st.integers(1, 200),
)  # fmt: skip
def test_the_tiles_cover_the_call_once(batch, heads_k, group, causal, lengths, multiprocessors) -> None:
    with pytest.MonkeyPatch.context() as patch:
        gpu = fake_gpu.install(patch, execute=False, multiprocessors=multiprocessors)
        try:
            q = gpu.at(1 << 40, (batch, lengths[0], heads_k * group, 64))
            k, v = (gpu.at(i << 40, (batch, lengths[1], heads_k, 64)) for i in (2, 3))
            cuflash.attention(q, k, v, causal=causal)
        finally:
            fake_gpu.remove(gpu)
    (launch,) = gpu.launches
    work = [(tile.batch_head, tile.m_tile) for tile in fake_gpu.work_of(launch)]
    m_tiles = -(-lengths[0] // launch.loaded.config.block_m)
    assert len(set(work)) == len(work) and set(work) == set(product(range(batch * heads_k * group), range(m_tiles)))
    assert launch.grid == (min(multiprocessors, len(work)), 1, 1)


def test_many_tiles_are_one_launch(gpu: FakeGpu) -> None:
    """B-046: where the Ampere-style kernels need several."""
    cuflash.attention(*(gpu.at(i << 42, (1, 20_000_000, 1, 64)) for i in (1, 2, 3)))
    (launch,) = gpu.launches
    assert launch.params["tiles"] == -(-20_000_000 // launch.loaded.config.block_m)


# --- tensor maps are remembered ---------------------------------------------------------------------------------


def test_known_addresses_are_not_encoded_again(gpu: FakeGpu) -> None:
    q, k, v = (gpu.at(i << 40, (1, 128, 8, 64)) for i in (1, 2, 3))
    outs = [gpu.at(i << 40, (1, 128, 8, 64)) for i in (4, 5)]
    for _ in range(3):
        for out in outs:
            cuflash.attention(q, k, v, out=out)
    assert gpu.encoded == [i << 40 for i in (1, 2, 3, 4, 5)]
    assert [launch.params["out_map"].address >> 40 for launch in gpu.launches] == [4, 5] * 3


def test_maps_of_one_address_differ_by_geometry(gpu: FakeGpu) -> None:
    """Memory is given back and taken again for arrays of other sizes."""
    for n in (100, 200, 100):
        cuflash.attention(*(gpu.at(i << 40, (1, n, 8, 64)) for i in (1, 2, 3)))
        assert gpu.launches[-1].params["k_map"].extents[1] == n
    assert len(gpu.encoded) == 8


@pytest.mark.parametrize("moved", ["q", "k", "v", "out", "lse", "tile_counter"])
def test_each_address_is_that_of_the_call(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch, moved: str) -> None:
    """After a call of the same plan that differs in one alone, whose prepared launch is not for this one."""
    counter = 512
    monkeypatch.setattr(counters, "take", lambda device, stream: counter)
    shape = (1, 1024, 8, 64)
    arrays = {name: gpu.at(i << 40, shape) for i, name in enumerate(("q", "k", "v", "out"), 1)}

    def launched() -> dict[str, Any]:
        cuflash.attention(**arrays, causal=True, return_lse=True)
        return gpu.launches[-1].params

    first = launched()
    assert launched() == first and len(jit.prepared) == 1 and first["tile_counter"] == 512
    if moved == "lse":
        gpu.offset = 1 << 20
    elif moved == "tile_counter":
        counter = 1024
    else:
        arrays[moved] = gpu.at(16 << 40, shape)
    found = launched()
    assert len(jit.prepared) == 2 and len(jit.PLANS) == 1
    jit.prepared.clear()
    assert found == launched() != first and found[moved] != first[moved]


def test_the_memory_of_maps_is_bounded(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jit, "MAX_PREPARED", 8)
    k, v = (gpu.at(i << 40, (1, 128, 8, 64)) for i in (2, 3))
    for i in range(50):
        cuflash.attention(gpu.at((1 << 44) + (i << 20), (1, 128, 8, 64)), k, v)
        assert gpu.launches[-1].params["q_map"].address == (1 << 44) + (i << 20)
    assert len(jit.prepared) == len(jit._tensor_maps) == 8


def test_threads_share_the_maps(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each launch has the maps of its own addresses, while the oldest ones go."""
    monkeypatch.setattr(jit, "MAX_PREPARED", 5)
    meet = threading.Barrier(8)

    def work(seed: int) -> None:
        meet.wait(10)
        for i in range(40):
            q, k, v = (gpu.at(((seed * 7 + i) % 11 + 1 << 44) + (j << 40), (1, 64, 2, 64)) for j in range(3))
            cuflash.attention(q, k, v)

    with ThreadPoolExecutor(8) as pool:
        for future in [pool.submit(work, seed) for seed in range(8)]:
            future.result()
    assert len(gpu.launches) == 320
    for launch in gpu.launches:
        q, k, v = (launch.params[f"{name}_map"].address for name in ("q", "k", "v"))
        assert (k - q, v - q) == (1 << 40, 2 << 40)


def test_a_thread_without_a_context_gets_one_before_it_makes_tensor_maps(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """cuTensorMapEncodeTiled needs a current context, which a thread that CUDA does not know lacks."""
    at_home: set[int] = set()
    encode = gpu.encode_tensor_map

    def encode_with_context(*args: Any) -> bytes:
        assert threading.get_ident() in at_home
        return encode(*args)

    monkeypatch.setattr(driver, "ensure_context", lambda device: at_home.add(threading.get_ident()))
    monkeypatch.setattr(driver, "encode_tensor_map", encode_with_context)

    def call(base: int) -> None:
        q, k, v = (gpu.at(base + (i << 30), (1, 64, 2, 64)) for i in range(3))
        cuflash.attention(q, k, v, out=gpu.at(base + (3 << 30), (1, 64, 2, 64)))

    call(1 << 40)  # plans, and makes maps for these addresses
    with ThreadPoolExecutor(1) as fresh:
        fresh.submit(call, 2 << 40).result()
    assert len(gpu.launches) == 2 and len(at_home) == 2


def test_explain_serves_an_empty_call_as_attention_does(gpu: FakeGpu) -> None:
    q, k = gpu.at(1 << 40, (1, 0, 2, 60)), gpu.at(2 << 40, (1, 5, 2, 60))
    with kernels.use_family("forward_sm90"):
        assert cuflash.attention(q, k, k).shape == q.shape
        assert cuflash.explain(q, k, k).refused is None


# --- sections --------------------------------------------------------------------------------------------------


def section(
    lengths: tuple[int, int],
    batch_heads: int = 1 << 14,
    group: int = 1,
    d: int = 64,
    mask: Any = "causal",
    multiprocessors: int = 132,
) -> int:
    problem = AttentionProblem(d, d, "bfloat16", mask, 16, False, "sm_90a")
    config = kernels.select_config(problem)
    return kernels.persistent_grid(problem, config, batch_heads, group, *lengths, multiprocessors).section


def test_a_section_has_seven_waves() -> None:
    """The power of two of groups with at least as many work tiles; d 64 has tiles of 192 rows. K and V fit no L2."""
    many = 1 << 20  # keys: 256 MiB a head
    for m_tiles, heads in ((1000, 1), (924, 1), (923, 2), (462, 2), (461, 4), (231, 4), (230, 8), (116, 8), (115, 16)):
        assert section((192 * m_tiles, many)) == heads
        assert section((192 * m_tiles - 191, many)) == heads
        for group in (2, 3, 8):
            groups = section((192 * m_tiles, many), 840, group) // group
            assert section((192 * m_tiles, many), 840, group) == groups * group and groups & (groups - 1) == 0
            assert groups * group * m_tiles >= 924 > groups // 2 * group * m_tiles
    assert section((192 * 1000, many), multiprocessors=144) == 2


def test_a_key_tile_has_eight_readers() -> None:
    """However short the queries are: no more groups side by side than leave each 8 multiprocessors."""
    many = 1 << 20
    for m_tiles in (1, 2, 57):
        assert section((192 * m_tiles, many)) == 16
        assert section((192 * m_tiles, many), multiprocessors=114) == 14
    assert section((1, many), group=5) == 80
    assert section((1, many), group=5, multiprocessors=7) == 5  # what the L2 holds, one group at least


def test_a_section_is_at_least_what_the_l2_holds() -> None:
    for d, length, heads in ((64, 1 << 12, 32), (64, 1 << 13, 16), (128, 1 << 10, 64), (128, 3 << 10, 16)):
        assert section((length, length), d=d) == max(heads, section((length, 1 << 20), d=d))
        assert section((1 << 20, length), d=d) == heads
        assert section((1 << 20, length), d=d, group=3) == 3 * heads


def test_a_section_has_no_more_heads_than_there_are() -> None:
    for heads in (1, 5, 15):
        assert section((1, 1 << 20), heads) == section((1, 1), heads) == heads
    assert section((1, 1), mask="full") == section((1 << 20, 1 << 20), mask="full") == 1


# --- configs ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mask", MASKS)
def test_every_head_dim_has_a_config_that_fits(mask: Any) -> None:
    limit = ARCHES["sm_90a"].smem_per_block
    for d, dv in product(range(8, 257, 8), repeat=2):
        problem = AttentionProblem(d, dv, "bfloat16", mask, 16, False, "sm_90a")
        config = kernels.select_config(problem)
        assert isinstance(config, Sm90Config) and config.reason and config.slack == {"full": 2, "causal": 8}[mask]
        assert config.smem_bytes(problem) <= limit
        for region in config.smem(problem):
            if region.name[0] in "qkv":  # tiles, whose swizzle spans 1024 bytes
                assert region.offset % 1024 == region.size % 1024 == 0
            assert region.offset % 16 == 0
        # wgmma: N in steps of 8, P V in k-steps of 16 keys; a TMA box has at most 256 rows.
        assert config.block_n % 16 == 0 and config.block_n <= 256 and config.block_m <= 256


def test_the_shared_memory_map() -> None:
    config = Sm90Config(block_m=128, block_n=80, stages=2, q_stages=2, ping_pong=True, tma_store=True)
    problem = AttentionProblem(96, 192, "bfloat16", "full", 16, False, "sm_90a")
    sizes = {region.name: region.size for region in config.smem(problem)}
    assert list(sizes) == ["q0", "q1", "k0", "k1", "v0", "v1", "softmax_reference", "work", "barriers"]
    assert sizes["q0"] == 128 * 384 and sizes["k1"] == 80 * 256 and sizes["v0"] == 80 * 384
    assert (sizes["softmax_reference"], sizes["work"], sizes["barriers"]) == (512, 48, 8 * (6 + 8 + 12))
    from_registers = dataclasses.replace(config, tma_store=False, q_stages=1)
    assert from_registers.smem(problem)[0].size == 128 * 256
    assert sum(sizes.values()) == config.smem_bytes(problem)


@pytest.mark.parametrize("block_m", [64, 128, 192])
def test_registers_are_what_a_block_has(block_m: int) -> None:
    config = Sm90Config(block_m=block_m, block_n=64, stages=2, q_stages=1, ping_pong=False, tma_store=False)
    assert config.warps == block_m // 16 and config.threads == 128 * (block_m // 64 + 1)
    total = 128 * (config.producer_registers + config.consumers * config.consumer_registers)
    at_launch = 65536 // config.threads // 8 * 8 * config.threads
    assert total <= at_launch and config.producer_registers % 8 == config.consumer_registers % 8 == 0


def test_labels_tell_configs_apart() -> None:
    base = Sm90Config(block_m=128, block_n=128, stages=2, q_stages=2, ping_pong=True, tma_store=True, dynamic=True)
    assert base.label == "m128n128s2q2r0ptdl2"
    changes: list[dict[str, Any]] = [
        {"block_m": 192}, {"block_n": 64}, {"stages": 3}, {"q_stages": 1, "tma_store": False}, {"q_registers": 8},
        {"ping_pong": False},
        {"tma_store": False}, {"dynamic": False}, {"slack": 3}, {"exact": True},
    ]  # fmt: skip
    labels = {dataclasses.replace(base, **change).label for change in ({}, *changes)}
    assert len(labels) == len(changes) + 1
    assert (
        dataclasses.replace(base, exact=True, dynamic=False, ping_pong=False, tma_store=False).label
        == "m128n128s2q2r0x"
    )


@pytest.mark.parametrize(
    ("change", "words"),
    [({"block_m": 96}, "64, 128 and 192"), ({"block_m": 256}, "64, 128 and 192"), ({"q_stages": 4}, "1, 2 and 3"),
     ({"q_stages": 1}, "tma_store needs q_stages=2"), ({"slack": 9}, "numbers up to 8")],
)  # fmt: skip
def test_configs_that_no_kernel_has(change: dict[str, int], words: str) -> None:
    base = Sm90Config(block_m=128, block_n=128, stages=2, q_stages=2, ping_pong=True, tma_store=True)
    with pytest.raises(ValueError, match=words):
        dataclasses.replace(base, **change)


def test_neither_family_takes_more_slack_than_the_softmax_has() -> None:
    with pytest.raises(ValueError, match="slack is 9; accepted are numbers up to 8"):
        Sm80Config(block_m=64, block_n=64, warps=4, stages=2, q_registers=0, ctas=1, slack=9)


def test_narrow_accesses_are_for_the_other_family() -> None:
    with pytest.raises(UnsupportedError, match="no 8-byte accesses: those of sm_90 do"):
        sm90.forward_config(AttentionProblem(60, 60, "float16", "full", 8, False, "sm_90a"))


def test_shipped_kernels() -> None:
    shipped = list(kernels.shipped_problems("sm_90a"))
    assert {problem.access_bytes for problem in shipped} == {16}
    short = [problem for problem in shipped if problem.short]
    assert {(problem.head_dim, problem.mask) for problem in short} == {(32, "causal"), (64, "causal")}
    assert all(variant in shipped for problem in shipped for variant in kernels.variants_by_length(problem))
    forward = [problem for problem in shipped if problem.task == "forward" and not problem.input_dtype]
    short = [problem for problem in forward if problem.short]
    assert len(forward) == len(kernels.SHIPPED_HEAD_DIMS) * len(DTYPES) * len(MASKS) + 3 * len(MASKS) + len(short)
    symbols = {kernels.symbol(problem, kernels.select_config(problem)) for problem in forward}
    assert len(symbols) == len(forward) and all(symbol.startswith("cuflash_fwd_sm90_d") for symbol in symbols)


@pytest.mark.parametrize(("seqlen_q", "short"), [(1, True), (1024, True), (1025, False), (4096, False)])
def test_few_queries_take_smaller_tiles(seqlen_q: int, short: bool) -> None:
    """Under a causal mask, up to head dim 64; whatever the number of keys."""
    for (d, dv, mask), has_row in {
        (64, 64, "causal"): True, (40, 8, "causal"): True, (64, 64, "full"): False, (64, 128, "causal"): False,
    }.items():  # fmt: skip
        problem = AttentionProblem(d, dv, "float16", mask, 16, False, "sm_90a")  # type: ignore[arg-type]
        assert sm90.is_short(problem, seqlen_q) is (short and has_row)
    few, many = (dataclasses.replace(problem, head_dim_v=64, short=short) for short in (True, False))
    assert kernels.select_config(few).block_m == 128 and kernels.select_config(many).block_m == 192
    with pytest.raises(cuflash.UnsupportedError, match="few queries"):
        kernels.select_config(dataclasses.replace(problem, short=True))


@pytest.mark.parametrize("change", [{"block_n": 24}, {"block_n": 264}, {"block_n": 0}, {"stages": 1}])
def test_impossible_tiles_are_refused(change: dict[str, int]) -> None:
    config = Sm90Config(block_m=128, block_n=128, stages=2, q_stages=2, ping_pong=True, tma_store=True)
    with pytest.raises(ValueError, match=next(iter(change))):
        dataclasses.replace(config, **change)
