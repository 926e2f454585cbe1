"""`cuflash.attention` and `cuflash.warmup` from the arguments to the launch, on a GPU made of host memory.

Ids such as "B-046" are those of public bug reports of other libraries.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import cuflash
from cuflash import kernels
from cuflash.kernels import select_config
from cuflash.problem import AttentionProblem
from tests.operands import draw_qkv
from tests.oracle import DTYPES, assert_lse, oracle, poisoned
from tests.unit import fake_gpu
from tests.unit.fake_gpu import FakeGpu

CAUSAL = (False, "bottom_right", "top_left")
GPU_DTYPES = ("float16", "bfloat16")


@pytest.fixture(params=[(8, 0), (9, 0)], ids=["sm_80", "sm_90"])
def gpu(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[FakeGpu]:
    """A GPU that computes; of each generation that has kernels of its own."""
    installed = fake_gpu.install(monkeypatch, capability=request.param)
    yield installed
    fake_gpu.remove(installed)


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGpu]:
    """A GPU that only takes notes, for arrays of memory that does not exist; test_tma.py has the same for Hopper."""
    installed = fake_gpu.install(monkeypatch, execute=False, capability=(8, 0))
    yield installed
    fake_gpu.remove(installed)


def draw(seed: int, lengths: tuple[int, int], heads=(2, 2), dims=(16, 16), dtype="float16", batch=1):
    """q, k, v in the layout bshd, in host memory."""
    return draw_qkv(np.random.default_rng(seed), lengths, heads, dims, dtype, batch)


def bhsd(*arrays: np.ndarray) -> list[np.ndarray]:
    return [x.swapaxes(1, 2) for x in arrays]


def assert_exact(out: np.ndarray, lse: np.ndarray | None, q, k, v, causal=False, scale=None) -> None:
    """The fake kernel computes in float64: what it returns is the oracle's result, rounded once, all in bshd."""
    expected, expected_lse = oracle(*bhsd(q, k, v), causal=causal, scale=scale)
    ulp = 2.0**-10 if out.dtype == np.float16 else 2.0**-7
    scale_error = 1e-6 * np.abs(v.astype(np.float64)).max(initial=0.0)  # scale_log2 is a float32
    np.testing.assert_allclose(
        out.swapaxes(1, 2).astype(np.float64), expected, rtol=ulp, atol=1e-6 + 1000 * scale_error * (scale is not None)
    )
    if lse is not None:
        np.testing.assert_allclose(lse, expected_lse, rtol=1e-5, atol=1e-5)


# --- results ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", GPU_DTYPES)
@pytest.mark.parametrize("causal", CAUSAL)
@pytest.mark.parametrize("lengths", [(1, 1), (33, 33), (70, 150), (150, 70), (1, 129), (129, 1)], ids=str)
def test_results(gpu: FakeGpu, lengths: tuple[int, int], causal: Any, dtype: str) -> None:
    q, k, v = draw(0, lengths, (6, 2), (64, 32), dtype, batch=2)
    out, lse = cuflash.attention(*map(gpu.array, (q, k, v)), causal=causal, return_lse=True)
    assert out.shape == (2, lengths[0], 6, 32) and out.dtype == q.dtype and type(out) is gpu.cupy.ndarray
    assert lse.shape == (2, 6, lengths[0]) and lse.dtype == np.float32
    assert_exact(gpu.host(out), gpu.host(lse), q, k, v, causal)


def test_true_is_bottom_right(gpu: FakeGpu) -> None:
    arrays = [gpu.array(x) for x in draw(1, (20, 50))]
    results = [gpu.host(cuflash.attention(*arrays, causal=c)) for c in (True, "bottom_right", "top_left", False)]
    assert np.array_equal(results[0], results[1])
    assert not np.array_equal(results[0], results[2]) and not np.array_equal(results[0], results[3])


def test_layouts_need_no_copies(gpu: FakeGpu) -> None:
    q, k, v = draw(2, (40, 30), (4, 2))
    out = cuflash.attention(*map(gpu.array, bhsd(q, k, v)), layout="bhsd", causal=True)
    assert out.shape == (1, 4, 40, 16) and out.flags.c_contiguous
    assert_exact(gpu.host(out).swapaxes(1, 2), None, q, k, v, "bottom_right")
    copied = cuflash.attention(*map(gpu.array, map(np.ascontiguousarray, bhsd(q, k, v))), layout="bhsd", causal=True)
    assert np.array_equal(gpu.host(copied), gpu.host(out))
    (views, copies) = gpu.launches
    assert (views.params["q"], copies.params["q"]) != (0, 0)
    steps = [p.get("q_seq_stride") or p["q_map"].strides[0] // 2 for p in (views.params, copies.params)]
    assert steps == [4 * 16, 16]


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(data=st.data())
def test_any_strides(gpu: FakeGpu, data: st.DataObject) -> None:
    """B-049, B-050, B-052, B-053, B-055: every array has strides, signs, gaps and an alignment of its own."""
    draw_int = lambda low, high: data.draw(st.integers(low, high))  # noqa: E731
    batch, heads_k, group = draw_int(1, 2), draw_int(1, 2), draw_int(1, 3)
    lengths, dims = (draw_int(1, 70), draw_int(1, 70)), (draw_int(1, 40), draw_int(1, 40))
    dtype = data.draw(st.sampled_from(GPU_DTYPES))
    layout = data.draw(st.sampled_from(("bshd", "bhsd")))
    arrays = draw(draw_int(0, 99), lengths, (heads_k * group, heads_k), dims, dtype, batch)
    given_out = poisoned((batch, lengths[0], heads_k * group, dims[1]), DTYPES[dtype])
    placed = [scattered(data, x if layout == "bshd" else x.swapaxes(1, 2)) for x in (*arrays, given_out)]
    q, k, v, out = (gpu.array(x) for x in placed)
    causal = data.draw(st.sampled_from(CAUSAL))
    assert cuflash.attention(q, k, v, causal=causal, layout=layout, out=out) is out
    result = placed[3] if layout == "bshd" else placed[3].swapaxes(1, 2)
    assert_exact(result, None, *arrays, causal)


def scattered(data: st.DataObject, values: np.ndarray) -> np.ndarray:
    """The values in memory of any axis order, gaps, directions and start."""
    order = data.draw(st.permutations(range(4)))
    gaps = [data.draw(st.sampled_from((1, 1, 1, 2, 3))) for _ in range(4)]
    start = data.draw(st.integers(0, 9))
    sizes = [values.shape[axis] * gaps[axis] for axis in order]
    memory = np.zeros(start + math.prod(sizes), values.dtype)[start:].reshape(sizes)
    view = memory.transpose(np.argsort(order))[tuple(slice(None, None, gap) for gap in gaps)]
    view = view[tuple(slice(None, None, data.draw(st.sampled_from((1, 1, -1)))) for _ in range(4))]
    view[...] = values
    return view


def test_broadcast_inputs(gpu: FakeGpu) -> None:
    """B-061, B-131: zero strides, and never the plan of another layout."""
    q, k, v = draw(3, (20, 30), (4, 4), batch=3)
    first = [x[:1, :, :1] for x in (k, v)]
    spread = [np.broadcast_to(x, k.shape) for x in first]
    for inputs in ((q, k, v), (q, *spread), (q, k, spread[1])):
        assert_exact(gpu.host(cuflash.attention(*map(gpu.array, inputs))), None, *inputs)
    assert gpu.launches[1].params["k_head_stride"] == gpu.launches[1].params["k_batch_stride"] == 0


@pytest.mark.parametrize("scale", [0, -0.7, 1e-40, 1e-33, -1e-3, 0.25, 37.0, np.float32(0.5), True, np.True_])
def test_scales(gpu: FakeGpu, scale: Any) -> None:
    q, k, v = draw(4, (30, 40))
    out, lse = cuflash.attention(*map(gpu.array, (q, k, v)), scale=scale, return_lse=True)
    assert_exact(gpu.host(out), gpu.host(lse), q, k, v, scale=float(scale))


def test_scale_is_not_remembered(gpu: FakeGpu) -> None:
    """B-130: successive calls keep their own scale, and share one kernel."""
    q, k, v = draw(5, (20, 20))
    arrays = [gpu.array(x) for x in (q, k, v)]
    for scale in (0.125, 3.0, None, 0.125):
        assert_exact(gpu.host(cuflash.attention(*arrays, scale=scale)), None, q, k, v, scale=scale)
    assert len(gpu.compiled) == 1


def test_default_scale_is_that_of_the_real_head_dim(gpu: FakeGpu) -> None:
    """B-110."""
    q, k, v = draw(6, (20, 20), dims=(80, 24))
    cuflash.attention(*map(gpu.array, (q, k, v)))
    assert gpu.launches[0].params["scale_log2"] == np.float32(math.log2(math.e) / math.sqrt(80))


def test_growing_keys_compile_once(gpu: FakeGpu) -> None:
    """B-107, B-131: a decoding loop."""
    q, k, v = draw(7, (1, 40), (4, 2))
    for n in range(1, 41):
        out = cuflash.attention(gpu.array(q), *(gpu.array(x[:, :n]) for x in (k, v)), causal=True)
        assert_exact(gpu.host(out), None, q, k[:, :n], v[:, :n], "bottom_right")
    assert len(gpu.compiled) == 1


# --- empty -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("causal", CAUSAL)
@pytest.mark.parametrize("zero", ["batch", "queries", "keys", "heads", "all"])
@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_empty_inputs(gpu: FakeGpu, zero: str, causal: Any, layout: str) -> None:
    """B-028: nothing is launched; a query without keys gets 0 and -inf."""
    extent = {"batch": 2, "queries": 5, "keys": 7, "heads": 4}
    extent = dict.fromkeys(extent, 0) if zero == "all" else extent | {zero: 0}
    heads_k = extent["heads"] // 2
    arrays = draw(8, (extent["queries"], extent["keys"]), (extent["heads"], heads_k), (24, 8), batch=extent["batch"])
    q, k, v = arrays if layout == "bshd" else bhsd(*arrays)
    for given_out in (None, gpu.array(poisoned((*q.shape[:3], 8), q.dtype))):
        out, lse = cuflash.attention(
            *map(gpu.array, (q, k, v)), causal=causal, layout=layout, return_lse=True, out=given_out
        )
        assert out.shape == (*q.shape[:3], 8) and lse.shape == (extent["batch"], extent["heads"], extent["queries"])
        assert (gpu.host(out) == 0).all() and np.isneginf(gpu.host(lse)).all()
    assert not gpu.launches and not gpu.compiled


# --- out -------------------------------------------------------------------------------------------------------


def test_out_is_filled_and_returned(gpu: FakeGpu) -> None:
    """B-109."""
    q, k, v = draw(9, (50, 60), dims=(40, 40))
    arrays = [gpu.array(x) for x in (q, k, v)]
    plain = gpu.host(cuflash.attention(*arrays, causal=True))
    for target in (poisoned(q.shape, q.dtype), poisoned((1, 2, 50, 40), q.dtype).swapaxes(1, 2)):
        out = gpu.array(target)
        result, _ = cuflash.attention(*arrays, causal=True, out=out, return_lse=True)
        assert result is out and np.array_equal(target, plain)


def test_out_that_meets_an_input_is_refused(gpu: FakeGpu) -> None:
    """B-109: on the first call and on later ones, for addresses are not part of a plan."""
    memory = np.zeros((6, 30, 2, 16), np.float16)
    q, k, v, out = (gpu.array(memory[i : i + 1]) for i in range(4))
    cuflash.attention(q, k, v, out=out)
    for at, name in ((0, "q"), (1, "k"), (2, "v")):
        with pytest.raises(ValueError, match=f"out shares memory with {name}"):
            cuflash.attention(q, k, v, out=gpu.array(memory[at : at + 1]))
    one = memory.reshape(-1)[30 * 32 - 1 :][: 30 * 32].reshape(1, 30, 2, 16)
    with pytest.raises(ValueError, match="out shares memory with q"):
        cuflash.attention(q, k, v, out=gpu.array(one))
    assert len(gpu.launches) == 1


def test_parts_of_one_packed_array_do_not_meet(gpu: FakeGpu) -> None:
    """B-050: q, k, v and out interleaved in one array; their spans overlap, their elements do not."""
    q, k, v = draw(10, (30, 30))
    packed = np.stack([q, k, v, np.full_like(q, np.nan)], axis=3)
    parts = [gpu.array(packed[:, :, :, i]) for i in range(4)]
    for _ in range(2):
        cuflash.attention(*parts[:3], out=parts[3])
        assert_exact(packed[:, :, :, 3], None, q, k, v)


def test_out_may_end_where_an_input_starts(gpu: FakeGpu) -> None:
    memory = np.zeros((4, 10, 2, 16), np.float16)
    q, out, k, v = (gpu.array(memory[i : i + 1]) for i in range(4))
    cuflash.attention(q, k, v, out=out)
    backward = gpu.array(memory[1:2, ::-1])
    cuflash.attention(q, k, v, out=backward)
    assert len(gpu.launches) == 2


def test_memory_below_the_first_element_counts_too(gpu: FakeGpu) -> None:
    """A known call with arrays that run backwards: their memory lies before their addresses."""
    rows = np.zeros((60, 2, 16), np.float16)
    apart, half = rows[None, :10], rows[None, 25:35]
    k, v = (gpu.array(np.zeros((1, 10, 2, 16), np.float16)) for _ in range(2))
    out = rows[None, 30:40]
    for q, target, met in ((apart, out[:, ::-1], half), (apart[:, ::-1], out, rows[None, 35:45][:, ::-1])):
        cuflash.attention(gpu.array(q), k, v, out=gpu.array(target))
        with pytest.raises(ValueError, match="out shares memory with q"):
            cuflash.attention(gpu.array(met), k, v, out=gpu.array(target))
    assert len(gpu.launches) == 2


def test_refused_calls_leave_out_alone(gpu: FakeGpu) -> None:
    q, k, v = (gpu.array(x) for x in draw(11, (8, 8)))
    target = poisoned((1, 8, 2, 16), np.dtype(np.float16))
    for wrong in ({"scale": math.nan}, {"causal": "left"}, {"layout": "sbhd"}, {"return_lse": "yes"}):
        with pytest.raises((ValueError, TypeError)):
            cuflash.attention(q, k, v, out=gpu.array(target), **wrong)
    assert np.isnan(target).all() and not gpu.launches


def test_misaligned_allocators_are_served(gpu: FakeGpu) -> None:
    """An allocator that aligns to less than 16 bytes gets a kernel that can write there."""
    q, k, v = draw(12, (20, 20))
    arrays = [gpu.array(x) for x in (q, k, v)]
    for gpu.offset, access in ((0, 16), (8, 8), (4, 4), (2, 2), (0, 16)):
        out = cuflash.attention(*arrays)
        assert out.data.ptr % 16 == gpu.offset and gpu.launches[-1].loaded.problem.access_bytes == access
        assert_exact(gpu.host(out), None, q, k, v)


# --- sizes -----------------------------------------------------------------------------------------------------


def coverage(gpu: FakeGpu) -> dict[tuple[int, int], int]:
    """How often each (batch and head, query tile) is computed, by the index arithmetic of the kernel."""
    seen: dict[tuple[int, int], int] = {}
    for launch in gpu.launches:
        for work in fake_gpu.work_of(launch):
            tile = work.batch_head, work.m_tile
            seen[tile] = seen.get(tile, 0) + 1
    return seen


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(
    batch=st.integers(1, 5), heads_k=st.integers(1, 5), group=st.integers(1, 7), causal=st.booleans(),
    lengths=st.tuples(st.integers(1, 700), st.integers(1, 200_000)),
)  # fmt: skip
def test_the_grid_covers_every_tile_once(recorder: FakeGpu, batch, heads_k, group, causal, lengths) -> None:
    recorder.launches.clear()
    arrays = [
        recorder.at(1 << 40, (batch, lengths[0], heads_k * group, 64)),
        *(recorder.at(i << 40, (batch, lengths[1], heads_k, 64)) for i in (2, 3)),
    ]
    cuflash.attention(*arrays, causal=causal)
    config = recorder.launches[0].loaded.config
    tiles = -(-lengths[0] // config.block_m)
    expected = {(h, t): 1 for h in range(batch * heads_k * group) for t in range(tiles)}
    assert coverage(recorder) == expected


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shape", [(70_000, 2), (2, 70_000), (1, 65_536), (300, 300)], ids=str)
def test_many_heads(recorder: FakeGpu, shape: tuple[int, int], causal: bool) -> None:
    """B-046, B-047: more of batch and heads than a grid axis holds."""
    batch, heads = shape
    cuflash.attention(*(recorder.at(i << 40, (batch, 10, heads, 16)) for i in (1, 2, 3)), causal=causal)
    (launch,) = recorder.launches
    assert launch.params["batch_heads"] == batch * heads and launch.params["heads"][2] == heads
    assert launch.grid[0] * launch.grid[2] >= batch * heads > launch.grid[0] * (launch.grid[2] - 1)


def test_more_query_tiles_than_a_grid_axis(recorder: FakeGpu) -> None:
    """B-046: several launches, each of which begins where the one before ended."""
    cuflash.attention(*(recorder.at(i << 42, (1, 20_000_000, 1, 64)) for i in (1, 2, 3)))
    firsts = [launch.params["first_tile"] for launch in recorder.launches]
    sizes = [launch.grid[1] for launch in recorder.launches]
    assert len(firsts) > 1 and firsts == [sum(sizes[:i]) for i in range(len(sizes))]
    block_m = recorder.launches[0].loaded.config.block_m
    assert sum(sizes) == recorder.launches[0].params["m_tiles"] == -(-20_000_000 // block_m)
    pointers = {tuple(launch.params[name] for name in ("q", "k", "v", "out", "lse")) for launch in recorder.launches}
    assert len(pointers) == 1


def test_offsets_beyond_32_bits(recorder: FakeGpu) -> None:
    """B-041: strides and addresses are 64-bit all the way."""
    shape = (3, 2**22, 8, 128)
    cuflash.attention(*(recorder.at(i << 44, shape) for i in (1, 2, 3)))
    params = recorder.launches[0].params
    assert params["k_batch_stride"] == 2**32 and params["v"] == 3 << 44 and params["out_batch_stride"] == 2**32


def test_huge_strides_take_the_64_bit_kernel(recorder: FakeGpu) -> None:
    """Within a tile of 256 rows the wide kernels take 32-bit offsets."""
    for seq_bytes, access in ((2**23 - 16, 16), (2**23, 2), (-(2**23), 2), (2**40, 2)):
        strides = (1 << 50, seq_bytes, 128, 2)
        q = recorder.at(1 << 60, (1, 300, 1, 64), strides=strides)
        k, v = (recorder.at(i << 40, (1, 300, 1, 64)) for i in (2, 3))
        for arrays in ((q, k, v), (k, q, v), (k, v, q)):
            cuflash.attention(*arrays)
            assert recorder.launches[-1].loaded.problem.access_bytes == access
    assert recorder.launches[-3].params["q_seq_stride"] == 2**39


def test_negative_strides_keep_the_address_of_the_first_element(recorder: FakeGpu) -> None:
    q = recorder.at(1 << 40, (1, 10, 1, 64), strides=(-(1 << 30), -128, -64, 2))
    k, v = (recorder.at(i << 40, (1, 10, 1, 64)) for i in (2, 3))
    cuflash.attention(q, k, v)
    params = recorder.launches[0].params
    assert params["q"] == 1 << 40 and params["q_seq_stride"] == -64


def test_strides_of_single_elements_do_not_matter(recorder: FakeGpu) -> None:
    """NumPy and CuPy leave any number there."""
    odd = recorder.at(1 << 40, (1, 300, 1, 64), strides=(7, 128, 2**61 - 1, 2))
    k, v = (recorder.at(i << 40, (1, 300, 1, 64)) for i in (2, 3))
    cuflash.attention(odd, k, v)
    cuflash.attention(odd, k, v, out=recorder.at(5 << 40, (1, 300, 1, 64), strides=(1, 128, 3, 2)))
    for launch in recorder.launches:
        assert launch.loaded.problem.access_bytes == 16
        assert launch.params["q_batch_stride"] == launch.params["q_head_stride"] == 0


@pytest.mark.parametrize(
    ("change", "access"),
    [
        ({}, 16),
        ({"dim": 4}, 8),
        ({"dim": 6}, 4),
        ({"dim": 7}, 2),
        ({"dim_v": 12}, 8),
        ({"dim_v": 1}, 2),
        *(({name: offset}, offset) for name in ("q", "k", "v", "out") for offset in (2, 4, 8)),
        *(({name: 16}, 16) for name in ("q", "k", "v", "out")),
        *(({f"{name}_pitch": 64 + extra}, 2 * extra) for name in ("q", "k", "v", "out") for extra in (1, 2, 4, 8)),
        *(({f"{name}_dim_stride": 2}, 2) for name in ("q", "k", "v", "out")),
    ],
    ids=str,
)  # fmt: skip
def test_access_bytes(recorder: FakeGpu, change: dict[str, int], access: int) -> None:
    """The widest access that every pointer, stride and head dim allows, of each array in turn."""

    def array(i: int, name: str, length: int, dim: int) -> Any:
        step = change.get(f"{name}_dim_stride", 1)
        pitch = 2 * change.get(f"{name}_pitch", step * dim)
        strides = (length * 2 * pitch, 2 * pitch, pitch, 2 * step)
        return recorder.at((i << 40) + change.get(name, 0), (2, length, 2, dim), strides=strides)

    dim, dim_v = change.get("dim", 64), change.get("dim_v", change.get("dim", 64))
    q, k, v, out = (array(i, n, *rest) for i, (n, *rest) in enumerate(
        (("q", 5, dim), ("k", 9, dim), ("v", 9, dim_v), ("out", 5, dim_v)), 1
    ))  # fmt: skip
    for _ in range(2):
        cuflash.attention(q, k, v, out=out)
        assert recorder.launches[-1].loaded.problem.access_bytes == access


# --- the launch ------------------------------------------------------------------------------------------------


def test_launch_parameters(recorder: FakeGpu) -> None:
    q = recorder.at(1 << 40, (2, 300, 6, 128), fake_gpu.bfloat16())
    k = recorder.at(2 << 40, (2, 500, 2, 128), fake_gpu.bfloat16())
    v = recorder.at(3 << 40, (2, 500, 2, 64), fake_gpu.bfloat16())
    recorder.streams[0] = 1234567
    cuflash.attention(q, k, v, causal=True)
    (launch,) = recorder.launches
    problem, config = launch.loaded.problem, launch.loaded.config
    assert problem == AttentionProblem(128, 64, "bfloat16", "causal", 16, False, "sm_80")
    assert config == select_config(problem) and launch.block == (config.threads, 1, 1)
    assert launch.smem_bytes == config.smem_bytes(problem) and launch.stream == 1234567
    p = launch.params
    assert (p["q"], p["k"], p["v"], p["out"], p["lse"]) == (1 << 40, 2 << 40, 3 << 40, 7 << 40, 0)
    assert (p["heads"][2], p["group"][2], p["batch_heads"]) == (6, 3, 12)
    assert (p["seqlen_q"], p["seqlen_k"], p["causal_offset"]) == (300, 500, 200)
    assert [p[f"k_{axis}_stride"] for axis in ("batch", "seq", "head", "dim")] == [500 * 256, 256, 128, 1]
    assert [p[f"out_{axis}_stride"] for axis in ("batch", "seq", "head", "dim")] == [300 * 384, 384, 64, 1]
    assert p["inverse_scale"] == pytest.approx(1 / p["scale_log2"])
    cuflash.attention(q, k, v, causal="top_left", return_lse=True)
    assert recorder.launches[1].params["causal_offset"] == 0 and recorder.launches[1].params["lse"] != 0


@pytest.mark.parametrize(
    ("scale", "first"),
    [(0, True), (-1.0, True), (1e-31, True), (1e-30, False), (1e-4, False), (6e29, False), (1e30, True)],
)
def test_scale_first(recorder: FakeGpu, scale: float, first: bool) -> None:
    cuflash.attention(*(recorder.at(i << 40, (1, 8, 1, 64)) for i in (1, 2, 3)), scale=scale)
    (launch,) = recorder.launches
    assert launch.loaded.problem.scale_first is first
    inverse = 1.0 if first else pytest.approx(1 / launch.params["scale_log2"], rel=1e-6)
    assert launch.params["inverse_scale"] == inverse


@pytest.mark.parametrize(
    ("capability", "arch"),
    [((8, 0), "sm_80"), ((8, 7), "sm_86"), ((8, 9), "sm_89"), ((9, 0), "sm_90a"), ((12, 1), "sm_120")],
)
def test_the_kernel_is_that_of_the_device(recorder: FakeGpu, capability: tuple[int, int], arch: str) -> None:
    recorder.capability = capability
    cuflash.attention(*(recorder.at(i << 40, (1, 8, 1, 64)) for i in (1, 2, 3)))
    assert recorder.launches[0].loaded.problem.arch == arch


def test_old_devices_are_refused(recorder: FakeGpu) -> None:
    recorder.capability = (7, 5)
    with pytest.raises(cuflash.UnsupportedError, match=r"7\.5.*8\.0"):
        cuflash.attention(*(recorder.at(i << 40, (1, 8, 1, 64)) for i in (1, 2, 3)))


# --- devices ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("with_out", [False, True])
def test_the_arrays_device_is_used_and_the_current_one_restored(gpu: FakeGpu, with_out: bool) -> None:
    """B-143: on the first call and on hot ones."""
    q, k, v = draw(13, (20, 20))
    arrays = [gpu.array(x, device=1) for x in (q, k, v)]
    gpu.streams[1] = 77
    for _ in range(3):
        given = gpu.array(poisoned(q.shape, q.dtype), device=1) if with_out else None
        out, lse = cuflash.attention(*arrays, out=given, return_lse=True)
        assert gpu.device == 0 and out.data.device_id == lse.data.device_id == 1
        assert_exact(gpu.host(out), gpu.host(lse), q, k, v)
    assert {launch.stream for launch in gpu.launches} == {77} and gpu.switches == 3
    assert {launch.loaded.device for launch in gpu.launches} == {1}


def test_the_current_device_is_not_switched_to(gpu: FakeGpu) -> None:
    arrays = [gpu.array(x) for x in draw(14, (20, 20))]
    cuflash.attention(*arrays)
    cuflash.attention(*arrays)
    assert gpu.switches == 0


def test_devices_share_code_but_no_kernels(gpu: FakeGpu) -> None:
    q, k, v = draw(15, (20, 20))
    for device in (0, 1, 0, 1):
        out = cuflash.attention(*(gpu.array(x, device=device) for x in (q, k, v)))
        assert_exact(gpu.host(out), None, q, k, v)
    assert len(gpu.compiled) == 1 and [launch.loaded.device for launch in gpu.launches] == [0, 1, 0, 1]


def test_errors_restore_the_device(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    arrays = [gpu.array(x, device=1) for x in draw(16, (20, 20))]
    monkeypatch.setattr("cuflash.driver.launch", lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        cuflash.attention(*arrays)
    assert gpu.device == 0


# --- warmup ----------------------------------------------------------------------------------------------------


def test_warmup_makes_a_call_ready(gpu: FakeGpu) -> None:
    q, k, v = draw(17, (20, 20))
    arrays = [gpu.array(x) for x in (q, k, v)]
    (symbol,) = cuflash.warmup(*arrays, causal=True)
    assert "causal" in symbol and len(gpu.compiled) == 1 and not gpu.launches
    assert_exact(gpu.host(cuflash.attention(*arrays, causal=True)), None, q, k, v, "bottom_right")
    assert len(gpu.compiled) == 1


def test_warmup_of_calls_without_a_kernel(gpu: FakeGpu) -> None:
    q, k, v = draw(18, (20, 0))
    assert cuflash.warmup(*map(gpu.array, (q, k, v))) == ()
    assert cuflash.warmup(q, k, v) == ()
    with pytest.raises(ValueError, match="head dim"):
        cuflash.warmup(q[..., :3], k, v)


def test_warmup_of_configs(gpu: FakeGpu) -> None:
    symbols = cuflash.warmup(configs="common")
    short = 2 if gpu.capability == (9, 0) else 0  # kernels of their own for few queries, in two dtypes
    assert len(set(symbols)) == len(gpu.compiled) == 8 + short
    problem = AttentionProblem(40, 24, "float16", "causal", 8, True, "sm_90")
    (symbol,) = cuflash.warmup(configs=[problem], device=1)
    assert symbol.startswith("cuflash_fwd_sm80_d40_dv24_f16_causal_a8_sf") and not gpu.launches


@pytest.mark.parametrize("causal", [False, True])
def test_warmup_makes_gradients_ready(gpu: FakeGpu, causal: bool) -> None:
    """Neither the call nor its gradients compile anything afterwards, deterministic ones included."""
    arrays = [gpu.array(x) for x in draw(17, (20, 20))]
    symbols = cuflash.warmup(*arrays, causal=causal, backward=True)
    made = 4 if gpu.capability[0] == 8 else 3  # Hopper's main kernels make dQ as well
    assert len(symbols) == len(gpu.compiled) == made and not gpu.launches
    out, lse = cuflash.attention(*arrays, causal=causal, return_lse=True)
    for deterministic in (False, True):
        cuflash.attention_backward(out, *arrays, out, lse, causal=causal, deterministic=deterministic)
    assert len(gpu.compiled) == made
    launched = [kernels.symbol(one.loaded.problem, one.loaded.config) for one in gpu.launches]
    assert launched == [*symbols, *symbols[1:]]


def test_warmup_of_gradients_without_a_kernel(gpu: FakeGpu) -> None:
    q, k, v = draw(18, (20, 0))
    assert cuflash.warmup(*map(gpu.array, (q, k, v)), backward=True) == ()
    assert cuflash.warmup(q, k, v, backward=True) == ()


def test_warmup_of_common_gradients(gpu: FakeGpu) -> None:
    """What calls of common problems need afterwards is there; kernels that know no mask come once."""
    symbols = cuflash.warmup(configs="common", backward=True)
    assert len(set(symbols)) == len(symbols) == len(gpu.compiled)
    hopper = gpu.capability == (9, 0)  # whose main kernels make dQ as well
    assert [sum(stem in symbol for symbol in symbols) for stem in ("_bwd_rows_", "_bwd_dq_")] == [4, 0 if hopper else 4]
    arrays = [gpu.array(x) for x in draw(17, (20, 20), dims=(64, 64), dtype="float16")]
    assert set(cuflash.warmup(*arrays, causal=True, backward=True)) <= set(symbols)


def test_warmup_arguments(gpu: FakeGpu) -> None:
    q, k, v = (gpu.array(x) for x in draw(19, (8, 8)))
    for arguments, options in (((), {}), ((q, k, v), {"configs": "common"}), ((q, k, v), {"device": 0})):
        with pytest.raises(TypeError, match="configs="):
            cuflash.warmup(*arguments, **options)
    with pytest.raises(ValueError, match="'common'"):
        cuflash.warmup(configs="all")
    with pytest.raises(TypeError, match="backward belongs to arrays"):
        cuflash.warmup(configs=[], backward=True)
    with pytest.raises(TypeError, match="backward is 'yes'"):
        cuflash.warmup(q, k, v, backward="yes")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="device is 2"):
        cuflash.warmup(configs="common", device=2)


# --- on the CPU ------------------------------------------------------------------------------------------------


def test_numpy_calls_ask_for_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cuflash.driver._driver", lambda: pytest.fail("the driver was asked"))
    q, k, v = draw(20, (30, 40), dtype="float32")
    out, lse = cuflash.attention(q, k, v, return_lse=True)
    assert_lse(lse, *bhsd(q, k, v))
    target = poisoned(q.shape, q.dtype)
    assert cuflash.attention(q, k, v, out=target) is target and np.array_equal(target, out)
    cuflash.warmup(q, k, v)
