"""What a call of `cuflash.attention` on 8-bit arrays of the caller is given: codes in rows, and their scales."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from .arrays import CPU, FLOAT8_DTYPES, ITEM_BYTES, Operand, kind_of
from .checks import check_factor, check_factors_dtype, check_fellow, check_shapes
from .fp8_layout import ROLES, TILE, tiles
from .prepare_kernels import prepare_problem
from .problem import AttentionProblem
from .request import AXES, LARGEST_FACTOR, SMALLEST_FACTOR, TILE_ROWS, TMA_BYTES, TMA_STRIDES_END, WIDEST_ACCESS

__all__ = ["Float8Arrays", "Scale", "check_arrays"]


class Scale(NamedTuple):
    """The factor, or factors, that give the real values of an operand back.

    Attributes
    ----------
    array : Operand or None
        Of float32: for all of the operand (no axes), for each head (batch, heads), or for each tile (batch, heads,
        tiles).
    number : float
        The factor where there is no array.
    """

    array: Operand | None
    number: float

    @property
    def strides(self) -> tuple[int, int, int]:
        """In elements along (batch, heads, tiles); 0 where the factor does not change."""
        if self.array is None:
            return 0, 0, 0
        item = ITEM_BYTES[self.array.dtype]
        own = [
            stride // item if extent > 1 else 0
            for stride, extent in zip(self.array.strides, self.array.shape, strict=True)
        ]
        batch, head, tile = (*own, 0, 0, 0)[:3]
        return batch, head, tile


@dataclass(frozen=True, eq=False)
class Float8Arrays:
    """Codes and scales of one checked call, by ``"q"``, ``"k"`` and ``"v"``."""

    operands: Mapping[str, Operand]
    scales: Mapping[str, Scale]
    layout: str

    @property
    def device(self) -> int:
        return self.operands["q"].device

    def sizes(self, role: str) -> tuple[int, int, int, int]:
        """(batch, length, heads, dim) of an operand."""
        batch, seq, heads, dim = (self.operands[role].shape[axis] for axis in AXES[self.layout])
        return batch, seq, heads, dim

    def strides(self, role: str) -> tuple[int, int, int, int]:
        """Along (batch, seq, heads, dim), in elements, which are bytes; 0 of axes of one element, 1 on the last."""
        x = self.operands[role]
        batch, seq, heads, dim = (x.strides[i] if x.shape[i] > 1 else int(i == 3) for i in AXES[self.layout])
        return batch, seq, heads, dim

    @cached_property
    def copied(self) -> tuple[str, ...]:
        """Which of Q and K have to be copied, because neither TMA nor 16-byte loads can take them as they are."""
        return tuple(role for role in ("q", "k") if not self._suits_kernels(role))

    def _suits_kernels(self, role: str) -> bool:
        x, (*outer, dim) = self.operands[role], self.strides(role)
        used = [stride for stride, extent in zip(outer, self.sizes(role), strict=False) if extent > 1]
        return (
            dim == 1
            and x.shape[3] % TMA_BYTES == x.address % TMA_BYTES == 0
            and all(stride % TMA_BYTES == 0 < stride < TMA_STRIDES_END for stride in used)
            and outer[1] * TILE_ROWS < 2**31  # in a tile, 32-bit offsets
        )

    @property
    def access_bytes(self) -> int:
        """The widest access, of 16, 8, 4 and 1 bytes, that all that the preparing kernel reads allows."""
        bits = WIDEST_ACCESS
        for role in (*self.copied, "v"):
            x, (*outer, dim) = self.operands[role], self.strides(role)
            if dim != 1:
                return 1
            for value in (x.address, x.shape[3], *outer):
                bits |= value
        widest = bits & -bits
        return widest if widest >= 4 else 1

    def problem(self, arch: str) -> AttentionProblem:
        """The preparing kernel; where it does not read Q and K, their head dim makes no difference to it."""
        (*_, dim), (*_, dim_v) = self.sizes("q"), self.sizes("v")
        return prepare_problem(dim if self.copied else dim_v, dim_v, self.access_bytes, arch)


def check_arrays(arrays: Mapping[str, Any], scales: Mapping[str, Any], layout: str) -> Float8Arrays:
    """Check codes and scales, ``"q"``, ``"k"`` and ``"v"`` of each; a scale may be None.

    Raises
    ------
    TypeError, ValueError, UnsupportedError
    """
    operands: dict[str, Operand] = {}
    for role in ROLES:
        operands[role] = _operand(role, arrays[role])
        check_fellow(operands["q"], operands[role])
        if operands[role].dtype not in FLOAT8_DTYPES:
            raise TypeError(
                f"{role} has dtype {operands[role].dtype}; accepted are q, k and v of {' and '.join(FLOAT8_DTYPES)} in "
                "any combination, or none of such: cast some, or cuflash.quantize all"
            )
    check_shapes(operands["q"], operands["k"], operands["v"], layout)
    given = Float8Arrays(operands, {}, layout)
    checked: dict[str, Scale] = {role: _check_scale(f"{role}_scale", scales[role], given, role) for role in ROLES}
    return Float8Arrays(operands, checked, layout)


def _check_scale(name: str, value: Any, given: Float8Arrays, role: str) -> Scale:
    if value is None:
        return Scale(None, 1.0)
    if isinstance(value, numbers.Real):
        return Scale(None, check_factor(name, value))
    check_factors_dtype(name, value)
    scale = _operand(name, value)
    check_fellow(given.operands["q"], scale)
    batch, seq, heads, _ = given.sizes(role)
    accepted = ((), (batch, heads), (batch, heads, tiles(seq)))
    if scale.shape not in accepted:
        hint = ": reshape it to ()" if math.prod(scale.shape) == 1 else ""
        raise ValueError(
            f"{name} has shape {scale.shape}; accepted are a number, and float32 arrays of shape (), {accepted[1]}, "
            f"(batch, heads), and {accepted[2]}, (batch, heads, tiles of {TILE} tokens){hint}"
        )
    if scale.device == CPU:
        values = scale.kind.numpy(scale.array)
        for wrong in values[~((values >= SMALLEST_FACTOR) & (values <= LARGEST_FACTOR))][:1]:
            check_factor(name, float(wrong))
    return Scale(scale, 1.0)


def _operand(name: str, x: Any) -> Operand:
    kind = kind_of(x)
    if kind is None:
        from .arrays import bridge

        raise TypeError(f"{name} is a {bridge.label(name, x)}; the other arrays of the call are of another kind")
    return kind.operand(name, x)
