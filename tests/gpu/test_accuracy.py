"""The forward kernels against the float64 oracle: head dims, tile edges, masks, head groups, scales, fresh draws."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cuflash
from tests.gpu.support import (
    CAUSAL,
    DTYPES,
    HEAD_DIMS,
    assert_same_bits,
    check_attention,
    draw_qkv,
    host_qkv,
    normal,
    swap_layout,
    tile,
    to_device,
)

pytestmark = pytest.mark.gpu

MAIN_DIMS = [(64, 64), (128, 128), (256, 256)]


@pytest.mark.parametrize("index", range(len(HEAD_DIMS)), ids=[f"d{d}-dv{dv}" for d, dv in HEAD_DIMS])
@pytest.mark.parametrize("swap", [False, True])
def test_head_dims(index: int, swap: bool) -> None:
    """B-103, B-104, B-110: every sampled head dim, once with each dtype: one of them full, the other causal."""
    d, dv = HEAD_DIMS[index]
    dtype, causal = DTYPES[swap], (index + swap) % 2 == 1
    check_attention(*draw_qkv((150, 203), (2, 1), (d, dv), dtype, seed=index), causal=causal)


@pytest.mark.parametrize("dims", MAIN_DIMS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("causal", CAUSAL)
def test_tile_edges(dims: tuple[int, int], dtype: str, causal: bool | str) -> None:
    """Lengths one below, at and one above one and two tiles, in both directions."""
    block_m, block_n = tile(*dims, dtype, causal)
    edges_m = [1, block_m - 1, block_m, block_m + 1, 2 * block_m + 1]
    edges_n = [1, block_n - 1, block_n, block_n + 1, 2 * block_n - 1, 2 * block_n, 2 * block_n + 1, 4 * block_n + 3]
    for seed, (nq, nk) in enumerate((nq, nk) for nq in edges_m for nk in edges_n):
        check_attention(*draw_qkv((nq, nk), (1, 1), dims, dtype, seed=seed), causal=causal)


@pytest.mark.parametrize("causal", CAUSAL)
@pytest.mark.parametrize(
    "lengths", [(113, 203), (203, 113), (1023, 1024), (1024, 1023), (1, 4224), (4224, 1), (257, 2048)], ids=str
)
def test_unequal_lengths(lengths: tuple[int, int], causal: bool | str) -> None:
    check_attention(*draw_qkv(lengths, (3, 1), (128, 128), "bfloat16", batch=2), causal=causal)


@pytest.mark.parametrize("causal", CAUSAL)
@pytest.mark.parametrize("heads", [(7, 1), (28, 4), (5, 1), (10, 2), (6, 3), (8, 8), (16, 1)], ids=str)
def test_head_groups(heads: tuple[int, int], causal: bool | str) -> None:
    """B-067, B-068: consecutive grouping, also by no power of two; the same bits as with repeated heads."""
    q, k, v = host_qkv((77, 130), heads, (64, 64), "bfloat16", batch=2, seed=heads[0])
    out = check_attention(to_device(q), to_device(k), to_device(v), causal=causal)
    repeated = (to_device(x.repeat(heads[0] // heads[1], axis=2)) for x in (k, v))
    assert_same_bits(out, cuflash.attention(to_device(q), *repeated, causal=causal), "grouped heads")


@pytest.mark.parametrize("nq", range(1, 9))
def test_short_queries_on_a_growing_cache(nq: int) -> None:
    """B-107: decoding steps, where only the number of keys grows."""
    for nk in (1, 15, 16, 17, 63, 64, 65, 200):
        check_attention(*draw_qkv((nq, nk), (4, 2), (64, 64), "float16", seed=nk), causal=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [0.0, -0.0, -0.125, -3.0, 1e-3, 1e-8, 1e-30, 1e-44, 1.0, 20.0])
def test_scales(scale: float, dtype: str) -> None:
    q, k, v = draw_qkv((130, 190), (2, 2), (64, 64), dtype)
    for causal in (False, True):
        check_attention(q, k, v, causal=causal, scale=scale)


def test_two_scales_are_two_results() -> None:
    """B-130: the scale is no part of what a kernel is compiled or planned for."""
    q, k, v = draw_qkv((64, 64), (1, 1), (128, 128), "float16")
    for factor in (1.0, 3.0, 0.5):
        check_attention(q, k, v, scale=factor / math.sqrt(128))


def test_long_sequence() -> None:
    """Thousands of keys: sums, rescaling and the order of tiles hold over a long loop."""
    check_attention(*draw_qkv((300, 16384), (2, 1), (128, 128), "bfloat16"), causal=True)
    check_attention(*draw_qkv((4096, 4096), (1, 1), (64, 64), "float16"), causal=True)


@pytest.mark.parametrize("spread", [0.0, 4.0, 30.0])
def test_growing_keys(spread: float) -> None:
    """Scores that rise along the keys, so that the running maximum moves in almost every step."""
    q, k, v = host_qkv((200, 900), (2, 2), (64, 64), "float16")
    ramp = np.linspace(0.1, 1 + spread, 900, dtype=np.float32)[None, :, None, None]
    q, k, v = map(to_device, (q, (k.astype(np.float32) * ramp).astype(np.float16), v))
    check_attention(q, k, v)
    check_attention(q, k[:, ::-1], v[:, ::-1])


SHAPES = st.fixed_dictionaries(
    {
        "lengths": st.tuples(st.integers(1, 400), st.integers(1, 400)),
        "heads": st.sampled_from([(1, 1), (2, 1), (3, 3), (6, 2), (7, 1)]),
        "dims": st.sampled_from([(64, 64), (128, 128), (80, 80), (192, 128)]),
        "dtype": st.sampled_from(DTYPES),
        "batch": st.integers(1, 3),
        "seed": st.integers(0, 2**16),
    }
)


@settings(max_examples=120)
@given(
    shape=SHAPES,
    causal=st.sampled_from(CAUSAL),
    scale=st.one_of(st.none(), st.floats(-2, 2, width=32)),
    spread=st.sampled_from([1e-3, 1.0, 1.0, 8.0]),
    swapped=st.booleans(),
)
def test_fresh_draws(shape: dict, causal: bool | str, scale: float | None, spread: float, swapped: bool) -> None:
    q, k, v = draw_qkv(**shape)
    if spread != 1.0:
        k = normal(k.shape, shape["dtype"], shape["seed"], spread)
    if swapped:
        check_attention(swap_layout(q), swap_layout(k), swap_layout(v), causal=causal, scale=scale, layout="bhsd")
    else:
        check_attention(q, k, v, causal=causal, scale=scale)
