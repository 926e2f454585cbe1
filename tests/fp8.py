"""What attention of quantized tensors is held against, on a GPU and in the emulation."""

from __future__ import annotations

from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

import cuflash
from cuflash.dequantized import Dequantized
from cuflash.fp8_layout import TILE, tiles

__all__ = ["Real", "decoded", "rounding_probabilities"]


class Real(NamedTuple):
    """The operands as float64 numbers, (batch, heads, seq, dim), in the basis of the codes; V without its mean."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    v_mean: np.ndarray

    @classmethod
    def of(cls, *quantized: cuflash.QuantizedTensor) -> Real:
        q, k, v = (_values(x.to_host()) for x in quantized)
        mean = quantized[2].to_host().mean
        v_mean = np.zeros((*v.shape[:2], v.shape[3])) if mean is None else mean[..., : v.shape[3]].astype(np.float64)
        return cls(q, k, v - v_mean[:, :, None], v_mean)


def _values(x: cuflash.QuantizedTensor) -> np.ndarray:
    every = slice(None)
    return Dequantized.of(x)[every, every, slice(0, x.sizes[1])].astype(np.float64)


def decoded(x: np.ndarray, scale: Any, layout: str = "bshd") -> np.ndarray:
    """What 8-bit arrays of the caller stand for, by the definition: float64, (batch, heads, seq, dim)."""
    real = x.astype(np.float64)
    real = real.swapaxes(1, 2) if layout == "bshd" else real
    factors = np.asarray(1 if scale is None else scale, np.float32).astype(np.float64)
    factors = factors.reshape(factors.shape + (1,) * (3 - factors.ndim))
    factors = np.broadcast_to(factors, (*real.shape[:2], tiles(real.shape[2])))
    return real * np.repeat(factors, TILE, axis=2)[:, :, : real.shape[2], None]


def rounding_probabilities(real: Real, causal: Any, scale: float, dtype: Any) -> np.ndarray:
    """The ordinary implementation: probabilities relative to the row's largest, which is 256, as e4m3."""
    group = real.q.shape[1] // real.k.shape[1]
    (nq, nk), out = (real.q.shape[2], real.k.shape[2]), np.zeros((*real.q.shape[:3], real.v.shape[3]))
    offset = nk - nq if causal == "bottom_right" else 0
    hidden = np.arange(nk) > np.arange(nq)[:, None] + offset if causal else np.zeros((nq, nk), bool)
    for b, h in np.ndindex(*real.q.shape[:2]):
        scores = np.where(hidden, -np.inf, real.q[b, h] @ real.k[b, h // group].T * scale)
        top = scores.max(axis=1, keepdims=True)
        p = 256 * np.exp(scores - np.where(np.isneginf(top), 0, top))
        total = p.sum(axis=1, keepdims=True)
        rounded = p.astype(np.float32).astype(ml_dtypes.float8_e4m3fn).astype(np.float64)
        with np.errstate(invalid="ignore"):
            result = rounded @ real.v[b, h // group] / total + real.v_mean[b, h // group]
        out[b, h] = np.where(total == 0, 0, result)
    return out.astype(dtype)
