"""Error against float64, computed in blocks of rows on the device for a sample of heads."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

Results = Mapping[str, Mapping[str, Any]]
"""Arrays by who made them, then by what they are: ``"out"``, ``"dq"``, ``"dk"``, ``"dv"``."""

ROWS = 1024
"""Query rows of a block: 1024 x 16384 float64 scores are 134 MB."""


@dataclass(frozen=True, slots=True)
class Error:
    """How far a result is from float64.

    Attributes
    ----------
    relative : float
        Frobenius norm of the difference over that of the exact result.
    largest : float
        Largest absolute difference, and ``where`` it is: (batch, row, head, column).
    """

    relative: float
    largest: float
    where: tuple[int, int, int, int]


def array_module() -> Any:
    """CuPy if its float64 matrix product works here (it needs cuBLAS), else NumPy: slower, the same numbers."""
    try:
        import cupy

        probe = cupy.ones((8, 8))
        (probe @ probe).sum().item()
    except Exception:  # CuPy raises whatever the loader of the missing library raises
        return np
    return cupy


class Exact(NamedTuple):
    """One head of a result in float64, (seq, dim), and which it is of which result."""

    result: str
    batch: int
    head: int
    values: Any


def exact_head(q: Any, k: Any, v: Any, causal: bool, xp: Any) -> Any:
    """softmax(Q K^T / sqrt(D) + mask) V of one head in float64; (seq, dim) arrays, bottom-right causal.

    Rows that see no key are 0.
    """
    q, k, v = (to_float64(a) for a in (q, k, v))
    out = xp.empty((q.shape[0], v.shape[1]))
    for rows, weights in exact_weights(q, k, causal, xp):
        out[rows] = weights @ v
    return out


def exact_gradients(dout: Any, q: Any, k: Any, v: Any, causal: bool, xp: Any) -> tuple[Any, Any, Any, Any]:
    """The same output, and its gradients of Q, K and V."""
    dout, q, k, v = (to_float64(a) for a in (dout, q, k, v))
    out, (dq, dk, dv) = xp.empty((q.shape[0], v.shape[1])), (xp.zeros(x.shape) for x in (q, k, v))
    scale = q.shape[1] ** -0.5
    for rows, weights in exact_weights(q, k, causal, xp):
        out[rows] = weights @ v
        delta = (dout[rows] * out[rows]).sum(axis=1, keepdims=True)
        dscores = dout[rows] @ v.T
        dscores -= delta
        dscores *= weights
        dscores *= scale
        dq[rows] = dscores @ k
        dk += dscores.T @ q[rows]
        dv += weights.T @ dout[rows]
    return out, dq, dk, dv


def exact_weights(q: Any, k: Any, causal: bool, xp: Any) -> Iterator[tuple[slice, Any]]:
    """softmax(Q K^T / sqrt(D) + mask) by blocks of rows; 0 in rows that see no key."""
    keys = xp.arange(k.shape[0])
    offset = k.shape[0] - q.shape[0]
    for start in range(0, q.shape[0], ROWS):
        rows = slice(start, min(start + ROWS, q.shape[0]))
        weights = q[rows] @ k.T
        weights *= q.shape[1] ** -0.5
        if causal:
            visible = keys[None, :] <= xp.arange(rows.start, rows.stop)[:, None] + offset
            weights = xp.where(visible, weights, -xp.inf)
        peak = weights.max(axis=1, keepdims=True)
        weights -= xp.where(peak == -xp.inf, 0.0, peak)
        xp.exp(weights, out=weights)
        total = weights.sum(axis=1, keepdims=True)
        weights /= xp.where(total == 0.0, 1.0, total)
        yield rows, weights


def to_float64(array: Any) -> Any:
    """Widen; bfloat16 by its bits, so that no framework's support of it is needed."""
    if str(array.dtype) == "bfloat16":
        array = (array.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return array.astype(np.float64)


def sampled_heads(batch: int, heads: int, count: int) -> list[tuple[int, int]]:
    """``count`` (batch, head) pairs spread from the first to the last."""
    total = batch * heads
    flat = sorted({round(i * (total - 1) / max(1, count - 1)) for i in range(count)})
    return [divmod(i, heads) for i in flat]


def to_module(array: Any, xp: Any) -> Any:
    return array.get() if xp is np and hasattr(array, "get") else array


def exact_outputs(arrays: Sequence[Any], causal: bool, xp: Any, heads: int) -> Iterator[Exact]:
    """The output for q, k and v, (batch, seq, heads, dim) arrays, on a sample of query heads."""
    q, k, v = arrays
    group = q.shape[2] // k.shape[2]
    for b, h in sampled_heads(q.shape[0], q.shape[2], heads):
        q1, k1, v1 = (to_module(x[b, :, i], xp) for x, i in ((q, h), (k, h // group), (v, h // group)))
        yield Exact("out", b, h, exact_head(q1, k1, v1, causal, xp))


def exact_results(arrays: Sequence[Any], causal: bool, xp: Any, heads: int) -> Iterator[Exact]:
    """Output and gradients for q, k, v and dout, on a sample of key/value heads and all query heads that share them."""
    q, k, v, dout = arrays
    group = q.shape[2] // k.shape[2]
    for b, hk in sampled_heads(q.shape[0], k.shape[2], heads):
        k1, v1 = (to_module(x[b, :, hk], xp) for x in (k, v))
        dk = dv = 0.0
        for h in range(hk * group, (hk + 1) * group):
            q1, dout1 = (to_module(x[b, :, h], xp) for x in (q, dout))
            out, dq, dk_share, dv_share = exact_gradients(dout1, q1, k1, v1, causal, xp)
            yield from (Exact("out", b, h, out), Exact("dq", b, h, dq))
            dk, dv = dk + dk_share, dv + dv_share
        yield from (Exact("dk", b, hk, dk), Exact("dv", b, hk, dv))


def errors(outputs: dict[str, Any], inputs: list[Any], causal: bool, xp: Any, heads: int = 4) -> dict[str, Error]:
    """The error of each output, (batch, seq, heads, dim) arrays, on a sample of query heads.

    NumPy on the host takes seconds for a long head: see ``array_module``.
    """
    found = compare(
        {name: {"out": output} for name, output in outputs.items()}, exact_outputs(inputs, causal, xp, heads), xp
    )
    return {name: of_results["out"] for name, of_results in found.items()}


def compare(results: Results, exact: Iterable[Exact], xp: Any) -> dict[str, dict[str, Error]]:
    """The error of everybody's results, as far as exact ones are given, (batch, seq, heads, dim) arrays.

    Parameters
    ----------
    results : dict
        By who made them, then by what they are.
    """
    norms: dict[str, float] = {}
    tallies: dict[tuple[str, str], Tally] = {}
    for one in exact:
        norms[one.result] = norms.get(one.result, 0.0) + float((one.values**2).sum())
        for name, made in results.items():
            if one.result in made:
                tally = tallies.setdefault((name, one.result), Tally())
                tally.add(one, to_float64(to_module(made[one.result][one.batch, :, one.head], xp)), xp)
    found: dict[str, dict[str, Error]] = {name: {} for name in results}
    for (name, result), tally in tallies.items():
        found[name][result] = Error((tally.squares / norms[result]) ** 0.5, tally.largest, tally.where)
    return found


@dataclass(slots=True)
class Tally:
    """The differences of one result so far."""

    squares: float = 0.0
    largest: float = -1.0
    where: tuple[int, int, int, int] = (0, 0, 0, 0)

    def add(self, exact: Exact, values: Any, xp: Any) -> None:
        difference = xp.abs(values - exact.values)
        self.squares += float((difference**2).sum())
        flat = int(difference.argmax())  # NaN counts as the largest
        largest = float(difference.reshape(-1)[flat])
        if not (largest <= self.largest or np.isnan(self.largest)):
            row, column = divmod(flat, difference.shape[1])
            self.largest, self.where = largest, (exact.batch, row, exact.head, column)
