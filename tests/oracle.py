"""Shared by CPU, emulation and GPU tests: error measures, the ordinary implementation that errors are held against.

Arrays are NumPy's, (batch, heads, seq, dim); a GPU test copies its results to the host first.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from cuflash.cpu import Array, causal_offset
from cuflash.reference import oracle
from cuflash.request import Causal

__all__ = [
    "DTYPES",
    "MAX_RATIO",
    "Errors",
    "assert_accurate",
    "assert_lse",
    "judge",
    "measure",
    "oracle",
    "ordinary",
    "poisoned",
    "randn",
    "score_error",
    "strided_copy",
    "unit_roundoff",
]

DTYPES = {
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float32": np.dtype(np.float32),
    "float64": np.dtype(np.float64),
}
MAX_RATIO = 1.5
"""Errors may be this many times those of the ordinary implementation."""
MANY = 1 << 14
"""From this many values on, the errors of two computations can be compared without regard to luck."""
TILE = 64
"""Rows of the tiles that an error report names."""


@dataclass(frozen=True)
class Errors:
    """The two measures of an error, and where it is worst.

    `frobenius` is relative to the reference's norm, `largest` absolute; `worst` is (batch, head, first row, column) of
    the 64-row tile and the column with the largest error.
    """

    frobenius: float
    largest: float
    worst: tuple[int, int, int, int]

    def __str__(self) -> str:
        b, h, row, column = self.worst
        tile = f"batch {b}, head {h}, rows {row}-{row + TILE - 1}, column {column}"
        return f"relative Frobenius {self.frobenius:.3e}, largest {self.largest:.3e} in tile {tile}"


def measure(result: Array, reference: Array) -> Errors:
    """The errors of `result` against a float64 reference.

    NaNs and infinities must stand in the same places (a comparison with NaN would accept anything there).
    """
    assert result.shape == reference.shape, f"shape {result.shape}, expected {reference.shape}"
    result, reference = result.astype(np.float64), reference.astype(np.float64)
    finite = np.isfinite(reference)
    same = np.where(finite, np.isfinite(result), (result == reference) | (np.isnan(result) & np.isnan(reference)))
    if not same.all():
        at = tuple(int(i) for i in np.argwhere(~same)[0])
        count = np.count_nonzero(~same)
        raise AssertionError(f"{count} non-finite values differ, first at {at}: {result[at]}, expected {reference[at]}")
    if not finite.any():
        return Errors(0.0, 0.0, (0, 0, 0, 0))
    error = np.where(finite, np.abs(np.where(finite, result, 0.0) - np.where(finite, reference, 0.0)), 0.0)
    norm = float(np.linalg.norm(reference[finite]))
    total = float(np.linalg.norm(error))
    b, h, row, column = (int(i) for i in np.unravel_index(np.argmax(error), error.shape))
    frobenius = total / norm if norm else (math.inf if total else 0.0)
    return Errors(frobenius, float(error.max()), (b, h, row // TILE * TILE, column))


def ordinary(q: Array, k: Array, v: Array, *, causal: Causal = False, scale: float | None = None) -> Array:
    """Attention as one would write it on dense matrices in the input's dtype, and as GPU libraries compute it.

    Scores, row sums and products in float32 (float64 for float64), probabilities rounded to the input's dtype.
    """
    work = np.dtype(np.float64 if q.dtype == np.float64 else np.float32)
    group = q.shape[1] // k.shape[1]
    scale = 1.0 / math.sqrt(q.shape[3]) if scale is None else scale
    rows, columns = np.arange(q.shape[2])[:, None], np.arange(k.shape[2])
    hidden = columns > rows + causal_offset(causal, q.shape[2], k.shape[2])
    out = np.empty((*q.shape[:3], v.shape[3]), q.dtype)
    with np.errstate(all="ignore"):
        for b, h in np.ndindex(*q.shape[:2]):
            q1, k1, v1 = (x.astype(work) for x in (q[b, h], k[b, h // group], v[b, h // group]))
            scores = q1 @ k1.T * work.type(scale)
            scores[hidden] = -np.inf
            top = scores.max(axis=1, keepdims=True, initial=-np.inf)
            p = np.exp(scores - np.where(top == -np.inf, 0.0, top).astype(work))
            total = p.sum(axis=1, keepdims=True)
            product = p.astype(q.dtype).astype(work) @ v1
            out[b, h] = np.where(total == 0.0, 0.0, product / total)
    return out


def unit_roundoff(dtype: np.dtype[Any]) -> float:
    """The largest relative error of rounding to `dtype`."""
    return float(ml_dtypes.finfo(dtype).eps) / 2


def judge(result: Array, reference: Array, baseline: Array, size: float | None = None, floor: float = 0.0) -> None:
    """Fail unless `result` errs at most 1.5 times as much as `baseline`, in both measures.

    A few values can be lucky, so two amounts are granted on top. The baseline's largest error may lie below what
    rounding the output alone may cost: half a unit in the last place. And an error estimated from n values is only
    known to about one part in sqrt(n) of the roundings of the terms that an output sums up; `size` is the largest sum
    of these terms' magnitudes, the largest output unless given. `floor` is what the order of sums in float32 may cost,
    for results that nothing else distinguishes from zero.
    """
    ours, theirs = measure(result, reference), measure(baseline, reference)
    unit = unit_roundoff(result.dtype)
    finite = np.abs(reference[np.isfinite(reference)])
    peak, norm = float(finite.max(initial=0.0)), float(np.linalg.norm(finite))
    luck = 2 * unit * (peak if size is None else size)
    largest = MAX_RATIO * theirs.largest + unit * peak + luck / math.sqrt(max(1, finite.size)) + floor
    # Nothing is relative to zeros, such as gradients where each row sees one key: there the largest error decides.
    frobenius = MAX_RATIO * theirs.frobenius + (luck / norm if norm else math.inf)
    report = f"\n  result:   {ours}\n  baseline: {theirs}"
    assert ours.largest <= largest, f"largest error above {largest:.3e}{report}"
    assert ours.frobenius <= frobenius, f"relative Frobenius error above {frobenius:.3e}{report}"


def assert_accurate(
    out: Array, q: Array, k: Array, v: Array, *, causal: Causal = False, scale: float | None = None
) -> None:
    """Judge an attention output against the float64 oracle.

    float16 and bfloat16: the ordinary implementation in the same dtype is the baseline. float32 and float64: the bound
    of the computation's rounding errors, because there the largest error belongs to one unlucky row of large scores.
    """
    reference, _ = oracle(q, k, v, causal=causal, scale=scale)
    if out.dtype.itemsize == 2:
        sums, _ = oracle(q, k, np.abs(v), causal=causal, scale=scale)
        size = float(sums[np.isfinite(sums)].max(initial=0.0)) if out.size < MANY else None
        return judge(out, reference, ordinary(q, k, v, causal=causal, scale=scale), size)
    measure(out, reference)
    relative = 2 * score_error(q, k, scale, out.dtype) + (2 * k.shape[2] + 16) * unit_roundoff(out.dtype)
    peak = np.abs(v.astype(np.float64)).max(initial=0.0)
    doubt = 2 if out.dtype == np.float64 else 1  # the oracle's own error
    error = np.abs(np.where(np.isfinite(reference), out - reference, 0.0)).max(axis=3, initial=0.0)
    _assert_all_below(error, doubt * relative * peak, "output")


def score_error(q: Array, k: Array, scale: float | None, dtype: np.dtype[Any]) -> Array:
    """A bound of what rounding to `dtype` does to the scores of each query, (B, Hq, Nq).

    A score is a sum of D products, scaled, and the maximum subtracted: its error is below (D + 4) u times the sum of
    the products' sizes (Higham, Accuracy and Stability of Numerical Algorithms, section 3.1).
    """
    scale = 1.0 / math.sqrt(q.shape[3]) if scale is None else scale
    size_q, size_k = (np.abs(x.astype(np.float64)) for x in (q, k))
    largest_k = np.repeat(size_k.max(axis=2, keepdims=True, initial=0.0), q.shape[1] // k.shape[1], axis=1)
    return unit_roundoff(dtype) * (q.shape[3] + 4) * abs(scale) * (size_q * largest_k).sum(axis=3)


def assert_lse(lse: Array, q: Array, k: Array, v: Array, *, causal: Causal = False, scale: float | None = None) -> None:
    """Compare log-sum-exps with the oracle's, within what computing them in their own dtype may cost.

    The log-sum-exp errs by no more than the worst score, by the relative error of a sum of Nk exponentials, and by a
    few roundings of its own size.
    """
    _, reference = oracle(q, k, v, causal=causal, scale=scale)
    assert lse.shape == reference.shape and lse.dtype in (np.float32, np.float64)
    infinite = np.isneginf(reference)
    assert np.array_equal(np.isneginf(lse), infinite), "rows that see nothing must have an LSE of -inf, others not"
    unit = unit_roundoff(lse.dtype)
    ours, expected = np.where(infinite, 0.0, lse), np.where(infinite, 0.0, reference)
    allowed = score_error(q, k, scale, lse.dtype) + unit * (4 * np.abs(expected) + k.shape[2] + 8)
    _assert_all_below(np.abs(ours - expected), 2 * allowed if lse.dtype == np.float64 else allowed, "LSE")


def _assert_all_below(error: Array, allowed: Array, what: str) -> None:
    if not (error <= allowed).all():
        worst = tuple(int(i) for i in np.unravel_index(np.argmax(error - allowed), error.shape))
        raise AssertionError(f"{what} at (b, h, i) = {worst} off by {error[worst]:.3e}, allowed {allowed[worst]:.3e}")


def randn(rng: np.random.Generator, shape: Sequence[int], dtype: np.dtype[Any] | str, size: float = 1.0) -> Array:
    """Normal random values."""
    return (rng.standard_normal(tuple(shape)) * size).astype(DTYPES[dtype] if isinstance(dtype, str) else dtype)


def poisoned(shape: Sequence[int], dtype: np.dtype[Any]) -> Array:
    """An output buffer in which nothing may be left unwritten: all NaN."""
    return np.full(tuple(shape), np.nan, dtype)


def strided_copy(values: Array, order: Sequence[int], gaps: Sequence[int], flips: Sequence[bool]) -> Array:
    """`values` in a layout of its own: axes in memory `order`, each step `gaps` times as wide, some axes reversed.

    What lies between the elements is NaN.
    """
    sizes = [values.shape[axis] * gaps[axis] for axis in order]
    memory = np.full(sizes, np.nan, values.dtype)
    view = memory.transpose(np.argsort(order))[tuple(slice(None, None, gap) for gap in gaps)]
    view = view[tuple(slice(None, None, -1 if flip else None) for flip in flips)]
    view[...] = values
    return view
