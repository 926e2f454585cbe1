"""How gradients are judged, by CPU and GPU tests: an ordinary backward pass, and what rounding may cost.

Arrays are NumPy's, (batch, heads, seq, dim), as in `tests.oracle`.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from cuflash.cpu import Array, causal_offset
from cuflash.reference import oracle, oracle_backward
from cuflash.request import Causal
from tests.oracle import MANY, judge, measure, score_error, unit_roundoff

__all__ = ["Backward", "assert_gradients", "ordinary_backward"]

NAMES = ("dq", "dk", "dv")


class Backward(NamedTuple):
    """The arguments of one backward pass."""

    dout: Array
    q: Array
    k: Array
    v: Array
    out: Array
    lse: Array
    dlse: Array | None = None
    causal: Causal = False
    scale: float | None = None

    @property
    def factor(self) -> float:
        return 1.0 / math.sqrt(self.q.shape[3]) if self.scale is None else self.scale

    @property
    def group(self) -> int:
        return self.q.shape[1] // self.k.shape[1]

    @property
    def hidden(self) -> Array:
        rows, columns = np.arange(self.q.shape[2])[:, None], np.arange(self.k.shape[2])
        return columns > rows + causal_offset(self.causal, self.q.shape[2], self.k.shape[2])

    def reference(self) -> tuple[Array, Array, Array]:
        return oracle_backward(self.dout, self.q, self.k, self.v, dlse=self.dlse, causal=self.causal, scale=self.scale)


def ordinary_backward(call: Backward) -> tuple[Array, Array, Array]:
    """The gradients as one would write them on dense matrices in the input's dtype, and as GPU libraries compute them.

    Scores and sums in float32 (float64 for float64), P and dS rounded to the input's dtype.
    """
    dtype = call.q.dtype
    work = np.dtype(np.float64 if dtype == np.float64 else np.float32)
    scale = work.type(call.factor)
    dq, dk, dv = (np.zeros(x.shape, work) for x in (call.q, call.k, call.v))
    for b, h in np.ndindex(*call.q.shape[:2]):
        dout, q, out, lse = (x[b, h].astype(work) for x in (call.dout, call.q, call.out, call.lse))
        k, v = (x[b, h // call.group].astype(work) for x in (call.k, call.v))
        dead = np.isneginf(lse)
        p = np.exp(np.minimum(q @ k.T * scale - np.where(dead, 0, lse)[:, None], 0))
        p[call.hidden | dead[:, None]] = 0
        delta = (dout * out).sum(axis=1) - (0 if call.dlse is None else call.dlse[b, h].astype(work))
        ds = (p * (dout @ v.T - delta[:, None])).astype(dtype).astype(work)
        dq[b, h] = scale * (ds @ k)
        dk[b, h // call.group] += scale * (ds.T @ q)
        dv[b, h // call.group] += p.astype(dtype).astype(work).T @ dout
    return dq.astype(dtype), dk.astype(dtype), dv.astype(dtype)


def assert_gradients(grads: tuple[Array, ...], call: Backward) -> None:
    """Judge gradients against the float64 oracle.

    float16 and bfloat16: the ordinary backward pass in the same dtype is the baseline. float32 and float64: the bound
    of the computation's rounding errors, as in `assert_accurate`.
    """
    for name, grad, like in zip(NAMES, grads, (call.q, call.k, call.v), strict=True):
        assert grad.dtype == like.dtype and grad.shape == like.shape, name
    references = call.reference()
    sizes, bounds = _sizes(call)
    baselines = ordinary_backward(call) if call.q.dtype.itemsize == 2 else references
    for name, grad, reference, baseline, size, bound in zip(
        NAMES, grads, references, baselines, sizes, bounds, strict=True
    ):
        try:
            if grad.dtype.itemsize == 2:
                peak = float(size.max(initial=0.0))
                # dP and delta, sums of Dv products, cancel where a row sees one key.
                floor = call.v.shape[3] * unit_roundoff(np.dtype(np.float32)) * peak
                judge(grad, reference, baseline, peak if grad.size < MANY else None, floor)
            else:
                measure(grad, reference)
                excess = np.abs(grad - reference) - bound
                worst = np.unravel_index(np.argmax(excess), excess.shape) if excess.size else ()
                assert (excess <= 0).all(), f"at {worst}: {grad[worst]}, expected {reference[worst]} +- {bound[worst]}"
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from None


def _sizes(call: Backward) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
    """For each gradient the sum of its terms' magnitudes, and a bound of what rounding to the input's dtype may cost.

    P errs relatively by the error of its score and of its LSE, dP and delta by those of sums of Dv products, where
    delta has that of the output as well; the last product sums these, and errs in proportion to its terms.
    """
    dout, q, k, v = (np.abs(x.astype(np.float64)) for x in call[:4])
    unit = unit_roundoff(call.q.dtype)
    seqlen_k, head_dim_v = v.shape[2:]
    out, lse = oracle(call.q, call.k, call.v, causal=call.causal, scale=call.scale)
    live = ~np.isneginf(lse)
    lse = np.where(live, lse, 0.0)
    doubt = 2 * score_error(call.q, call.k, call.scale, call.q.dtype) + unit * (4 * np.abs(lse) + seqlen_k + 8)
    doubt = 2 * doubt + (3 * seqlen_k + 2 * head_dim_v + call.group * q.shape[2] + 64) * unit
    doubt *= 2 if call.q.dtype == np.float64 else 1  # the oracle's own error
    sizes: list[Array] = [np.zeros(x.shape) for x in (q, k, v)]
    bounds: list[Array] = [np.full(x.shape, 1e-37) for x in (q, k, v)]
    for b, h in np.ndindex(*q.shape[:2]):
        at, key_head = (b, h), (b, h // call.group)
        p = np.exp(call.factor * call.q[at].astype(float) @ call.k[key_head].astype(float).T - lse[at][:, None])
        p = np.where(call.hidden | ~live[at][:, None], 0.0, p)
        arriving = 0.0 if call.dlse is None else np.abs(call.dlse[at].astype(float))[:, None]
        ends = (
            (dout[at] * np.abs(out[at])).sum(axis=1)[:, None],
            dout[at].sum(axis=1)[:, None] * v[key_head].max(initial=0.0),
        )
        for sums, end, weight in ((sizes, ends[0], 1.0), (bounds, ends[1], doubt[at][:, None])):
            ds = p * (dout[at] @ v[key_head].T + end + arriving) * weight * abs(call.factor)
            sums[0][at] += ds @ k[key_head]
            sums[1][key_head] += ds.T @ q[at]
            sums[2][key_head] += (p * weight).T @ dout[at]
    return tuple(sizes), tuple(bounds)


def run(call: Backward, function: Any) -> tuple[Array, ...]:
    """Gradients by a function with the interface of `attention_backward_cpu`, into poisoned arrays."""
    grads = tuple(np.full(x.shape, np.nan, x.dtype) for x in (call.q, call.k, call.v))
    function(*call[:6], dlse=call.dlse, causal=call.causal, scale=call.factor, grads=grads)
    return grads
