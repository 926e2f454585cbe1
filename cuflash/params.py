"""Kernel parameter blocks: one declaration gives the C struct, its static_asserts and the packer."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from functools import cached_property
from typing import NamedTuple


class CType(NamedTuple):
    """A C type as the device sees it and as ``struct`` packs it."""

    name: str
    format: str
    size: int
    align: int


POINTER = CType("void*", "Q", 8, 8)
I64 = CType("i64", "q", 8, 8)
I32 = CType("i32", "i", 4, 4)
F32 = CType("float", "f", 4, 4)
FAST_DIV = CType("FastDiv", "QII", 16, 8)
TENSOR_MAP = CType("TensorMap", "128s", 128, 64)


class Field(NamedTuple):
    name: str
    type: CType
    comment: str


class PlacedField(NamedTuple):
    name: str
    type: CType
    comment: str
    offset: int


class ParameterBlock:
    """The single ``__grid_constant__`` argument of a kernel.

    Parameters
    ----------
    fields : tuple of Field
    per_launch : int
        How many of the first fields follow from a call's addresses: a launch rewrites only this head of a packed block.
    """

    def __init__(self, fields: tuple[Field, ...], per_launch: int = 0) -> None:
        self.fields = fields
        self.per_launch = per_launch

    @cached_property
    def placed(self) -> tuple[PlacedField, ...]:
        placed, offset = [], 0
        for f in self.fields:
            offset = -(-offset // f.type.align) * f.type.align
            placed.append(PlacedField(f.name, f.type, f.comment, offset))
            offset += f.type.size
        return tuple(placed)

    @cached_property
    def size(self) -> int:
        last = self.placed[-1]
        align = max(f.type.align for f in self.fields)
        return -(-(last.offset + last.type.size) // align) * align

    @cached_property
    def tail_offset(self) -> int:
        """Where the fields begin that a plan knows."""
        return self.placed[self.per_launch].offset

    @cached_property
    def launch_block(self) -> struct.Struct:
        """Packs a launch: the values of the ``per_launch`` fields, then the tail.

        Tensor maps, which are the first fields where there are any, count as one value: all their bytes.
        """
        maps = sum(f.type is TENSOR_MAP for f in self.fields)
        head = [f"{maps * TENSOR_MAP.size}s"] if maps else []
        head += [f.type.format for f in self.fields[maps : self.per_launch]]
        return struct.Struct(f"<{''.join(head)}{self.size - self.tail_offset}s")

    def pack(self, values: Mapping[str, int | float | bytes | tuple[int, ...]]) -> bytes:
        """The block's bytes; ``values`` must name every field and no other."""
        return self._pack(values, self.placed)

    def pack_tail(self, values: Mapping[str, int | float | bytes | tuple[int, ...]]) -> bytes:
        """The bytes behind the ``per_launch`` fields; ``values`` must name every other field."""
        return self._pack(values, self.placed[self.per_launch :])[self.tail_offset :]

    def _pack(
        self, values: Mapping[str, int | float | bytes | tuple[int, ...]], fields: tuple[PlacedField, ...]
    ) -> bytes:
        if values.keys() != {f.name for f in fields}:
            raise KeyError(f"parameter names differ: {sorted(values.keys() ^ {f.name for f in fields})}")
        block = bytearray(self.size)
        for f in fields:
            value = values[f.name]
            struct.pack_into("<" + f.type.format, block, f.offset, *(value if isinstance(value, tuple) else (value,)))
        return bytes(block)


def fast_div(divisor: int) -> tuple[int, int, int]:
    """(magic, shift, divisor) such that ``n // divisor == n * magic >> shift`` for 0 <= n < 2**31.

    Granlund and Montgomery, Division by Invariant Integers using Multiplication, PLDI 1994.
    """
    shift = 31 + (divisor - 1).bit_length()
    return -(-(1 << shift) // divisor), shift, divisor


AXES = ("batch", "seq", "head", "dim")
ROW_AXES = AXES[:3]


def stride_fields(tensor: str, axes: tuple[str, ...] = AXES, unit: str = "elements") -> tuple[Field, ...]:
    """The fields of an array's strides."""
    return tuple(Field(f"{tensor}_{axis}_stride", I64, f"in {unit}") for axis in axes)


def stride_values(tensor: str, strides: tuple[int, ...], axes: tuple[str, ...] = AXES) -> dict[str, int]:
    """The values of such fields; of the first axes where there are fewer strides than axes."""
    return {f"{tensor}_{axis}_stride": stride for axis, stride in zip(axes, strides, strict=False)}


FORWARD_SM80 = ParameterBlock(
    (
        Field("q", POINTER, ""),
        Field("k", POINTER, ""),
        Field("v", POINTER, ""),
        Field("out", POINTER, ""),
        Field("lse", POINTER, "null: not wanted"),
        *(field for tensor in ("q", "k", "v", "out") for field in stride_fields(tensor)),
        Field("heads", FAST_DIV, "query heads"),
        Field("group", FAST_DIV, "query heads per key/value head"),
        Field("batch_heads", I32, "batch * query heads"),
        Field("seqlen_q", I32, ""),
        Field("seqlen_k", I32, ""),
        Field("causal_offset", I32, "query i sees keys j <= i + causal_offset"),
        Field("m_tiles", I32, "query tiles"),
        Field("first_tile", I32, "query tiles of earlier launches of the same call (gridDim.y ends at 65535)"),
        Field("scale_log2", F32, "scale * log2(e)"),
        Field("inverse_scale", F32, "1 / scale_log2; 1 if the scale comes first"),
    ),
    per_launch=5,
)

_WORK_TILES = (
    *stride_fields("out", ROW_AXES),
    Field("heads", FAST_DIV, "query heads"),
    Field("group", FAST_DIV, "query heads per key/value head"),
    Field("section_tiles", FAST_DIV, "query tiles of a section's heads"),
    Field("section", FAST_DIV, "query heads that share the L2"),
    Field("last_section", FAST_DIV, "query heads of the last section"),
    Field("batch_heads", I32, "batch * query heads"),
    Field("m_tiles", I32, "query tiles of a head"),
    Field("tiles", I32, "query tiles of all heads"),
)
"""What the persistent kernels share: where outputs lie, and how work tiles are numbered."""

FORWARD_FP8_SM90 = ParameterBlock(
    (
        *(Field(f"{tensor}_map", TENSOR_MAP, "") for tensor in ("q", "k", "out")),
        Field("v", POINTER, "images of V^T (cuflash/fp8_layout.py)"),
        *(Field(f"{tensor}_scale", POINTER, "float32 (batch, heads, tiles)") for tensor in ("q", "k", "v")),
        Field("v_mean", POINTER, "float32 (batch, key/value heads, head_dim_v), added to the output; null: 0"),
        Field("lse_shift", POINTER, "float32 (batch, heads, queries), added to the LSE; null: 0"),
        Field("out", POINTER, ""),
        Field("lse", POINTER, "null: not wanted"),
        Field("tile_counter", POINTER, "null: static order"),
        *_WORK_TILES,
        Field("kv_heads", I32, "key/value heads"),
        Field("q_tiles", I32, "scales of a head of Q"),
        Field("k_tiles", I32, "scales of a head of K, and of V"),
        Field("seqlen_q", I32, ""),
        Field("seqlen_k", I32, ""),
        Field("causal_offset", I32, "query i sees keys j <= i + causal_offset"),
        Field("scale_log2", F32, "scale * log2(e)"),
    ),
    per_launch=12,
)

FORWARD_FP8_SM80 = ParameterBlock(
    (
        Field("q", POINTER, "rows of codes"),
        Field("k", POINTER, "rows of codes"),
        *FORWARD_FP8_SM90.fields[3:11],
        *(field for tensor in ("q", "k", "out") for field in stride_fields(tensor, ROW_AXES)),
        Field("heads", FAST_DIV, "query heads"),
        Field("group", FAST_DIV, "query heads per key/value head"),
        Field("batch_heads", I32, "batch * query heads"),
        *FORWARD_FP8_SM90.fields[-7:],
        Field("m_tiles", I32, "query tiles"),
        Field("first_tile", I32, "query tiles of earlier launches of the same call (gridDim.y ends at 65535)"),
    ),
    per_launch=10,
)
"""After the addresses of Q and K, those that the other kernel for quantized operands takes."""

FORWARD_SM90 = ParameterBlock(
    (
        *(Field(f"{tensor}_map", TENSOR_MAP, "") for tensor in ("q", "k", "v", "out")),
        Field("out", POINTER, ""),
        Field("lse", POINTER, "null: not wanted"),
        Field("tile_counter", POINTER, "null: static order"),
        *_WORK_TILES,
        Field("seqlen_q", I32, ""),
        Field("seqlen_k", I32, ""),
        Field("causal_offset", I32, "query i sees keys j <= i + causal_offset"),
        Field("scale_log2", F32, "scale * log2(e)"),
        Field("inverse_scale", F32, "1 / scale_log2; 1 if the scale comes first"),
    ),
    per_launch=7,
)
