"""Grids and index arithmetic beyond 16 and 32 bits, judged on a sample of rows: an oracle of all would take hours."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

import cuflash
from tests.gpu.support import (
    Array,
    assert_same_bits,
    draw_qkv,
    normal,
    numpy_dtype,
    poisoned,
    swap_layout,
    tile,
    to_device,
    to_host,
)
from tests.oracle import assert_accurate, assert_lse

pytestmark = [pytest.mark.gpu(timeout=240), pytest.mark.slow]

GIB = 1 << 30
CHUNK = 1 << 16
"""Rows that CuPy copies at a time: not all its versions index more than 2**31 bytes rightly (B-064)."""


@pytest.fixture(autouse=True)
def _memory() -> None:
    import cupy as cp

    cp.get_default_memory_pool().free_all_blocks()
    free, _ = cp.cuda.Device().mem_info
    if free < 40 * GIB:
        pytest.skip(f"needs 40 GiB of free device memory, {free / GIB:.0f} are there")


def _rows(x: Array, batch: int, head: int, rows: Sequence[int] = ()) -> np.ndarray:
    """One head of a bshd array on the host, as (1, 1, rows, dim); all rows unless some are given."""
    parts = [slice(r, r + 1) for r in rows] or [slice(i, i + CHUNK) for i in range(0, x.shape[1], CHUNK)]
    return np.concatenate([to_host(x[batch, part, head]) for part in parts])[None, None]


def _judge(arrays: Sequence[Array], out: Array, lse: Array, batch: int, head: int, rows: Sequence[int] = ()) -> None:
    """Judge some query rows (all, unless given) of one head of a call without a mask."""
    q, k, v = arrays
    kv_head = head * k.shape[2] // q.shape[2]
    host = [_rows(q, batch, head, rows), _rows(k, batch, kv_head), _rows(v, batch, kv_head)]
    assert_accurate(_rows(out, batch, head, rows), *host)
    picked = to_host(lse[batch, head])[list(rows) or slice(None)]
    assert_lse(picked[None, None], *host)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("batch,heads", [(1, 65536), (1, 71280), (70000, 1), (300, 300)])
def test_more_heads_than_a_grid_axis(batch: int, heads: int, causal: bool) -> None:
    """B-046, B-047: batch times heads beyond 65535, on either axis."""
    q, k, v = draw_qkv((10, 10), (heads, heads), (16, 16), "float16", batch=batch)
    out = poisoned(q.shape, q.dtype)
    _, lse = cuflash.attention(q, k, v, causal=causal, out=out, return_lse=True)
    assert np.isfinite(to_host(out).astype(np.float32)).all() and np.isfinite(to_host(lse)).all()
    for b, h in ((0, 0), (batch - 1, heads - 1), (batch // 2, heads // 2), (batch - 1, 0), (0, heads - 1)):
        cut = np.s_[b : b + 1, :, h : h + 1]
        small, small_lse = cuflash.attention(q[cut], k[cut], v[cut], causal=causal, return_lse=True)
        assert_same_bits(out[cut], small)
        assert_same_bits(lse[b : b + 1, h : h + 1], small_lse)
        if not causal:
            _judge((q, k, v), out, lse, b, h)


@pytest.mark.parametrize("causal", [False, True])
def test_more_query_tiles_than_a_grid_axis(causal: bool) -> None:
    """B-046: 65535 tiles are one launch of an Ampere-style kernel, more are several; a persistent one takes any."""
    import cupy as cp

    period = 6144  # a multiple of all query tiles
    block_m, _ = tile(32, 32, "float16", causal)
    assert period % block_m == 0
    nq = -(-block_m * 65537 // period) * period
    q = cp.tile(normal((1, period, 1, 32), "float16", 0), (1, nq // period, 1, 1))
    _, k, v = draw_qkv((1, 40), (1, 1), (32, 32), "float16")
    out = cp.full((1, nq, 1, 32), cp.nan, cp.float16)
    _, lse = cuflash.attention(q, k, v, causal=causal, out=out, return_lse=True)
    if causal:  # bottom-right: only the last rows see anything
        assert not bool(out[:, :-40].any()) and bool((lse[..., :-40] == -cp.inf).all())
        host = [swap_layout(to_host(x)) for x in (out[:, -40:], q[:, -40:], k, v)]
        assert_accurate(*host, causal="bottom_right")
        assert_lse(to_host(lse[..., -40:]), *host[1:], causal="bottom_right")
    else:
        _judge((q, k, v), out, lse, 0, 0, range(period))
        repeats = out.view(cp.uint16).reshape(-1, period * 32)
        assert bool((repeats == repeats[:1]).all())


def _random(shape: tuple[int, ...], seed: int) -> Array:
    """Bfloat16 values with random signs and mantissas between 0.125 and 2, made on the device."""
    import cupy as cp

    scramble = cp.ElementwiseKernel(
        "uint64 seed",
        "uint16 x",
        "unsigned long long z = (i + 1) * 0x9E3779B97F4A7C15ull + seed * 0xD1B54A32D192ED03ull;"
        "z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull; z ^= z >> 27; x = (z & 0x81FF) | 0x3E00;",
        "cuflash_test_scramble",
    )
    flat = cp.empty(int(np.prod(shape)), cp.uint16)
    for part in range(0, flat.size, 1 << 28):
        scramble(np.uint64(1000 * seed + (part >> 28)), flat[part : part + (1 << 28)])
    return flat.reshape(shape).view(numpy_dtype("bfloat16"))


def test_more_than_2_31_query_elements() -> None:
    """Offsets of q and out beyond 2**31 elements, by heads and by rows."""
    arrays = _random((1, 1 << 18, 65, 128), 0), _random((1, 200, 1, 128), 1), _random((1, 200, 1, 128), 2)
    assert arrays[0].size > 1 << 31
    out, lse = cuflash.attention(*arrays, return_lse=True)
    for head in (0, 64):
        _judge(arrays, out, lse, 0, head, [0, 77777, (1 << 18) - 200, (1 << 18) - 1])


def test_more_than_2_31_key_elements() -> None:
    """B-041: a cache of 2**32 elements. The last query row sees every key: it is judged as without a mask."""
    q, k, v = _random((1, 3, 32, 128), 3), _random((1, 1 << 20, 32, 128), 4), _random((1, 1 << 20, 32, 128), 5)
    out, lse = cuflash.attention(q, k, v, causal=True, return_lse=True)
    for head in (0, 31):
        _judge((q[:, 2:], k, v), out[:, 2:], lse[..., 2:], 0, head)


@pytest.mark.parametrize("axis", [0, 1, 2], ids=["batch", "sequence", "heads"])
def test_strides_beyond_2_31(axis: int) -> None:
    """Small arrays whose elements lie gigabytes apart, inputs and output."""
    import cupy as cp

    shape = (2, 3, 2, 64)
    memory = cp.empty(9 * GIB // 2, cp.uint16)
    strides = [3 * 2 * 64, 2 * 64, 64, 1]
    strides[axis] = (1 << 31) + 64 if shape[axis] == 2 else (1 << 30) + 64
    spread = cp.lib.stride_tricks.as_strided
    views = [spread(memory[4096 * i :], shape, [2 * s for s in strides]).view(cp.float16) for i in range(4)]
    arrays = draw_qkv((3, 3), (2, 2), (64, 64), "float16", batch=2)
    expected = cuflash.attention(*arrays)
    places = [(slice(None),) * axis + (i,) for i in range(shape[axis])]
    for view, x in zip(views, arrays, strict=False):
        for place in places:
            view[place] = x[place]
    cuflash.attention(*views[:3], out=views[3])
    result = np.stack([to_host(views[3][place]) for place in places], axis)
    assert_same_bits(to_device(result), expected)
