"""The oracle is checked on cases whose answer is known without it, and against a loop over single scores."""

from __future__ import annotations

import math

import numpy as np
import pytest

from cuflash.reference import oracle_backward
from tests.oracle import assert_accurate, assert_lse, measure, oracle, ordinary, randn


def by_hand(q, k, v, causal, scale):
    """One score at a time in Python floats."""
    batch, heads, nq, d = q.shape
    nk, group = k.shape[2], heads // k.shape[1]
    offset = {False: nk, "bottom_right": nk - nq, "top_left": 0}[causal]
    out, lse = np.zeros((batch, heads, nq, v.shape[3])), np.full((batch, heads, nq), -np.inf)
    for b, h, i in np.ndindex(batch, heads, nq):
        keys = [j for j in range(nk) if j <= i + offset]
        scores = [scale * sum(float(q[b, h, i, x]) * float(k[b, h // group, j, x]) for x in range(d)) for j in keys]
        if not keys:
            continue
        top = max(scores)
        weights = [math.exp(s - top) for s in scores]
        lse[b, h, i] = top + math.log(sum(weights))
        for weight, j in zip(weights, keys, strict=True):
            out[b, h, i] += weight / sum(weights) * v[b, h // group, j].astype(float)
    return out, lse


@pytest.mark.parametrize("causal", [False, "bottom_right", "top_left"])
@pytest.mark.parametrize("lengths", [(5, 5), (3, 7), (7, 3), (1, 6), (4, 0)])
def test_oracle_agrees_with_a_loop_over_scores(causal, lengths):
    rng = np.random.default_rng(0)
    q = randn(rng, (2, 4, lengths[0], 3), "float32")
    k, v = randn(rng, (2, 2, lengths[1], 3), "float32"), randn(rng, (2, 2, lengths[1], 5), "float32")
    out, lse = oracle(q, k, v, causal=causal, scale=-0.7)
    expected, expected_lse = by_hand(q, k, v, causal, -0.7)
    np.testing.assert_allclose(out, expected, rtol=1e-13, atol=1e-15)
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-13)


def test_default_scale_is_that_of_the_head_dim():
    q, k = np.full((1, 1, 1, 80), 1.0), np.full((1, 1, 1, 80), 2.0)
    assert oracle(q, k, k)[1].item() == pytest.approx(160 / math.sqrt(80), rel=1e-15)


def test_rows_without_a_visible_key():
    x = np.ones((1, 1, 4, 2))
    out, lse = oracle(x, x[:, :, :2], x[:, :, :2], causal="bottom_right")
    assert np.array_equal(out[0, 0, :, 0], [0, 0, 1, 1])
    assert np.array_equal(np.isneginf(lse[0, 0]), [True, True, False, False])


@pytest.mark.parametrize("causal", [False, "bottom_right", "top_left"])
@pytest.mark.parametrize("lengths", [(3, 5), (5, 3)])
def test_backward_oracle_agrees_with_central_differences(causal, lengths):
    """Of sum(dout * out) + sum(dlse * lse), the latter over rows that see a key."""
    rng = np.random.default_rng(2)
    arrays = {"q": rng.standard_normal((1, 4, lengths[0], 3)), "k": rng.standard_normal((1, 2, lengths[1], 3))}
    arrays["v"] = rng.standard_normal((1, 2, lengths[1], 2))
    dout, dlse = rng.standard_normal((1, 4, lengths[0], 2)), rng.standard_normal((1, 4, lengths[0]))

    def loss(name, at, step):
        moved = {key: x.copy() for key, x in arrays.items()}
        moved[name][at] += step
        out, lse = oracle(**moved, causal=causal, scale=-0.7)
        return (dout * out).sum() + (dlse * np.where(np.isneginf(lse), 0.0, lse)).sum()

    grads = oracle_backward(dout, **arrays, dlse=dlse, causal=causal, scale=-0.7)
    for name, grad in zip("qkv", grads, strict=True):
        expected = [(loss(name, at, 1e-5) - loss(name, at, -1e-5)) / 2e-5 for at in np.ndindex(grad.shape)]
        np.testing.assert_allclose(grad.ravel(), expected, rtol=1e-7, atol=1e-8)


def test_nan_stays_where_it_is_seen():
    """B-001, B-023: a stated rule for NaN, and the oracle keeps it quietly (warnings are errors in these tests)."""
    rng = np.random.default_rng(1)
    q, k, v = (rng.standard_normal((1, 1, 6, 4)) for _ in range(3))
    clean, clean_lse = oracle(q, k, v, causal="bottom_right")
    for poisoned_input in (k, v):
        kept = poisoned_input[0, 0, 3].copy()
        poisoned_input[0, 0, 3] = np.nan
        out, lse = oracle(q, k, v, causal="bottom_right")
        np.testing.assert_allclose(out[:, :, :3], clean[:, :, :3], rtol=1e-13)
        assert np.isnan(out[:, :, 3:]).all()
        assert np.array_equal(lse[:, :, :3], clean_lse[:, :, :3])
        assert np.isnan(lse[:, :, 3:]).all() == (poisoned_input is k)
        poisoned_input[0, 0, 3] = kept


def test_scores_that_are_all_minus_infinity_count_as_no_key():
    q, k, v = np.ones((1, 1, 1, 1)), np.full((1, 1, 3, 1), -np.inf), np.ones((1, 1, 3, 2))
    out, lse = oracle(q, k, v)
    assert np.array_equal(out, np.zeros((1, 1, 1, 2))) and np.isneginf(lse).all()


def test_an_error_is_found_and_its_tile_named():
    rng = np.random.default_rng(2)
    q, k, v = (randn(rng, (2, 3, 300, 16), "bfloat16") for _ in range(3))
    out = ordinary(q, k, v)
    assert_accurate(out, q, k, v)
    out[1, 2, 200, 5] += 0.02
    with pytest.raises(AssertionError, match="batch 1, head 2, rows 192-255, column 5"):
        assert_accurate(out, q, k, v)


def test_a_small_error_everywhere_is_found():
    rng = np.random.default_rng(3)
    q, k, v = (randn(rng, (2, 3, 300, 16), "float16") for _ in range(3))
    out = ordinary(q, k, v)
    with pytest.raises(AssertionError, match="Frobenius"):
        assert_accurate((out.astype(np.float64) * (1 + 2**-10)).astype(out.dtype), q, k, v)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_bounds_of_the_wide_types_notice_a_wrong_scale(dtype):
    rng = np.random.default_rng(4)
    q, k, v = (randn(rng, (1, 2, 50, 16), dtype) for _ in range(3))
    _, lse = oracle(q, k, v)
    wrong = 0.25 * (1 + (1e-4 if dtype == "float32" else 1e-12))
    assert_accurate(ordinary(q, k, v), q, k, v)
    with pytest.raises(AssertionError, match="output at"):
        assert_accurate(ordinary(q, k, v, scale=wrong), q, k, v)
    assert_lse(lse.astype(q.dtype), q, k, v)
    with pytest.raises(AssertionError, match="LSE at"):
        assert_lse(oracle(q, k, v, scale=wrong * 1.1)[1].astype(q.dtype), q, k, v)


def test_nan_is_not_overlooked():
    """B-023: comparisons with NaN accept nothing but NaN in the same place."""
    reference = np.array([[[[1.0, np.nan, -np.inf]]]])
    measure(reference, reference)
    for wrong in ([np.nan, np.nan, -np.inf], [1.0, 1.0, -np.inf], [1.0, np.nan, np.inf], [1.0, np.nan, 1.0]):
        with pytest.raises(AssertionError, match="non-finite"):
            measure(np.array([[[wrong]]]), reference)
