"""The gradients of attention on the CPU: blocked like `cpu`, with the probabilities computed again.

The method is that of FlashAttention-2 (Dao 2023, section on the backward pass): the forward pass leaves the output and
the log-sum-exp L of each row, from which each tile of P = exp(S - L) follows without a running maximum. With
delta = rowsum(dO * O) and what arrives through L itself, dL, the gradient of the scores is
dS = P * (dO V^T - delta + dL), and

    dV = P^T dO,   dK = scale * dS^T Q,   dQ = scale * dS K.

Only tiles of P and dS exist, and the sums of dK and dV of a few heads: memory is O(N).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from .cpu import (
    Array,
    Block,
    Scratch,
    Tiling,
    by_query,
    causal_offset,
    compute_dtype,
    gather_rows,
    hidden_keys,
    products,
    scores,
    weigh,
)
from .request import Causal

__all__ = ["attention_backward_cpu"]


def attention_backward_cpu(
    dout: Array,
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    lse: Array,
    *,
    dlse: Array | None,
    causal: Causal,
    scale: float,
    grads: tuple[Array, Array, Array],
) -> None:
    """Write the gradients of Q, K and V into `grads`.

    Arguments are taken as checked: `cuflash.attention_backward` is the door.

    Parameters
    ----------
    dout : array (B, Hq, Nq, Dv)
    q, k, v : array
        As for `attention_cpu`; so are `causal` and `scale`, and the dtype of the computation.
    out : array (B, Hq, Nq, Dv)
    lse : array (B, Hq, Nq)
        What `attention_cpu` gave.
    dlse : array (B, Hq, Nq), optional
    grads : arrays of the shapes of q, k and v
        They share no memory with the inputs, nor with each other.

    Notes
    -----
    Rows whose LSE is -inf saw nothing: their gradient is 0, and whatever stands in their rows of `dout` and `dlse` has
    no influence. A NaN reaches only the gradients of rows and keys that see each other. Sums are taken in a fixed
    order, so that results repeat bit for bit.
    """
    if 0 in q.shape[:3] or 0 in k.shape[:3]:
        for grad in grads:
            grad[...] = 0
        return
    offset = causal_offset(causal, q.shape[2], k.shape[2])
    scratch = Scratch(compute_dtype(q.dtype, scale))
    call = _Call(q, k, v, scale, offset, scratch, dout, out, lse, dlse, *grads)
    with np.errstate(all="ignore"):  # infinities and NaNs are values here, and quiet ones
        for batches, heads in call.heads():
            _differentiate_heads(call, batches, heads)


@dataclass(frozen=True)
class _Call(Tiling):
    dout: Array
    out: Array
    lse: Array
    dlse: Array | None
    dq: Array
    dk: Array
    dv: Array


class _Rows(NamedTuple):
    """A block's rows, (batch, kv head, group * query, ...).

    `delta` is what dP is diminished by: rowsum(dO * O) - dL. Dead rows, which see nothing, are 0 throughout.
    """

    q: Array
    dout: Array
    lse: Array
    delta: Array
    dead: Array | None


def _differentiate_heads(call: _Call, batches: slice, heads: slice) -> None:
    """All queries against all keys of some batches and key/value heads."""
    where = batches, heads
    dk = call.scratch.full("dk", call.k[where].shape, 0.0)
    dv = call.scratch.full("dv", call.v[where].shape, 0.0)
    for queries in call.queries():
        _differentiate_block(call, Block(batches, heads, queries), dk, dv)
    if not call.scales_queries:
        dk *= call.scale
    np.copyto(call.dk[where], dk, casting="unsafe")
    np.copyto(call.dv[where], dv, casting="unsafe")


def _differentiate_block(call: _Call, block: Block, dk: Array, dv: Array) -> None:
    """One block of queries against all its keys: stores its dQ, and adds to dK and dV."""
    scratch = call.scratch
    rows = _gather(call, block)
    dq = scratch.full("dq", rows.q.shape, 0.0)
    for keys, masked in call.key_tiles(block.queries):
        k = scratch.operand("k", call.k[block.batches, block.heads, keys])
        v = scratch.operand("v", call.v[block.batches, block.heads, keys])
        hidden = hidden_keys(call, block.queries, keys) if masked else None
        p = _probabilities(call, rows, k)
        _clear(p, rows.dead, hidden, call.group)
        dv[:, :, keys] += _weigh_rows(scratch, p, rows.dout, hidden, call.group)

        ds = products(scratch, "ds", rows.dout, v)
        ds -= rows.delta
        ds *= p
        _clear(ds, rows.dead, hidden, call.group)  # once more: 0 * NaN is NaN
        dk[:, :, keys] += _weigh_rows(scratch, ds, rows.q, hidden, call.group)
        dq += weigh(scratch, ds, k, hidden, call.group)
    dq *= call.scale
    if rows.dead is not None:
        np.copyto(dq, 0.0, where=rows.dead)
    target = call.dq[block.batches, call.query_heads(block.heads), block.queries]
    np.copyto(target, dq.reshape(target.shape), casting="unsafe")


def _gather(call: _Call, block: Block) -> _Rows:
    q, dout, out, lse = (
        gather_rows(call, block, name, x)
        for name, x in (("q", call.q), ("dout", call.dout), ("out", call.out), ("lse", call.lse[..., None]))
    )
    if call.scales_queries:
        q *= call.scale
    out *= dout
    ones = call.scratch.full("ones", (out.shape[3], 1), 1.0)
    delta = np.matmul(out, ones, out=call.scratch.empty("delta", lse.shape))
    if call.dlse is not None:
        delta -= gather_rows(call, block, "dlse", call.dlse[..., None])
    dead = np.isneginf(lse)
    if not dead.any():
        return _Rows(q, dout, lse, delta, None)
    for x in (q, dout, lse, delta):
        np.copyto(x, 0.0, where=dead)
    return _Rows(q, dout, lse, delta, dead)


def _probabilities(call: _Call, rows: _Rows, k: Array) -> Array:
    """P of a tile, the causal mask aside.

    None is above 1. An LSE that was rounded by more than that, as one of 1e10 is in float32, must not make it so.
    """
    p = scores(call, rows.q, k)
    if p.dtype != call.lse.dtype:  # a scale near float32's limits: round the scores as the LSE was
        np.copyto(p, p.astype(call.lse.dtype))
    p -= rows.lse
    np.minimum(p, 0.0, out=p)
    return np.exp(p, out=p)


def _clear(x: Array, dead: Array | None, hidden: Array | None, group: int) -> None:
    """Make P or dS 0 where a row sees nothing of a key."""
    if dead is not None:
        np.copyto(x, 0.0, where=dead)
    if hidden is not None:
        np.copyto(by_query(x, group), 0.0, where=hidden)


def _weigh_rows(scratch: Scratch, p: Array, x: Array, hidden: Array | None, group: int) -> Array:
    """P^T X, summed over the rows: those of all query heads of a group.

    The twin of `weigh`: a NaN or infinity of a row of X must not reach the keys that are hidden from it.
    """
    product = scratch.empty("product", (*p.shape[:2], p.shape[3], x.shape[3]))
    if hidden is None or np.isfinite(x).all():
        return np.matmul(p.swapaxes(2, 3), x, out=product)
    weights, values = by_query(p, group), by_query(x, group)
    for key, first in enumerate(np.count_nonzero(hidden, axis=0)):
        product[:, :, key] = np.einsum("bhgr,bhgrd->bhd", weights[:, :, :, first:, key], values[:, :, :, first:])
    return product
