"""Arrays as kernels get them: with an exact extent, any strides, the least alignment, and poison between elements."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from dataclasses import dataclass

import ml_dtypes
import numpy as np
from numpy.lib.stride_tricks import as_strided

DTYPES = {
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float32": np.dtype(np.float32),
    "uint8": np.dtype(np.uint8),
}
MAP_NORESERVE = 0x4000
"""Linux; a name in Python's mmap since 3.13 only."""
SPARSE_BYTES = 1 << 28
"""From here on memory is reserved and not touched, so gaps hold zeros in place of poison."""


@dataclass
class Tensor:
    """An array in (batch, heads, seq, dim) order, or LSE in (batch, heads, seq) order, whatever its memory order is.

    ``extent`` is the memory from its lowest to its highest element, as bytes; ``elements`` marks those that belong to
    an element; ``writes`` counts how often the kernel wrote each (None: an input).
    """

    view: np.ndarray
    extent: np.ndarray
    elements: np.ndarray
    writes: np.ndarray | None

    @property
    def strides(self) -> tuple[int, ...]:
        """In elements."""
        return tuple(step // self.view.itemsize for step in self.view.strides)

    @property
    def address(self) -> int:
        """Of element 0, which is not the lowest where a stride is negative."""
        return int(self.view.__array_interface__["data"][0])

    def unwritten(self) -> int:
        assert self.writes is not None
        return int(np.count_nonzero((self.elements != 0) & (self.writes == 0)))


def _reserve(nbytes: int) -> np.ndarray:
    if nbytes < SPARSE_BYTES:
        return np.zeros(nbytes, np.uint8)
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE)
    return np.frombuffer(memory, np.uint8)


def _aligned(nbytes: int, align: int) -> np.ndarray:
    """Memory whose address is a multiple of `align` and of no larger power of two."""
    raw = _reserve(nbytes + 2 * align)
    start = (align - raw.ctypes.data) % (2 * align)
    return raw[start : start + nbytes]


def dense_strides(shape: Sequence[int], order: Sequence[int], pad: Sequence[int] = ()) -> tuple[int, ...]:
    """Strides in elements: axes lie in memory in `order`, outermost first, each with room for `pad` more."""
    strides, step = [0] * len(shape), 1
    for axis in reversed(order):
        strides[axis] = step
        step *= max(1, shape[axis]) + (pad[axis] if pad else 0)
    return tuple(strides)


def allocate(shape: Sequence[int], strides: Sequence[int], dtype: str, *, align: int, output: bool = False) -> Tensor:
    """A tensor full of NaN.

    Parameters
    ----------
    shape, strides : sequence of int
        Strides in elements; zero and negative ones are allowed (no zero ones for an output).
    dtype : str
    align : int
        The address of the lowest element is a multiple of this many bytes and of no larger power of two.
    output : bool
        Count writes.
    """
    kind = DTYPES[dtype]
    reach = [(n - 1) * s for n, s in zip(shape, strides, strict=True)]
    low = sum(min(0, r) for r in reach)
    count = sum(max(0, r) for r in reach) - low + 1 if all(shape) else 0
    extent, elements = _aligned(count * kind.itemsize, align), _reserve(count * kind.itemsize)
    if extent.nbytes < SPARSE_BYTES:
        extent[:] = 0xFF
    byte_strides = tuple(s * kind.itemsize for s in strides)

    def strided(memory: np.ndarray, as_type: np.dtype) -> np.ndarray:
        if not count:
            return np.empty(shape, as_type)
        return as_strided(memory.view(as_type)[-low:], shape, byte_strides)

    marks = strided(elements, np.dtype(f"u{kind.itemsize}"))
    marks[...] = np.iinfo(marks.dtype).max
    return Tensor(strided(extent, kind), extent, elements, _reserve(elements.nbytes) if output else None)


def place(
    values: np.ndarray,
    dtype: str,
    *,
    order: Sequence[int] = (0, 2, 1, 3),
    strides: Sequence[int] | None = None,
    align: int = 16,
) -> Tensor:
    """An input with these values; along an axis with stride 0 the first ones count."""
    strides = dense_strides(values.shape, order) if strides is None else strides
    tensor = allocate(values.shape, strides, dtype, align=align)
    first = tuple(slice(0, 1) if s == 0 else slice(None) for s in strides)
    tensor.view[first] = values[first].astype(DTYPES[dtype])
    return tensor
