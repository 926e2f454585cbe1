"""Quantized operands as the CPU backend reads them: real values, tile by tile, in the basis of the payload."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from .fp8 import format_of
from .fp8_layout import ROWS, TILE, by_head, unpack_image

if TYPE_CHECKING:
    from .quantized import QuantizedTensor

__all__ = ["Dequantized"]

Array: TypeAlias = "np.ndarray[Any, Any]"


@dataclass(frozen=True, eq=False)
class Dequantized:
    """A (batch, heads, seq, dim) array of float32 that exists only where it is read: ``x[batches, heads, tokens]``.

    The rotation is not undone: it changes no score, and V has none.
    """

    payload: Array
    scales: Array
    mean: Array | None
    values: Array
    shape: tuple[int, int, int, int]
    in_rows: bool

    dtype = np.dtype(np.float32)

    @classmethod
    def of(cls, x: QuantizedTensor) -> Dequantized:
        """View a quantized tensor in host memory."""
        batch, seq, heads, dim = x.sizes
        payload = x._host(x.payload)
        in_rows = x.storage == ROWS
        if in_rows:
            payload = payload.transpose(by_head(x.layout))
        mean = None if x.mean is None else x._host(x.mean)
        return cls(payload, x._host(x.scales), mean, format_of(x.dtype).values(), (batch, heads, seq, dim), in_rows)

    def __getitem__(self, where: tuple[slice, slice, slice]) -> Array:
        batches, heads, tokens = where
        dim = self.shape[3]
        first = tokens.start // TILE
        tiles = slice(first, -(-tokens.stop // TILE))
        if self.in_rows:
            codes = self.payload[batches, heads, tokens, :dim]
        else:
            whole = unpack_image(self.payload[batches, heads, tiles])
            inside = slice(tokens.start - first * TILE, tokens.stop - first * TILE)
            codes = whole.reshape(*whole.shape[:2], -1, whole.shape[4])[:, :, inside, :dim]
        of_token = np.arange(tokens.start, tokens.stop) // TILE - first
        real = np.take(self.values, codes)
        real *= self.scales[batches, heads, tiles][:, :, of_token, None]
        if self.mean is not None:
            real += self.mean[batches, heads, None, :dim]
        return real
