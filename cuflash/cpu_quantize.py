"""The quantizer in NumPy, and what both quantizers compute, bit for bit. The CUDA kernels follow this text.

All arithmetic is float32, each operation rounded to nearest even, subnormal numbers kept.

1. **Mean** of a channel of one head (K and V, unless ``center=False``). The sample is `sample`: up to `SAMPLE` tokens,
   at equal distances. Token j of it is added to partial sum j mod `PARTIALS`, in order of j, beginning with 0; NaN and
   infinities are left out. Partial sums are added as a binary tree: sum r and
   sum r + 16 for r < 16, then r + 8, and so on. The result is divided by the number of tokens added; it is 0 if there
   were none or the sum overflowed.
2. **Rotation** (Q, K and the mean of K, with ``hadamard=True``): signs from the seed, then Hadamard butterflies over
   blocks of columns, whose sizes are the powers of two that make up the head dim, the largest first. For the distances
   s = 1, 2, 4, ...: in every block larger than s, columns c and c + s (c mod 2s < s) become their sum and difference.
   Then each column is multiplied by float32(1 / sqrt(block)). Of Q and K, that of the first block, `unit`, is left to
   the scale: until then values are kept as multiples of it. Where the head dim is a power of two nothing is multiplied;
   columns of other blocks are, by the quotient of both.
3. The mean is subtracted; where there is a unit, its product with float32(1 / unit), in one operation (fma).
4. **Scale** of a tile: the largest finite magnitude divided by the format's largest number, at least 2^-126, or 2^-122
   where it has yet to be multiplied by a unit; 1 where all is zero (or nothing finite).
5. **Code**: the quotient of value and scale, rounded to nearest even and saturated (`cuflash.fp8`). What is not finite
   by then, be it that it came so or that it overflowed on the way (from 2^119 on), becomes NaN.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np

from .fp8 import Format
from .fp8_layout import TILE, padded

__all__ = ["SAMPLE", "mean_of", "quantize_tiles", "rotate", "rotate_back", "sample", "signs", "unit"]

Array: TypeAlias = "np.ndarray[Any, Any]"

SAMPLE = 256
FEWEST = 8
"""Of so many tokens one at least is not in the sample of a long sequence: reading it costs less than the codes."""
PARTIALS = 32
SMALLEST_SCALE, SMALLEST_ROTATED = np.float32(2.0**-126), np.float32(2.0**-122)
"""The smallest normal number: the reciprocal of every scale is one, too. No unit is below 2^-4."""


def sample(length: int) -> Array:
    """The tokens whose mean is taken, ascending: up to `SAMPLE`, of half as many every one, else at most every 8th."""
    step = max(-(-length // SAMPLE), min(FEWEST, -(-2 * length // SAMPLE)), 1)
    return np.arange(step // 2, length, step)


def mean_of(x: Array) -> Array:
    """Step 1: the means of the channels of rows (..., length, dim), of any dtype, as float32 (..., dim)."""
    rows = x[..., sample(x.shape[-2]), :].astype(np.float32)
    finite = np.isfinite(rows)
    padding = [(0, 0)] * (rows.ndim - 2) + [(0, -rows.shape[-2] % PARTIALS), (0, 0)]
    terms = np.pad(np.where(finite, rows, np.float32(0)), padding)
    terms = terms.reshape(*terms.shape[:-2], -1, PARTIALS, terms.shape[-1])
    sums = np.zeros((*terms.shape[:-3], *terms.shape[-2:]), np.float32)
    with np.errstate(all="ignore"):
        for step in range(terms.shape[-3]):
            sums += terms[..., step, :, :]
        width = PARTIALS // 2
        while width:
            sums = sums[..., :width, :] + sums[..., width : 2 * width, :]
            width //= 2
        count = np.count_nonzero(finite, axis=-2).astype(np.float32)
        mean = sums[..., 0, :] / np.maximum(count, 1)
    return np.where(np.isfinite(mean), mean, np.float32(0))


def signs(seed: int, dim: int) -> Array:
    """The signs of a rotation, True where a column is negated: bits of SplitMix64, whose state begins with the seed."""
    mask = (1 << 64) - 1
    words, state = 0, seed & mask
    for at in range(0, dim, 64):
        state = (state + 0x9E3779B97F4A7C15) & mask
        z = state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        words |= (z ^ (z >> 31)) << at
    return np.array([words >> column & 1 for column in range(dim)], bool)


def unit(dim: int) -> float:
    """Of the values of a rotated row while it is quantized: float32(1 / sqrt(largest block))."""
    return float(np.float32((1 << dim.bit_length() - 1) ** -0.5))


def _hadamard(x: Array, of: float = 1.0) -> None:
    """The butterflies of step 2 on the last axis of a contiguous float32 array, in place; the result is in units."""
    dim = x.shape[-1]
    norms = np.empty(dim, np.float32)
    distance = 1
    while distance <= dim:
        inside = dim // (2 * distance) * 2 * distance  # columns of blocks larger than the distance
        pairs = x[..., :inside].reshape(*x.shape[:-1], -1, 2, distance)
        total, difference = pairs[..., 0, :] + pairs[..., 1, :], pairs[..., 0, :] - pairs[..., 1, :]
        x[..., :inside] = np.stack([total, difference], axis=-2).reshape(*x.shape[:-1], inside)
        norms[inside : dim // distance * distance] = np.float32(distance**-0.5) / np.float32(of)
        distance *= 2
    x *= norms


def _fma(a: Array, b: np.float32, c: Array) -> Array:
    """a * b + c of float32, rounded once.

    In float64 the product is exact, and its sum rounded to odd: that is no tie of float32 which the exact sum is not.
    """
    product, c = a.astype(np.float64) * b, c.astype(np.float64)
    total = product + c
    added = total - product
    rest = (product - (total - added)) + (c - added)
    bits = total.view(np.int64)
    inexact = np.isfinite(rest) & (rest != 0) & (bits % 2 == 0)
    bits += np.where(inexact, np.where((rest > 0) == (total > 0), 1, -1), 0)
    rounded: Array = total.astype(np.float32)
    return rounded


def rotate(x: Array, negated: Array, of: float = 1.0) -> Array:
    """Step 2 for float32 rows (..., dim); the result is in units ``of``."""
    turned = np.where(negated, -x, x)
    with np.errstate(all="ignore"):
        _hadamard(turned, of)
    return turned


def rotate_back(x: Array, negated: Array) -> Array:
    """The inverse of `rotate`, up to rounding."""
    turned = np.array(x, np.float32)
    with np.errstate(all="ignore"):
        _hadamard(turned)
    return np.where(negated, -turned, turned)


def quantize_tiles(x: Array, form: Format, mean: Array | None, negated: Array | None) -> tuple[Array, Array]:
    """Steps 2 to 5.

    Parameters
    ----------
    x : array (length, dim)
        Of one head, any strides; float16, bfloat16 or float32.
    form : Format
    mean : float32 array (dim,), optional
        Rotated already, if there is a rotation.
    negated : bool array (dim,), optional
        The signs of the rotation.

    Returns
    -------
    codes : uint8 array (tiles, TILE, padded dim)
        Zeros beyond the length and the dim.
    scales : float32 array (tiles,)
    """
    length, dim = x.shape
    of = np.float32(1 if negated is None else unit(dim))
    over = np.float32(1) / of
    least = SMALLEST_SCALE if negated is None else SMALLEST_ROTATED
    codes = np.zeros((-(-length // TILE), TILE, padded(dim)), np.uint8)
    scales = np.ones(len(codes), np.float32)
    with np.errstate(all="ignore"):
        for tile, first in enumerate(range(0, length, TILE)):
            rows = x[first : first + TILE].astype(np.float32)
            if negated is not None:
                rows = rotate(rows, negated, float(of))
            if mean is not None:
                rows = _fma(mean, -over, rows)
            finite = np.isfinite(rows)
            largest = np.abs(rows).max(initial=0, where=finite)
            if largest > 0:
                scales[tile] = np.maximum(largest / np.float32(form.largest), least)
            rows[~finite] = np.nan
            codes[tile, : len(rows), :dim] = form.encode(rows / scales[tile])
            if largest > 0:
                scales[tile] *= of
    return codes, scales
