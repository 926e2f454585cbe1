"""What results are judged by: plain attention in float64, and the tile schedule of a GPU kernel executed by NumPy.

Both take and return (batch, heads, seq, dim) arrays.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from .config import MOST_SLACK, ForwardConfig
from .cpu import Array, causal_offset
from .request import Causal
from .sm90_config import WARPGROUP_ROWS, Sm90Config

__all__ = ["oracle", "oracle_backward", "tile_schedule"]

LARGE_PRODUCT = 512.0
"""From here on a kernel subtracts the reference before it multiplies by the scale (see device/softmax.cuh)."""
SHARE_BITS = 4.0
"""How the slack of a Hopper kernel grows, up to `MOST_SLACK`: kShareBits in device/softmax.cuh."""


def oracle(q: Array, k: Array, v: Array, *, causal: Causal = False, scale: float | None = None) -> tuple[Array, Array]:
    """Softmax(scale * Q K^T + mask) V as the formula says, one dense float64 matrix of scores for each head.

    Parameters
    ----------
    q : array (B, Hq, Nq, D)
    k : array (B, Hk, Nk, D)
    v : array (B, Hk, Nk, Dv)
        Any dtype that converts to float64.
    causal : False, "bottom_right" or "top_left"
    scale : float, optional
        1 / sqrt(D) unless given.

    Returns
    -------
    out : float64 array (B, Hq, Nq, Dv)
    lse : float64 array (B, Hq, Nq)
        Natural logarithm. Rows that see no key, or only scores of -inf, have 0 and -inf.
    """
    batch, heads, seqlen_q, head_dim = q.shape
    group = heads // max(1, k.shape[1])
    scale = 1.0 / math.sqrt(head_dim) if scale is None else scale
    visible = _visible(causal, seqlen_q, k.shape[2])
    out = np.empty((batch, heads, seqlen_q, v.shape[3]))
    lse = np.empty((batch, heads, seqlen_q))
    with np.errstate(all="ignore"):
        for b, h in np.ndindex(batch, heads):
            q1, k1, v1 = (x.astype(np.float64) for x in (q[b, h], k[b, h // group], v[b, h // group]))
            scores = np.where(visible, scale * q1 @ k1.T, -np.inf)
            out[b, h], lse[b, h] = _dense_softmax(scores, v1, visible)
    return out, lse


def oracle_backward(
    dout: Array,
    q: Array,
    k: Array,
    v: Array,
    *,
    dlse: Array | None = None,
    causal: Causal = False,
    scale: float | None = None,
) -> tuple[Array, Array, Array]:
    """The gradients of `oracle`, dense and in float64: of sum(dout * out), and of sum(dlse * lse) where it is given.

    Parameters
    ----------
    dout : array (B, Hq, Nq, Dv)
    q, k, v, causal, scale
        As in `oracle`.
    dlse : array (B, Hq, Nq), optional

    Returns
    -------
    dq, dk, dv : float64 arrays of the shapes of q, k and v
        Rows that see no key, or only scores of -inf, have a gradient of 0 and add nothing, whatever dout holds there.
    """
    group = q.shape[1] // max(1, k.shape[1])
    scale = 1.0 / math.sqrt(q.shape[3]) if scale is None else scale
    visible = _visible(causal, q.shape[2], k.shape[2])
    dq, dk, dv = (np.zeros(x.shape) for x in (q, k, v))
    with np.errstate(all="ignore"):
        for b, h in np.ndindex(*q.shape[:2]):
            dout1, q1 = (x[b, h].astype(np.float64) for x in (dout, q))
            k1, v1 = (x[b, h // group].astype(np.float64) for x in (k, v))
            scores = np.where(visible, scale * q1 @ k1.T, -np.inf)
            out, lse = _dense_softmax(scores, v1, visible)
            seen = visible & ~np.isneginf(lse)[:, None]
            p = np.where(seen, np.exp(scores - lse[:, None]), 0.0)
            delta = (dout1 * out).sum(axis=1) - (0.0 if dlse is None else dlse[b, h].astype(np.float64))
            ds = np.where(seen, p * (dout1 @ v1.T - delta[:, None]), 0.0)
            dq[b, h] = scale * _product(ds, k1, seen)
            dk[b, h // group] += scale * _product(ds.T, q1, seen.T)
            dv[b, h // group] += _product(p.T, dout1, seen.T)
    return dq, dk, dv


def _visible(causal: Causal, seqlen_q: int, seqlen_k: int) -> Array:
    """Which query sees which key, (queries, keys)."""
    queries, keys = np.arange(seqlen_q)[:, None], np.arange(seqlen_k)
    return keys <= queries + causal_offset(causal, seqlen_q, seqlen_k)


def _product(weights: Array, values: Array, seen: Array) -> Array:
    """Weights @ values; a NaN or infinity reaches only the rows that see it, for 0 * NaN is NaN."""
    if np.isfinite(values).all():
        return weights @ values
    rows = [weights[i, visible] @ values[visible] for i, visible in enumerate(seen)]
    return np.array(rows).reshape(len(weights), values.shape[1])


def _dense_softmax(scores: Array, v: Array, visible: Array) -> tuple[Array, Array]:
    top = np.max(scores, axis=1, keepdims=True, initial=-np.inf)
    weights = np.exp(scores - np.where(top == -np.inf, 0.0, top))
    total = weights.sum(axis=1, keepdims=True)
    out = np.where(total == 0.0, 0.0, _product(weights, v, visible) / total)
    return out, (top + np.log(total))[:, 0]


def tile_schedule(
    q: Array,
    k: Array,
    v: Array,
    *,
    causal: Causal,
    scale: float,
    config: ForwardConfig,
    scale_first: bool = False,
) -> tuple[Array, Array]:
    """What the forward kernel of `config` computes, up to the order of sums inside a matrix product.

    The last key tile comes first; a warp keeps an older softmax reference until a score exceeds it by 2**slack, or more
    in a long row of the Hopper family, in the probability; probabilities are rounded to the input dtype before P V;
    sums, maxima and products are float32.

    Parameters
    ----------
    q, k, v : float16 or bfloat16 arrays
        As in `oracle`.
    causal, scale
        As in `attention_cpu`.
    config : ForwardConfig
        Gives ``block_m``, ``block_n``, ``warps``, ``slack`` and, in the Hopper family, ``stages`` and ``exact``.
    scale_first : bool
        The kernel variant that multiplies the scores by the scale before the softmax.

    Returns
    -------
    out : array (B, Hq, Nq, Dv) of the input dtype
    lse : float32 array (B, Hq, Nq)
    """
    batch, heads, seqlen_q, _ = q.shape
    group = heads // max(1, k.shape[1])
    offset = causal_offset(causal, seqlen_q, k.shape[2])
    out = np.empty((batch, heads, seqlen_q, v.shape[3]), q.dtype)
    lse = np.empty((batch, heads, seqlen_q), np.float32)
    warp_rows = config.block_m // config.warps
    slack = _slack_range(config)
    with np.errstate(all="ignore"):
        for b, h in np.ndindex(batch, heads):
            q1, k1, v1 = (x.astype(np.float32) for x in (q[b, h], k[b, h // group], v[b, h // group]))
            for first in range(0, seqlen_q, warp_rows):
                rows = slice(first, min(first + warp_rows, seqlen_q))
                warp = _Warp(q1[rows], v.shape[3], q.dtype, scale, scale_first, slack)
                block_end = first // config.block_m * config.block_m + config.block_m
                last_visible = np.arange(rows.start, rows.stop) + offset
                tiles = _key_tiles(block_end + offset, k.shape[2], config)
                if isinstance(config, Sm90Config):
                    consumer_end = first // WARPGROUP_ROWS * WARPGROUP_ROWS + WARPGROUP_ROWS
                    tiles = tiles[_skipped_tiles(tiles, consumer_end + offset, config) :]
                for keys in tiles:
                    if keys.start <= last_visible[-1] or isinstance(config, Sm90Config):
                        warp.step(k1[keys], v1[keys], np.arange(keys.start, keys.stop) > last_visible[:, None])
                out[b, h, rows], lse[b, h, rows] = warp.result()
    return out, lse


def _key_tiles(seen: int, seqlen_k: int, config: ForwardConfig) -> list[slice]:
    """The key tiles of a query tile whose last row sees `seen` keys, in the kernel's order.

    Warps of the Ampere-style family leave out what none of their rows sees. Warpgroups of the Hopper family compute at
    least the first key tile, and what `_skipped_tiles` leaves of the others.
    """
    least = 1 if isinstance(config, Sm90Config) else 0
    starts = range(0, max(least, min(seen, seqlen_k)), config.block_n)
    return [slice(start, min(start + config.block_n, seqlen_k)) for start in reversed(starts)]


def _skipped_tiles(tiles: list[slice], seen: int, config: Sm90Config) -> int:
    """How many key tiles a consumer, whose last row sees `seen` keys, skips: fewer than there are stages."""
    if config.block_m - WARPGROUP_ROWS < config.block_n:
        return 0
    unseen = [keys for keys in tiles[:-1] if keys.start >= seen]
    return min(len(unseen), config.stages - 1)


def _slack_range(config: ForwardConfig) -> tuple[float, float]:
    """The slack of a short row, and what it may grow to in a long one."""
    if not isinstance(config, Sm90Config):
        return config.slack, config.slack
    return (-math.inf, -math.inf) if config.exact else (config.slack, MOST_SLACK)


class _Warp:
    """The registers of one warp: its rows of Q, O, the softmax reference and the row sums."""

    def __init__(
        self,
        q: Array,
        head_dim_v: int,
        dtype: np.dtype[Any],
        scale: float,
        scale_first: bool,
        slack: tuple[float, float],
    ) -> None:
        log2_scale = np.float32(scale * math.log2(math.e))
        self.q, self.dtype = q, dtype
        self.first_factor = log2_scale if scale_first else np.float32(1.0)
        self.factor = np.float32(1.0) if scale_first else log2_scale
        self.slack = slack
        self.large = np.float32(LARGE_PRODUCT) / self.factor
        self.o = np.zeros((len(q), head_dim_v), np.float32)
        self.sum = np.zeros((len(q), 1), np.float32)
        self.reference = np.full((len(q), 1), -np.inf, np.float32)

    def step(self, k: Array, v: Array, hidden: Array) -> None:
        scores = self.q @ k.T * self.first_factor
        scores[hidden] = -np.inf
        top = np.fmax.reduce(scores, axis=1, keepdims=True)
        grown = np.clip(np.log2(self.sum) - SHARE_BITS, *self.slack)
        limit = self.reference + grown / self.factor
        usable = (limit >= 0) & (limit < self.large)
        exponent = self.reference * self.factor
        if not np.all(usable & (top < limit)):
            exponent = self._raise_reference(scores, np.fmax(self.reference, top))
        p = np.exp2((scores.astype(np.float64) * self.factor - exponent).astype(np.float32))  # a fused multiply-add
        self.sum += p.sum(axis=1, keepdims=True)
        self.o += p.astype(self.dtype).astype(np.float32) @ v

    def _raise_reference(self, scores: Array, top: Array) -> Array:
        """Rescale O and the sums to the new reference; returns what the step subtracts in the exponent."""
        old, self.reference = self.reference, top
        empty = top == -np.inf
        large = ~empty & (np.abs(top) >= self.large)
        shift = np.where(large, (old - top) * self.factor, old * self.factor - top * self.factor)
        correction = np.where(old == -np.inf, np.float32(0.0), np.exp2(shift))
        self.sum *= correction
        self.o *= correction
        scores -= np.where(large, top, np.float32(0.0))
        return np.where(empty | large, np.float32(0.0), top * self.factor)

    def result(self) -> tuple[Array, Array]:
        dead = self.sum == 0.0
        out = self.o * np.where(dead, np.float32(0.0), np.float32(1.0) / self.sum)
        lse = (self.reference * self.factor + np.log2(self.sum)) * np.float32(math.log(2.0))
        return out.astype(self.dtype), np.where(dead, np.float32(-np.inf), lse)[:, 0]
