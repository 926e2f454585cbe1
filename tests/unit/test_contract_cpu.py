"""The contract of `cuflash.attention`, on NumPy arrays: what users of other attention libraries found broken there.

Ids such as "B-002" are those of public bug reports of other libraries.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cuflash
from tests.operands import draw_qkv
from tests.oracle import DTYPES, assert_accurate, assert_lse, poisoned, randn

CAUSAL = (False, True, "bottom_right", "top_left")
DTYPE = pytest.mark.parametrize("dtype", DTYPES)


def draw(seed, lengths, heads=(2, 2), dims=(16, 16), dtype="float32", batch=1):
    """q, k, v in the layout bshd."""
    return draw_qkv(np.random.default_rng(seed), lengths, heads, dims, dtype, batch)


def check(q, k, v, causal=False, scale=None):
    """Run on bshd arrays, judge output and LSE, return both."""
    out, lse = cuflash.attention(q, k, v, causal=causal, scale=scale, return_lse=True)
    assert out.dtype == q.dtype and out.shape == (*q.shape[:3], v.shape[3])
    corner = "bottom_right" if causal is True else causal
    bhsd = [x.swapaxes(1, 2) for x in (q, k, v)]
    assert_accurate(out.swapaxes(1, 2), *bhsd, causal=corner, scale=scale)
    assert_lse(lse, *bhsd, causal=corner, scale=scale)
    return out, lse


@DTYPE
@pytest.mark.parametrize("causal", CAUSAL)
@pytest.mark.parametrize("lengths", [(1, 1), (33, 33), (20, 50), (50, 20), (1, 70), (70, 1)])
def test_masks_and_lengths(lengths, causal, dtype):
    check(*draw(0, lengths, batch=2, dtype=dtype), causal)


@pytest.mark.parametrize("heads", [(7, 1), (10, 2), (28, 4), (6, 3), (5, 5), (8, 1)], ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_groups_are_consecutive(heads, causal):
    """B-067, B-068: query head h uses key/value head h // group, for groups that are no power of two as well."""
    q, k, v = draw(1, (19, 23), heads, batch=2)
    out, lse = check(q, k, v, causal)
    group = heads[0] // heads[1]
    repeated, repeated_lse = cuflash.attention(
        q, k.repeat(group, axis=2), v.repeat(group, axis=2), causal=causal, return_lse=True
    )
    np.testing.assert_allclose(out, repeated, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(lse, repeated_lse, rtol=1e-5)


@DTYPE
@pytest.mark.parametrize(
    "dims", [(1, 1), (3, 5), (40, 72), (64, 1), (80, 80), (128, 256), (255, 64), (256, 256)], ids=str
)
def test_head_dims(dims, dtype):
    """B-103, B-104, B-110: any D and Dv, and the default scale is that of the D that was given."""
    check(*draw(2, (30, 40), dims=dims, dtype=dtype))


@DTYPE
@pytest.mark.parametrize("scale", [0.0, -0.0, 0.125, -0.3, 1e-30, 5e-324, -1e-300, 3.0, 50.0])
def test_any_finite_scale(scale, dtype):
    check(*draw(3, (20, 30), dtype=dtype), True, scale)


@pytest.mark.parametrize("scale", [1e30, -1e30, 1e300])
def test_a_scale_beyond_float32_selects_the_largest_score(scale):
    q, k, v = draw(4, (20, 30))
    out, _ = cuflash.attention(q, k, v, scale=scale, return_lse=True)
    scores = np.einsum("bqhd,bkhd->bhqk", q.astype(float), k.astype(float)) * math.copysign(1, scale)
    best = scores.argmax(axis=3)
    for b, h, i in np.ndindex(best.shape):
        assert np.array_equal(out[b, i, h], v[b, best[b, h, i], h])


def test_successive_calls_keep_their_own_scale():
    """B-130."""
    q, k, v = draw(5, (8, 8))
    for scale in (0.25, 0.75, 0.25):
        check(q, k, v, scale=scale)


@DTYPE
@pytest.mark.parametrize("causal", [False, True, "top_left"])
@pytest.mark.parametrize("empty", ["batch", "queries", "keys", "heads"])
def test_empty_inputs(empty, causal, dtype):
    """B-026, B-028: shapes come back; without keys the output is 0 and the LSE -inf."""
    batch, lengths = (0 if empty == "batch" else 2), (0 if empty == "queries" else 3, 0 if empty == "keys" else 4)
    heads = (0, 0) if empty == "heads" else (2, 1)
    q, k, v = draw(6, lengths, heads, (8, 5), dtype, batch)
    out, lse = cuflash.attention(q, k, v, causal=causal, return_lse=True)
    assert out.shape == (batch, lengths[0], heads[0], 5) and lse.shape == (batch, heads[0], lengths[0])
    assert out.dtype == q.dtype and lse.dtype == (np.float64 if dtype == "float64" else np.float32)
    if empty == "keys":
        given_out = poisoned(out.shape, out.dtype)
        assert cuflash.attention(q, k, v, causal=causal, out=given_out) is given_out
        assert not out.any() and not given_out.any() and np.isneginf(lse).all()


@DTYPE
def test_rows_that_see_no_key(dtype):
    """B-002, B-011: with more queries than keys the first rows are exactly 0, their LSE -inf, and nothing is NaN."""
    q, k, v = draw(7, (1300, 7), dtype=dtype)
    out, lse = check(q, k, v, True)
    assert not out[:, :1293].any() and np.isneginf(lse[..., :1293]).all()
    assert out[:, 1293:].any(axis=-1).all() and np.isfinite(lse[..., 1293:]).all()


def test_causal_corners_differ_only_for_different_lengths():
    q, k, v = draw(8, (9, 9))
    same = [cuflash.attention(q, k, v, causal=c) for c in (True, "bottom_right", "top_left")]
    assert np.array_equal(same[0], same[1]) and np.array_equal(same[0], same[2])
    right, left = (cuflash.attention(q[:, :4], k, v, causal=c) for c in ("bottom_right", "top_left"))
    assert np.array_equal(left[:, 0], v[:, 0]) and not np.allclose(right, left)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_hidden_keys_have_no_influence(bad, dtype):
    """B-001: what stands in keys and values that a query does not see changes none of its bits."""
    q, k, v = draw(9, (600, 600), dtype=dtype)
    clean, clean_lse = cuflash.attention(q, k, v, causal=True, return_lse=True)
    for x in (k, v):
        kept = x[:, 599].copy()
        x[:, 599] = bad
        out, lse = cuflash.attention(q, k, v, causal=True, return_lse=True)
        np.testing.assert_allclose(out[:, :599], clean[:, :599], rtol=1e-5, atol=1e-6)
        assert np.array_equal(lse[..., :599], clean_lse[..., :599])
        x[:, 599] = kept


@DTYPE
@pytest.mark.parametrize("n", [1, 16, 64, 257, 1000])
def test_equal_scores_average_exactly(n, dtype):
    """B-077, B-080: q = 0 and V = 1 give exactly 1, and an LSE of ln(n): natural, not base 2."""
    q, k, v = draw(10, (3, n), dtype=dtype)
    q[...], v[...] = 0, 1
    out, lse = cuflash.attention(q, k, v, return_lse=True)
    assert np.array_equal(out, np.ones_like(out))
    np.testing.assert_allclose(lse, math.log(n), rtol=2e-7, atol=0)


@DTYPE
@pytest.mark.parametrize("score", [-524288.0, -1e30, 1e30, 1.0])
def test_one_key_has_probability_one(score, dtype):
    """B-007: a score is legal whatever its size; no finite number stands for "masked"."""
    root = math.sqrt(abs(score)) if dtype in ("bfloat16", "float32", "float64") else min(math.sqrt(abs(score)), 6e4)
    q = np.full((1, 1, 1, 1), root).astype(DTYPES[dtype])
    k = (q * math.copysign(1, score)).astype(q.dtype)
    v = randn(np.random.default_rng(11), (1, 1, 1, 9), dtype)
    out, lse = cuflash.attention(q, k, v, scale=1.0, return_lse=True)
    assert np.array_equal(out, v)
    assert lse.item() == pytest.approx(float(q.item()) * float(k.item()), rel=1e-6)


def test_equal_huge_inputs_are_returned():
    """B-010: 133120 in bfloat16, where a fused multiply-add disagrees with a rounded maximum."""
    x = np.full((1, 1, 1, 64), 133120, DTYPES["bfloat16"])
    assert np.array_equal(cuflash.attention(x, x, x), x)


@DTYPE
def test_rows_of_hugely_negative_scores(dtype):
    """B-008: a whole row near -2.4e5 is a softmax like any other."""
    q, k, v = draw(12, (1, 300), dims=(128, 128), dtype=dtype)
    q, k = np.abs(q) * 20, -np.abs(k) * 150
    out, lse = check(q.astype(DTYPES[dtype]), k.astype(DTYPES[dtype]), v, scale=1.0)
    assert out.any() and (lse < -1e5).all()


@DTYPE
def test_outlier_logits(dtype):
    """B-100: two huge logits of nearly equal size."""
    q, k, v = draw(13, (40, 1024), (1, 1), (64, 64), dtype)
    q[...] = 0
    q[0, 7, 0, :2] = 1
    k[0, 100], k[0, 900] = 76, 76.25
    check(q, k, v, scale=0.5)


def test_leading_tiles_of_minus_infinity():
    """B-013, B-014: scores of -inf that fill whole tiles before the first finite one."""
    q, k, v = draw(14, (5, 3000))
    q, k[:, :2900, :, 0] = np.abs(q) + 1, -np.inf
    out, lse = cuflash.attention(q, k, v, return_lse=True)
    expected, expected_lse = cuflash.attention(q, k[:, 2900:], v[:, 2900:], return_lse=True)
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-5)


def test_zeros_beyond_any_16_bit_length():
    """B-034: long input of zeros gives the mean of V."""
    q, k, v = (np.zeros((1, n, 1, 8), np.float32) for n in (2, 70000, 70000))
    v[..., 0] = 1
    out, _ = check(q, k, v)
    assert np.array_equal(out[..., 0], np.ones((1, 2, 1))) and not out[..., 1:].any()


@pytest.mark.parametrize("batch,heads", [(1, 65536), (65537, 1), (1, 71280)])
def test_more_heads_than_a_grid_axis(batch, heads):
    """B-046, B-047."""
    x = np.random.default_rng(15).standard_normal((batch, 2, heads, 4), np.float32)
    out, lse = cuflash.attention(x, x, x, causal=True, return_lse=True)
    assert np.array_equal(out[:, 0], x[:, 0])
    last = x[-1:, :, -1:]
    expected, expected_lse = cuflash.attention(last, last, last, causal=True, return_lse=True)
    np.testing.assert_allclose(out[-1:, :, -1:], expected, rtol=1e-6)
    np.testing.assert_allclose(lse[-1:, -1:], expected_lse, rtol=1e-6)


def test_growing_and_cut_key_sequences():
    """B-095, B-107: one query after another against a growing cache, in a buffer longer than the valid part."""
    q, k, v = draw(16, (8, 64), (4, 2))
    whole = cuflash.attention(q, k[:, :8], v[:, :8], causal=True)
    for i in range(8):
        step = cuflash.attention(q[:, i : i + 1], k[:, : i + 1], v[:, : i + 1], causal=True)
        np.testing.assert_allclose(step, whole[:, i : i + 1], rtol=1e-5, atol=1e-6)


@DTYPE
def test_layouts_are_views_of_each_other(dtype):
    q, k, v = draw(17, (20, 30), (4, 2), dtype=dtype, batch=2)
    out, lse = cuflash.attention(q, k, v, causal=True, return_lse=True)
    views = [x.swapaxes(1, 2) for x in (q, k, v)]
    other, other_lse = cuflash.attention(*views, causal=True, layout="bhsd", return_lse=True)
    assert other.shape == (2, 4, 20, 16) and other.flags.c_contiguous
    assert np.array_equal(other.swapaxes(1, 2), out) and np.array_equal(other_lse, lse)


@DTYPE
def test_views_equal_copies(dtype):
    """B-050, B-055, B-131: packed QKV, reversed and broadcast axes, a strided last axis; inputs stay as they were."""
    packed = randn(np.random.default_rng(18), (2, 30, 3, 4, 32), dtype)
    kept = packed.copy()
    for make in (
        lambda x: x,
        lambda x: x[:, ::-1],
        lambda x: x[:, ::2],
        lambda x: x[..., ::2],
        lambda x: x[..., ::-1],
        lambda x: np.broadcast_to(x[:, :, :1], x.shape),
        lambda x: np.broadcast_to(x[:1, :, :, :1], x.shape),
        lambda x: np.asfortranarray(x),
    ):
        views = [make(packed[:, :, i]) for i in range(3)]
        out, lse = cuflash.attention(*views, causal=True, return_lse=True)
        expected, expected_lse = check(*(x.copy(order="C") for x in views), True)
        assert np.array_equal(out, expected) and np.array_equal(lse, expected_lse)
    assert np.array_equal(packed, kept)


@DTYPE
def test_out_of_any_layout_gets_the_same_result(dtype):
    """B-109: contiguous, strided and reversed; what lies between its elements stays."""
    q, k, v = draw(19, (20, 30), dims=(40, 40), dtype=dtype)
    expected = cuflash.attention(q, k, v)
    memory = poisoned((1, 40, 2, 80), expected.dtype)
    for out in (poisoned(expected.shape, expected.dtype), memory[:, ::2, :, 1::2], memory[:, ::-2, ::-1, 79::-2]):
        assert cuflash.attention(q, k, v, out=out) is out
        assert np.array_equal(out, expected)
    assert np.isnan(memory[:, 1::2, :, ::2].astype(np.float32)).all()


@given(
    seed=st.integers(0, 2**32 - 1),
    lengths=st.tuples(st.integers(0, 50), st.integers(0, 50)),
    heads=st.tuples(st.integers(1, 7), st.integers(1, 3)),
    dims=st.tuples(st.integers(1, 33), st.integers(1, 33)),
    dtype=st.sampled_from(sorted(DTYPES)),
    causal=st.sampled_from(CAUSAL),
    scale=st.none() | st.floats(-3, 3),
)
@settings(max_examples=100)
def test_fresh_calls(seed, lengths, heads, dims, dtype, causal, scale):
    q, k, v = draw(seed, lengths, (heads[0] * heads[1], heads[1]), dims, dtype, batch=2)
    check(q, k, v, causal, scale)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_parts_merge_by_their_lse(dtype):
    """B-080, B-085: attention over two halves of the keys, combined by LSE, is attention over all keys."""
    q, k, v = draw(20, (6, 50), dtype=dtype)
    whole, whole_lse = cuflash.attention(q, k, v, return_lse=True)
    parts = [
        cuflash.attention(q, k[:, part], v[:, part], return_lse=True) for part in (slice(20), slice(20, 50), slice(0))
    ]
    lse = np.stack([part[1].astype(float) for part in parts])
    merged_lse = np.log(np.exp(lse).sum(axis=0))
    weights = np.exp(lse - merged_lse).swapaxes(2, 3)[..., None]
    merged = sum(w * part[0].astype(float) for w, part in zip(weights, parts, strict=True))
    np.testing.assert_allclose(merged_lse, whole_lse, rtol=1e-5)
    np.testing.assert_allclose(merged, whole.astype(float), atol=2e-3 if dtype == "float16" else 1e-6)
