"""What one call asks for, checked: the common ground of the launch plan, the CPU backend and ``explain``."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, cast

from .arrays import ITEM_BYTES, Operand
from .problem import AttentionProblem, Dtype

Causal = Literal[False, "bottom_right", "top_left"]

AXES = {"bshd": (0, 1, 2, 3), "bhsd": (0, 2, 1, 3)}
"""For each layout, where (batch, seq, heads, dim) lie."""

WIDEST_ACCESS = 16
TILE_ROWS = 256
"""No kernel's tile has more rows; within a tile, all but the scalar kernels take 32-bit byte offsets."""

LOG2_E = math.log2(math.e)
FLOAT32_MAX = (2 - 2**-23) * 2.0**127
SMALLEST_FACTOR, LARGEST_FACTOR = 2.0**-126, 2.0**119
"""Of 8-bit codes: those whose reciprocals are normal in float32, as far as the largest code of e4m3 is finite.

templates/prepare.cu.j2 has them, too. On targets without conversions, kernels take them 2^8 times as large.
"""
FOLDED_SCALES = (1e-30, 1e30)
"""Where scale * log2(e) and its reciprocal are both good fp32 numbers."""

TMA_BYTES = 16
"""What addresses, rows and strides of a tensor map must be multiples of."""
TMA_STRIDES_END = 2**40
TMA_TILE_ROWS = 64
"""No kernel that loads by TMA has query tiles of fewer rows."""
MAX_WORK_TILES = 2**31 - 2**16
"""A persistent kernel counts work tiles in 32 bits and goes at most a grid beyond the last."""


@dataclass(frozen=True, eq=False)
class Request:
    """One checked call.

    Attributes
    ----------
    q, k, v : Operand
    out : Operand or None
        None: a new contiguous array in the call's layout.
    layout : {"bshd", "bhsd"}
    causal : {False, "bottom_right", "top_left"}
    scale : float
    return_lse : bool
    """

    q: Operand
    k: Operand
    v: Operand
    out: Operand | None
    layout: str
    causal: Causal
    scale: float
    return_lse: bool

    @cached_property
    def sizes(self) -> tuple[int, int, int, int, int]:
        """(batch, query length, key length, query heads, key/value heads)."""
        batch, seq, heads, _ = AXES[self.layout]
        q, k = self.q.shape, self.k.shape
        return q[batch], q[seq], k[seq], q[heads], k[heads]

    @property
    def batch(self) -> int:
        return self.sizes[0]

    @property
    def seqlen_q(self) -> int:
        return self.sizes[1]

    @property
    def seqlen_k(self) -> int:
        return self.sizes[2]

    @property
    def heads(self) -> int:
        return self.sizes[3]

    @property
    def heads_k(self) -> int:
        return self.sizes[4]

    @property
    def head_dim(self) -> int:
        return self.q.shape[3]

    @property
    def head_dim_v(self) -> int:
        return self.v.shape[3]

    @property
    def device(self) -> int:
        return self.q.device

    @cached_property
    def out_shape(self) -> tuple[int, ...]:
        """In the caller's axis order."""
        return (*self.q.shape[:3], self.head_dim_v)

    @property
    def lse_shape(self) -> tuple[int, int, int]:
        return self.batch, self.heads, self.seqlen_q

    @property
    def lse_dtype(self) -> str:
        return "float64" if self.q.dtype == "float64" else "float32"

    @property
    def rows(self) -> int:
        """Rows of the output."""
        return self.batch * self.heads * self.seqlen_q

    @cached_property
    def strides(self) -> dict[str, tuple[int, ...]]:
        """For q, k, v and out, the strides in elements along (batch, seq, heads, dim).

        Axes of one element, whose stride is arbitrary and often absurd, get 0 (1 on the last axis).
        """
        named = {"q": self.q, "k": self.k, "v": self.v, "out": self.out}
        return {name: self.element_strides(x, self.out_shape) for name, x in named.items()}

    def element_strides(self, x: Operand | None, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The strides of an array of the call's dtype and layout; of a new one with ``shape`` if it is None."""
        item = ITEM_BYTES[self.q.dtype]
        strides = contiguous_strides(shape, item) if x is None else x.strides
        extents = shape if x is None else x.shape
        return tuple(strides[i] // item if extents[i] > 1 else int(i == 3) for i in AXES[self.layout])

    @cached_property
    def access_bytes(self) -> int:
        """The widest access, of 16, 8, 4 and 2 bytes, that every address and row of the call allows."""
        addresses = self.q.address | self.k.address | self.v.address | (self.out.address if self.out else 0)
        return widest_access(self, addresses, self.strides, tiled=("q", "k", "v"))

    @cached_property
    def tma_refusal(self) -> str | None:
        """What about the call the tensor memory accelerator cannot take; None if it takes all of it.

        Lengths and head counts need no rule: every call on a GPU has less than 2**31 of each.
        """
        loaded = {"q": self.q, "k": self.k, "v": self.v, "out": self.out}
        if (reason := tma_refusal(self, loaded, self.strides, self.extents)) is not None:
            return reason
        if self.batch * self.heads * -(-self.seqlen_q // TMA_TILE_ROWS) > MAX_WORK_TILES:
            return "so many query tiles (2^31 and more)"
        return None

    def extents(self, name: str) -> tuple[int, int, int, int]:
        """(batch, seq, heads, dim) of ``"q"``, ``"k"``, ``"v"`` or ``"out"``."""
        seqlen, heads = (self.seqlen_q, self.heads) if name in ("q", "out") else (self.seqlen_k, self.heads_k)
        return self.batch, seqlen, heads, self.head_dim if name in ("q", "k") else self.head_dim_v

    @property
    def scale_first(self) -> bool:
        return not FOLDED_SCALES[0] <= self.scale * LOG2_E <= FOLDED_SCALES[1]

    @property
    def causal_offset(self) -> int:
        """Query i sees keys j <= i + offset."""
        return self.seqlen_k - self.seqlen_q if self.causal == "bottom_right" else 0

    def problem(self, arch: str, access_bytes: int | None = None) -> AttentionProblem:
        """The kernel that the call needs on a compile target; with the widest access unless another is named."""
        return AttentionProblem(
            head_dim=self.head_dim,
            head_dim_v=self.head_dim_v,
            dtype=cast(Dtype, self.q.dtype),
            mask="causal" if self.causal else "full",
            access_bytes=access_bytes or self.access_bytes,
            scale_first=self.scale_first,
            arch=arch,
        )


def widest_access(
    request: Request, addresses: int, strides: Mapping[str, tuple[int, ...]], tiled: Collection[str]
) -> int:
    """The widest access that addresses (all ORed together), rows and strides in elements allow.

    ``tiled`` names the arrays that are loaded tile by tile.
    """
    item = ITEM_BYTES[request.q.dtype]
    elements = request.head_dim | request.head_dim_v
    for name, (batch, seq, head, dim) in strides.items():
        # The wide loads add an unsigned 32-bit offset within a tile to an address that all threads share.
        loads_fit = name not in tiled or 0 <= seq * item * TILE_ROWS < 2**31
        if dim != 1 or not loads_fit:
            return item
        elements |= batch | seq | head
    bits = WIDEST_ACCESS | addresses | elements * item
    return bits & -bits


def tma_refusal(
    request: Request,
    operands: Mapping[str, Operand | None],
    strides: Mapping[str, tuple[int, ...]],
    extents: Callable[[str], tuple[int, ...]],
) -> str | None:
    """What about arrays the tensor memory accelerator cannot take; None if it takes all of them.

    Parameters
    ----------
    request : Request
    operands : mapping of str to Operand or None
        By name; None: a new array, which an allocator aligns.
    strides, extents : mapping and function of str to tuple of int
        Along (batch, seq, heads, dim), in elements; of these names and perhaps others.
    """
    item = ITEM_BYTES[request.q.dtype]
    for name, dim in (("head dim", request.head_dim), ("head dim of v", request.head_dim_v)):
        if dim * item % TMA_BYTES:
            return f"{name} {dim}, which is no multiple of {TMA_BYTES // item}"
    for x in operands.values():
        if x is not None and x.address % TMA_BYTES:
            return f"the address of {x.name}, which is no multiple of {TMA_BYTES}"
    for name in operands:
        *outer, dim = strides[name]
        if dim != 1:
            return f"the last axis of {name}, whose stride is not 1"
        for axis, stride, extent in zip(("batch", "seq", "heads"), outer, extents(name), strict=False):
            # NumPy and its kind give axes of one element any stride: nothing depends on it.
            if extent > 1 and (stride * item % TMA_BYTES or not 0 < stride * item < TMA_STRIDES_END):
                return (
                    f"the {axis} stride of {name}, {stride * item} bytes, which is no positive multiple of "
                    f"{TMA_BYTES} below 2^40"
                )
    return None


def contiguous_strides(shape: Sequence[int], item: int) -> tuple[int, ...]:
    """Strides in bytes of a C-contiguous array of elements of ``item`` bytes."""
    strides = [item]
    for extent in reversed(shape[1:]):
        strides.append(strides[-1] * max(extent, 1))
    return tuple(reversed(strides))
