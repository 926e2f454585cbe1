"""Random operands of tests, in NumPy arrays: lengths are (Nq, Nk), heads (Hq, Hk), dims (D, Dv)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from cuflash.fp8_layout import tiles
from tests.oracle import randn

__all__ = ["draw_codes", "draw_qkv", "draw_scales", "scale_options", "shapes_of"]

Pair = tuple[int, int]


def shapes_of(lengths: Pair, heads: Pair, dims: Pair, batch: int, layout: str = "bshd") -> list[tuple[int, ...]]:
    """The shapes of q, k and v."""
    (nq, nk), (hq, hk), (d, dv) = lengths, heads, dims
    if layout == "bhsd":
        return [(batch, hq, nq, d), (batch, hk, nk, d), (batch, hk, nk, dv)]
    return [(batch, nq, hq, d), (batch, nk, hk, d), (batch, nk, hk, dv)]


def draw_qkv(
    rng: np.random.Generator, lengths: Pair, heads: Pair, dims: Pair, dtype: str, batch: int, layout: str = "bshd"
) -> list[np.ndarray]:
    """Normal q, k and v."""
    return [randn(rng, shape, dtype) for shape in shapes_of(lengths, heads, dims, batch, layout)]


# --- 8-bit floats ----------------------------------------------------------------------------------------------


def draw_codes(
    rng: np.random.Generator, shapes: Iterable[tuple[int, ...]], forms: Sequence[str], center: float = 0.0
) -> list[np.ndarray]:
    """Normal q, k and v, each in the format that ``forms`` names."""
    drawn = (rng.standard_normal(shape, np.float32) + np.float32(center) for shape in shapes)
    return [x.astype(getattr(ml_dtypes, form)) for x, form in zip(drawn, forms, strict=True)]


def draw_scales(
    rng: np.random.Generator, sizes: Iterable[tuple[int, int, int]], axes: Sequence[Any], low: float, high: float
) -> list[Any]:
    """A scale for each operand, whose sizes are (batch, heads, seq).

    ``axes`` says of each how many axes its array has; ``"number"``: it is a number, None: there is none.
    """
    found: list[Any] = []
    for (batch, heads, seq), kind in zip(sizes, axes, strict=True):
        if kind is None:
            found.append(None)
        elif kind == "number":
            found.append(float(np.float32(rng.uniform(low, high))))
        else:
            found.append(rng.uniform(low, high, (batch, heads, tiles(seq))[:kind]).astype(np.float32))
    return found


def scale_options(scales: Iterable[Any], place: Callable[[Any], Any] = lambda x: x) -> dict[str, Any]:
    """As keyword arguments; arrays where ``place`` puts them."""
    pairs = zip(("q_scale", "k_scale", "v_scale"), scales, strict=True)
    return {name: place(x) if isinstance(x, np.ndarray) else x for name, x in pairs}
