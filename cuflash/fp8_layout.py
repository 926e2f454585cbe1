"""How quantized operands lie in memory. The kernels read what stands here, and the quantizers write it.

Q, K and V are cut into tiles of `TILE` tokens of one head; each has a scale. Rows are padded with zeros to a multiple
of `PAD` columns, so that every row begins at a multiple of 16 bytes.

``"rows"``: one code after the other, C-contiguous: (batch, seq, heads, padded dim) in the layout "bshd" and (batch,
heads, seq, padded dim) in "bhsd". Q and K lie so always.

``"vt128"``: V transposed, (batch, heads, tiles, padded dim * 128): each tile an image of the shared memory that an
8-bit ``wgmma`` reads. It has a row of 128 bytes, its tokens, for each column of V; the 16-byte unit u of row d stands
at unit ``u ^ (d % 8)`` (the 128-byte swizzle); inside a unit, the tokens stand in the order `TOKENS`, in which a thread
holds its probabilities after the first product. Tokens behind the last one are zeros.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, TypeAlias, get_args

import numpy as np

from .request import AXES, contiguous_strides

__all__ = [
    "IMAGE", "PAD", "ROLES", "ROWS", "TILE", "Role", "by_head", "image_shape", "pack_image", "padded",
    "row_strides", "tiles", "unpack_image",
]  # fmt: skip

Array: TypeAlias = "np.ndarray[Any, Any]"

Role = Literal["q", "k", "v"]
"""Of an operand in attention."""
ROLES: tuple[Role, ...] = get_args(Role)

TILE = 128
"""Tokens that share a scale."""
PAD = 16
UNIT = 16
"""Bytes of the unit that the swizzle moves."""

ROWS = "rows"
IMAGE = "vt128"

TOKENS = tuple(2 * t + offset for t in range(4) for offset in (0, 1, 8, 9))
"""The tokens of a unit, in the order of its bytes."""


def by_head(layout: str) -> tuple[int, int, int, int]:
    """The transposition between a layout and (batch, heads, seq, dim), in either direction."""
    return (0, 2, 1, 3) if layout == "bshd" else (0, 1, 2, 3)


def padded(dim: int) -> int:
    """Columns that a row of `dim` takes."""
    return -(-dim // PAD) * PAD


def tiles(length: int) -> int:
    """Tiles of a sequence."""
    return -(-length // TILE)


def image_shape(batch: int, heads: int, length: int, dim: int) -> tuple[int, int, int, int]:
    """The shape of V's image."""
    return batch, heads, tiles(length), padded(dim) * TILE


def row_strides(shape: Sequence[int], layout: str) -> tuple[int, int, int]:
    """Strides of a payload in rows along (batch, seq, heads), in bytes; ``shape``: of what was quantized."""
    strides = contiguous_strides((*shape[:3], padded(shape[3])), 1)
    batch, seq, heads, _ = (strides[axis] for axis in AXES[layout])
    return batch, seq, heads


def _swizzle(columns: int) -> Array:
    """For each column and unit of an image, the unit that stands there (and the reverse: it is its own inverse)."""
    return np.arange(TILE // UNIT) ^ (np.arange(columns) % 8)[:, None]


def pack_image(codes: Array) -> Array:
    """Codes of whole tiles, (..., tiles, TILE, padded dim), as images, (..., tiles, padded dim * TILE)."""
    *outer, _, columns = codes.shape
    units = codes.swapaxes(-1, -2).reshape(*outer, columns, TILE // UNIT, UNIT)[..., TOKENS]
    swizzled = np.take_along_axis(units, np.broadcast_to(_swizzle(columns)[..., None], units.shape), axis=-2)
    return swizzled.reshape(*outer, columns * TILE)


def unpack_image(images: Array) -> Array:
    """What `pack_image` was given."""
    *outer, size = images.shape
    columns = size // TILE
    units = images.reshape(*outer, columns, TILE // UNIT, UNIT)
    natural = np.take_along_axis(units, np.broadcast_to(_swizzle(columns)[..., None], units.shape), axis=-2)
    return natural[..., np.argsort(TOKENS)].reshape(*outer, columns, TILE).swapaxes(-1, -2)
