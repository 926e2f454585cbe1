"""Views of every kind as inputs, `out=` of every kind, and memory around the output that nobody may touch."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cuflash
from tests.gpu.support import (
    Array,
    assert_same_bits,
    assign,
    bits,
    check_attention,
    draw_qkv,
    normal,
    poisoned,
    run_python,
    swap_layout,
    to_device,
    to_host,
)
from tests.oracle import assert_accurate, assert_lse

pytestmark = pytest.mark.gpu


def _spread(x: Array, steps: tuple[int, ...], lead: int = 0) -> Array:
    """The same values in a view with `steps` (possibly negative) through a larger, poisoned array."""
    around = poisoned(tuple(n * abs(step) + lead for n, step in zip(x.shape, steps, strict=True)), x.dtype)
    cut = tuple(slice(lead, None, abs(step)) for step in steps)
    view = around[cut][tuple(slice(None, None, -1 if step < 0 else 1) for step in steps)]
    assign(view, x)
    assert view.shape == x.shape
    return view


VIEWS: dict[str, Callable[[Array], Array]] = {
    "heads-first": lambda x: swap_layout(poisoned(swap_layout(x).shape, x.dtype)),
    "sequence-step": lambda x: _spread(x, (1, 3, 1, 1)),
    "head-step": lambda x: _spread(x, (1, 1, 2, 1)),
    "reversed-sequence": lambda x: _spread(x, (1, -1, 1, 1)),
    "reversed-heads": lambda x: _spread(x, (1, 1, -2, 1)),
    "reversed-batch": lambda x: _spread(x, (-1, 1, 1, 1)),
    "odd-row-pitch": lambda x: poisoned((*x.shape[:3], x.shape[3] + 1), x.dtype)[..., :-1],
    "odd-start": lambda x: poisoned((x.size + 1,), x.dtype)[1:].reshape(x.shape),
    "pitch-of-8-bytes": lambda x: poisoned((*x.shape[:3], x.shape[3] + 4), x.dtype)[..., :-4],
    "pitch-of-4-bytes": lambda x: poisoned((*x.shape[:3], x.shape[3] + 2), x.dtype)[..., :-2],
    "last-axis-step": lambda x: _spread(x, (1, 1, 1, 2)),
    "reversed-last-axis": lambda x: _spread(x, (1, 1, 1, -1)),
    "dim-first": lambda x: poisoned(x.transpose(0, 3, 2, 1).shape, x.dtype).transpose(0, 3, 2, 1),
    "sequence-last": lambda x: poisoned(x.transpose(0, 2, 3, 1).shape, x.dtype).transpose(0, 3, 1, 2),
}


def _view(kind: str, x: Array) -> Array:
    view = VIEWS[kind](x)
    assign(view, x)
    return view


@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (40, 72)], ids=str)
@pytest.mark.parametrize("kind", VIEWS)
def test_views_of_all_three_inputs(kind: str, dims: tuple[int, int]) -> None:
    arrays = draw_qkv((130, 150), (4, 2), dims, "bfloat16", batch=2)
    check_attention(*(_view(kind, x) for x in arrays), causal=True)


@pytest.mark.parametrize("which", [0, 1, 2], ids="qkv")
@pytest.mark.parametrize(
    "kind", ["heads-first", "odd-row-pitch", "reversed-last-axis", "sequence-last", "reversed-sequence"]
)
def test_a_view_of_one_input_alone(kind: str, which: int) -> None:
    """B-052, B-055: no input is assumed to have the strides of another."""
    arrays = list(draw_qkv((130, 150), (4, 2), (64, 64), "float16", batch=2))
    arrays[which] = _view(kind, arrays[which])
    check_attention(*arrays)


@pytest.mark.parametrize("dims", [64, 128, 256])
@pytest.mark.parametrize("axis", [1, 2, 3, 4])
def test_slices_of_a_packed_array(dims: int, axis: int) -> None:
    """B-050: q, k and v in one array, their axis at any place: (B, 3, N, H, D) to (B, N, H, D, 3)."""
    shape = [2, 200, 4, dims]
    shape.insert(axis, 3)
    packed = normal(tuple(shape), "bfloat16", 0)
    check_attention(*(packed[(slice(None),) * axis + (i,)] for i in range(3)), causal=True)


def test_broadcast_axes() -> None:
    """B-061, B-131: stride 0 on batch, heads, sequence and the last axis, after the same call without it."""
    import cupy as cp

    q, k, v = draw_qkv((130, 150), (4, 4), (64, 64), "float16", batch=3)
    check_attention(q, k, v)
    for index in (np.s_[:1], np.s_[:, :1], np.s_[:, :, :1], np.s_[..., :1]):
        wide = [cp.broadcast_to(x[index], x.shape) for x in (q, k, v)]
        check_attention(wide[0], k, v)
        check_attention(q, wide[1], wide[2])
        check_attention(*wide)
    check_attention(q, k, v)


@pytest.mark.parametrize("causal", [False, True])
def test_both_layouts_are_one(causal: bool) -> None:
    q, k, v = draw_qkv((130, 150), (4, 2), (128, 128), "bfloat16", batch=2)
    out, lse = cuflash.attention(q, k, v, causal=causal, return_lse=True)
    flipped = [swap_layout(x) for x in (q, k, v)]
    out2, lse2 = cuflash.attention(*flipped, causal=causal, layout="bhsd", return_lse=True)
    assert out2.shape == flipped[0].shape
    assert_same_bits(swap_layout(out2), out)
    assert_same_bits(lse2, lse)


@settings(max_examples=60)
@given(
    steps=st.tuples(*[st.tuples(*[st.sampled_from([1, 1, 2, -1, 3])] * 3, st.sampled_from([1, 1, 1, -1, 2]))] * 3),
    lead=st.integers(0, 9),
    dims=st.sampled_from([(64, 64), (40, 72), (33, 64)]),
    seed=st.integers(0, 1000),
)
def test_fresh_strides(steps: tuple[tuple[int, ...], ...], lead: int, dims: tuple[int, int], seed: int) -> None:
    arrays = draw_qkv((70, 90), (2, 2), dims, "float16", batch=2, seed=seed)
    check_attention(*(_spread(x, s, lead) for x, s in zip(arrays, steps, strict=True)), causal=seed % 2 == 0)


OUTS: dict[str, Callable[[Array], Array]] = {
    **VIEWS,
    "contiguous": lambda x: poisoned(x.shape, x.dtype),
    "padded-head-dim": lambda x: poisoned((*x.shape[:3], 2 * x.shape[3]), x.dtype)[..., : x.shape[3]],
}


@pytest.mark.parametrize("dims,dtype", [((64, 64), "float16"), ((40, 72), "bfloat16"), ((128, 128), "bfloat16")])
@pytest.mark.parametrize("kind", OUTS)
def test_out_of_any_strides_gets_the_result(kind: str, dims: tuple[int, int], dtype: str) -> None:
    """B-053, B-056, B-109: out= changes where the result goes, and returns that very array.

    Bit for bit, where its strides let the same kernel write it; within rounding where a narrower one must.
    """
    q, k, v = draw_qkv((130, 150), (4, 2), dims, dtype, batch=2)
    expected, expected_lse = cuflash.attention(q, k, v, causal=True, return_lse=True)
    out = OUTS[kind](poisoned(expected.shape, expected.dtype))
    result, lse = cuflash.attention(q, k, v, causal=True, out=out, return_lse=True)
    assert result is out
    options = {"causal": True, "return_lse": True}
    if cuflash.explain(q, k, v, **options, out=out).kernel.symbol == cuflash.explain(q, k, v, **options).kernel.symbol:
        assert_same_bits(out, expected)
        assert_same_bits(lse, expected_lse)
    else:
        host = [to_host(swap_layout(x)) for x in (out, q, k, v)]
        assert_accurate(*host, causal="bottom_right")
        assert_lse(to_host(lse), *host[1:], causal="bottom_right")


@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (33, 64), (40, 72)], ids=str)
@pytest.mark.parametrize("nq", [1, 127, 128, 129, 300])
def test_nothing_is_written_around_the_output(dims: tuple[int, int], nq: int) -> None:
    """A marker in every byte around a strided output is still there after the call."""
    q, k, v = draw_qkv((nq, 100), (3, 1), dims, "float16", batch=2)
    marker = np.uint16(0xABCD)
    around = to_device(np.full((4, nq + 140, 5, dims[1] + 16), marker, np.uint16))
    inside = np.s_[1:3, 70 : 70 + nq, 1:4, 8:-8]
    cuflash.attention(q, k, v, causal=True, out=around.view(q.dtype)[inside])
    host = bits(around)
    written = host[inside].copy()
    host[inside] = marker
    assert (host == marker).all()
    assert_same_bits(to_device(written), cuflash.attention(q, k, v, causal=True).view(np.uint16))


def test_out_that_cannot_be_written_safely_is_refused() -> None:
    """B-109: aliases of an input, overlapping elements and foreign shapes; nothing is written."""
    import cupy as cp

    q, k, v = draw_qkv((64, 64), (2, 2), (64, 64), "float16")
    before = [bits(x).copy() for x in (q, k, v)]
    buffer = cp.zeros((q.size + 64,), cp.float16)
    overlapping = cp.lib.stride_tricks.as_strided(buffer, q.shape, (128, 2, 128, 2))
    foreign = cp.zeros((1, 64, 2, 65), cp.float16)
    for out in (q, k, v, v[:, ::-1], cp.broadcast_to(buffer[:64], q.shape), overlapping, foreign):
        with pytest.raises(ValueError, match="out"):
            cuflash.attention(q, k, v, out=out)
    for out in (cp.zeros(q.shape, cp.float32), np.zeros(q.shape, np.float16)):
        with pytest.raises(TypeError, match="out"):
            cuflash.attention(q, k, v, out=out)
    for x, old in zip((q, k, v), before, strict=True):
        assert (bits(x) == old).all()


def test_accesses_end_where_the_memory_ends() -> None:
    """B-059: inputs and output that begin or end at an unmapped page; a fault would end the process's context."""
    report = run_python("from tests.gpu.guarded import main; main()")
    assert report["calls"] >= 40
