"""What attention of 8-bit operands is held against: float64 on what the codes stand for, once for kernels of all kinds.

The baseline of errors is an ordinary implementation that rounds the probabilities to e4m3, as tensor cores want them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Hashable
from typing import Any, NamedTuple

import numpy as np

from cuflash.reference import oracle
from tests.fp8 import Real, rounding_probabilities
from tests.oracle import judge

SCORE_ROUNDING = 2.0**-11
"""What tensor cores leave of a sum of products of 8-bit numbers, relative to the sum of their magnitudes, at most."""


class Expected(NamedTuple):
    """Attention of operands in float64, the baseline of its errors, and what the LSE may be off."""

    out: np.ndarray
    lse: np.ndarray
    baseline: np.ndarray
    lse_allowed: np.ndarray

    @classmethod
    def of(cls, real: Real, causal: Any, scale: float, dtype: Any) -> Expected:
        out, lse = oracle(real.q, real.k, real.v + real.v_mean[:, :, None], causal=causal, scale=scale)
        group = real.q.shape[1] // real.k.shape[1]
        products = np.abs(real.q) @ np.repeat(np.abs(real.k), group, axis=1).swapaxes(2, 3)
        allowed = SCORE_ROUNDING * abs(scale) * products.max(axis=3, initial=0) + 1e-4
        return cls(out, lse, rounding_probabilities(real, causal, scale, dtype), allowed)


_expected: dict[Hashable, Expected] = {}
"""By the bytes of the operands: kernels of all kinds get the same ones."""


def judge_attention(out: np.ndarray, lse: np.ndarray, real: Real, causal: Any, scale: float) -> None:
    """Output and LSE of a call, (batch, heads, seq, ...), against what they should be."""
    causal = "bottom_right" if causal is True else causal
    digest = hashlib.sha256()
    for x in real:
        digest.update(x.tobytes())
    key = digest.digest(), tuple(x.shape for x in real), causal, scale, out.dtype
    if key not in _expected:
        _expected[key] = Expected.of(real, causal, scale, out.dtype)
    expected = _expected[key]
    judge(out, expected.out, expected.baseline)
    dead = np.isneginf(expected.lse)
    assert (np.isneginf(lse) == dead).all()
    error = np.abs(np.where(dead, 0, lse) - np.where(dead, 0, expected.lse))
    assert (error <= expected.lse_allowed).all(), f"LSE off by {error.max()}, accepted {expected.lse_allowed.max()}"
