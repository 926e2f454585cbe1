"""Error against float64, computed in blocks of rows on the device for a sample of heads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

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


def exact_head(q: Any, k: Any, v: Any, causal: bool, xp: Any) -> Any:
    """softmax(Q K^T / sqrt(D) + mask) V of one head in float64; (seq, dim) arrays, bottom-right causal.

    Rows that see no key are 0.
    """
    q, k, v = (to_float64(a) for a in (q, k, v))
    out = xp.empty((q.shape[0], v.shape[1]))
    keys = xp.arange(k.shape[0])
    offset = k.shape[0] - q.shape[0]
    for start in range(0, q.shape[0], ROWS):
        rows = slice(start, min(start + ROWS, q.shape[0]))
        scores = q[rows] @ k.T / q.shape[1] ** 0.5
        if causal:
            visible = keys[None, :] <= xp.arange(rows.start, rows.stop)[:, None] + offset
            scores = xp.where(visible, scores, -xp.inf)
        peak = scores.max(axis=1, keepdims=True)
        weights = xp.exp(scores - xp.where(peak == -xp.inf, 0.0, peak))
        total = weights.sum(axis=1, keepdims=True)
        out[rows] = weights @ v / xp.where(total == 0.0, 1.0, total)
    return out


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


def errors(outputs: dict[str, Any], inputs: list[Any], causal: bool, xp: Any, heads: int = 4) -> dict[str, Error]:
    """The error of each output, (batch, seq, heads, dim) arrays, on a sample of query heads.

    NumPy on the host takes seconds for a long head: see ``array_module``.
    """
    batch, _, head_count, _ = inputs[0].shape
    group = head_count // inputs[1].shape[2]
    squares = dict.fromkeys(outputs, 0.0)
    worst = {name: (-1.0, (0, 0, 0, 0)) for name in outputs}
    norm = 0.0
    for b, h in sampled_heads(batch, head_count, heads):
        of_operands = zip(inputs, (h, h // group, h // group), strict=True)
        q_head, k_head, v_head = (to_module(array[b, :, head], xp) for array, head in of_operands)
        exact = exact_head(q_head, k_head, v_head, causal, xp)
        norm += float((exact**2).sum())
        for name, output in outputs.items():
            difference = xp.abs(to_float64(to_module(output[b, :, h], xp)) - exact)
            squares[name] += float((difference**2).sum())
            flat = int(difference.argmax())  # NaN counts as the largest
            largest = float(difference.reshape(-1)[flat])
            if not (largest <= worst[name][0] or np.isnan(worst[name][0])):
                row, column = divmod(flat, exact.shape[1])
                worst[name] = (largest, (b, row, h, column))
    return {name: Error((squares[name] / norm) ** 0.5, *worst[name]) for name in outputs}
