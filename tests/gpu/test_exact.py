"""Results that have no rounding, and rules that hold bit for bit."""

from __future__ import annotations

import math

import numpy as np
import pytest

import cuflash
from tests.gpu.support import (
    CAUSAL,
    DTYPES,
    assert_same_bits,
    bits,
    check_attention,
    draw_qkv,
    host_normal,
    host_qkv,
    numpy_dtype,
    poison_pool,
    poisoned,
    tile,
    to_device,
    to_host,
)

pytestmark = pytest.mark.gpu

DIMS = [(64, 64), (128, 128), (256, 256), (33, 64)]


@pytest.mark.parametrize("dims", DIMS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_one_key_returns_its_value(dims: tuple[int, int], dtype: str) -> None:
    q, k, v = host_qkv((200, 1), (2, 1), dims, dtype)
    out, lse = cuflash.attention(*map(to_device, (q, k, v)), return_lse=True)
    assert_same_bits(out, to_device(v.repeat(2, axis=2).repeat(200, axis=1)))
    scores = np.einsum("qhd,d->hq", q[0].astype(np.float64), k[0, 0, 0].astype(np.float64)) / math.sqrt(dims[0])
    np.testing.assert_allclose(to_host(lse)[0], scores, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("dims", DIMS, ids=str)
@pytest.mark.parametrize("causal", CAUSAL)
def test_constant_value_is_returned(dims: tuple[int, int], causal: bool | str) -> None:
    """B-077: with q = 0 every weight is equal, and V = 1 must come back as exactly 1 at any length."""
    for n in (1, 16, 63, 64, 65, 200, 640):
        q, k, v = host_qkv((n, n), (2, 2), dims, "float16", seed=n)
        v[...] = 1
        q[...] = 0
        out, lse = cuflash.attention(*map(to_device, (q, k, v)), causal=causal, return_lse=True)
        assert (to_host(out) == 1).all()
        seen = np.arange(1, n + 1) if causal else np.full(n, n)
        np.testing.assert_allclose(to_host(lse)[0, 0], np.log(seen), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_hot_attention_selects_a_row(dtype: str) -> None:
    """Scores so far apart that one weight is 1 and the others underflow: the output is a copy of one row of V."""
    n, d = 300, 32
    v = host_normal((1, n, 1, d), dtype, 1)
    chosen = np.random.default_rng(2).integers(0, n, 500)
    code = np.where((np.arange(n)[:, None] >> np.arange(d)) & 1, 1.0, -1.0)  # row j spells j in signs
    k = to_device((8 * code)[None, :, None, :].astype(numpy_dtype(dtype)))
    q = to_device((8 * code[chosen])[None, :, None, :].astype(numpy_dtype(dtype)))
    out = cuflash.attention(q, k, to_device(v), scale=1.0)
    assert_same_bits(out, to_device(v[:, chosen]))


@pytest.mark.parametrize("causal", CAUSAL)
@pytest.mark.parametrize("dims", [(128, 128), (64, 64)], ids=str)
def test_permuted_heads_and_batches_permute_the_output(dims: tuple[int, int], causal: bool | str) -> None:
    """B-092: what else is in the batch, and where, has no influence on a head's bits."""
    host = host_qkv((333, 333), (6, 6), dims, "bfloat16", batch=3)
    q, k, v = map(to_device, host)
    out = cuflash.attention(q, k, v, causal=causal)
    heads, batches = [3, 0, 5, 1, 4, 2], [2, 0, 1]
    moved = [to_device(x[batches][:, :, heads]) for x in host]
    assert_same_bits(cuflash.attention(*moved, causal=causal), to_device(to_host(out)[batches][:, :, heads]))
    alone = [x[1:2, :, 4:5] for x in (q, k, v)]
    assert_same_bits(cuflash.attention(*alone, causal=causal), out[1:2, :, 4:5])


@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_rows_that_see_no_key(dims: tuple[int, int]) -> None:
    """B-002, B-011: output exactly 0 and LSE -inf, also for whole tiles, and no NaN in their neighbours."""
    block_m, _ = tile(*dims, "float16", True, 16 if dims[0] % 8 == 0 else 2)
    for dead in (1, block_m - 1, block_m, 2 * block_m + 5):
        nk = 70
        q, k, v = draw_qkv((nk + dead, nk), (2, 2), dims, "float16", seed=dead)
        out = check_attention(q, k, v, causal=True)
        _, lse = cuflash.attention(q, k, v, causal=True, return_lse=True)
        assert (bits(out)[:, :dead] == 0).all()
        assert (to_host(lse)[:, :, :dead] == -np.inf).all()
        assert np.isfinite(to_host(lse)[:, :, dead:]).all()


@pytest.mark.parametrize("causal", CAUSAL)
@pytest.mark.parametrize("nq", [1, 64, 333])
def test_no_keys_at_all(nq: int, causal: bool | str) -> None:
    """B-028, B-029: every row is dead; the output is written, not left as it was."""
    q, k, v = draw_qkv((nq, 0), (4, 2), (64, 64), "bfloat16", batch=2)
    out = poisoned(q.shape, q.dtype)
    poison_pool(4 * out.size)
    result, lse = cuflash.attention(q, k, v, causal=causal, out=out, return_lse=True)
    assert result is out
    assert (bits(out) == 0).all()
    assert (to_host(lse) == -np.inf).all()


@pytest.mark.parametrize("shape", [(0, 5, 5, 2), (2, 0, 5, 2), (2, 5, 5, 0), (0, 0, 0, 0)], ids=str)
def test_empty_inputs(shape: tuple[int, int, int, int]) -> None:
    batch, nq, nk, heads = shape
    q, k, v = draw_qkv((nq, nk), (heads, heads), (64, 32), "float16", batch=batch)
    out, lse = cuflash.attention(q, k, v, causal=True, return_lse=True)
    assert out.shape == (batch, nq, heads, 32) and out.dtype == q.dtype
    assert lse.shape == (batch, heads, nq) and lse.dtype == np.float32


@pytest.mark.parametrize(
    "dims,causal", [((128, 128), True), ((64, 64), False), ((256, 256), True), ((100, 100), True)], ids=str
)
def test_bitwise_repeatable(dims: tuple[int, int], causal: bool) -> None:
    """B-089, B-094: 200 runs of one call, with other calls in between, give the same bits."""
    import cupy as cp

    q, k, v = draw_qkv((1100, 1100), (8, 2), dims, "bfloat16", batch=2)
    other = draw_qkv((77, 333), (3, 3), (80, 80), "bfloat16")
    first, first_lse = cuflash.attention(q, k, v, causal=causal, return_lse=True)
    different = cp.zeros((), cp.int64)
    for run in range(200):
        if run % 5 == 0:
            cuflash.attention(*other)
        out, lse = cuflash.attention(q, k, v, causal=causal, return_lse=True)
        different += (out.view(cp.uint16) != first.view(cp.uint16)).sum()
        different += (lse.view(cp.uint32) != first_lse.view(cp.uint32)).sum()
    assert int(different) == 0
    check_attention(q[:1], k[:1], v[:1], causal=causal)


def test_causal_corners_agree_on_square_shapes() -> None:
    q, k, v = draw_qkv((257, 257), (2, 2), (128, 128), "float16")
    reference = cuflash.attention(q, k, v, causal=True)
    assert_same_bits(cuflash.attention(q, k, v, causal="bottom_right"), reference)
    assert_same_bits(cuflash.attention(q, k, v, causal="top_left"), reference)


def test_lse_lets_halves_be_merged() -> None:
    """B-080: the LSE is a natural logarithm: two halves of the keys merge into the whole."""
    q, k, v = draw_qkv((130, 512), (2, 2), (64, 64), "float16")
    whole, whole_lse = cuflash.attention(q, k, v, return_lse=True)
    parts = slice(0, 200), slice(200, 512)
    halves = [cuflash.attention(q, k[:, part], v[:, part], return_lse=True) for part in parts]
    lses = np.stack([to_host(lse).astype(np.float64) for _, lse in halves])
    merged_lse = np.logaddexp(*lses)
    weights = np.exp(lses - merged_lse).transpose(0, 1, 3, 2)[..., None]
    merged = sum(w * to_host(out).astype(np.float64) for w, (out, _) in zip(weights, halves, strict=True))
    np.testing.assert_allclose(to_host(whole_lse), merged_lse, rtol=0, atol=1e-5)
    spacing = np.finfo(np.float16).eps * np.abs(merged).max()
    assert np.abs(merged - to_host(whole).astype(np.float64)).max() <= 2 * spacing
