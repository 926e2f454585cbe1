"""The two 8-bit float formats in NumPy: e4m3 ("fn": no infinities) and e5m2."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import numpy as np

__all__ = ["E4M3", "FORMATS", "Float8", "Format", "format_of"]

Array: TypeAlias = "np.ndarray[Any, Any]"

Float8 = Literal["float8_e4m3fn", "float8_e5m2"]

NAN_CODE = 0x7F
"""What a NaN becomes in either format, whatever its sign: so does the GPU's conversion."""


class Format(NamedTuple):
    """An 8-bit float format.

    Attributes
    ----------
    name : {"float8_e4m3fn", "float8_e5m2"}
        As torch and ml_dtypes call it.
    mantissa_bits, bias : int
    largest : float
        The largest finite number.
    """

    name: Float8
    mantissa_bits: int
    bias: int
    largest: float

    def encode(self, x: Array) -> Array:
        """Round float32 numbers to the nearest code, ties to even. Beyond the largest number they become it; NaN stays.

        Integer arithmetic on the bits of the magnitudes: normal numbers are rounded where the mantissa ends, and the
        exponent is moved; below the normal range, codes count the smallest subnormal number.
        """
        drop = 23 - self.mantissa_bits
        bits = x.view(np.uint32)
        magnitude = np.minimum(np.abs(x), np.float32(self.largest))  # a NaN stays one
        up = magnitude.view(np.uint32)
        up = up + ((up >> drop & 1) + np.uint32((1 << (drop - 1)) - 1))
        codes = (up >> drop) - np.uint32((127 - self.bias) << self.mantissa_bits)
        subnormal = magnitude < np.float32(2.0 ** (1 - self.bias))
        units = np.rint(np.where(subnormal, magnitude, 0) * np.float32(2.0 ** (self.bias - 1 + self.mantissa_bits)))
        codes = np.where(subnormal, units.astype(np.uint32), codes) | (bits >> 24 & 0x80)
        return np.where(np.isnan(x), np.uint32(NAN_CODE), codes).astype(np.uint8)

    def values(self) -> Array:
        """The 256 numbers in the order of their codes, float32."""
        codes = np.arange(256)
        exponents, mantissas = (codes & 0x7F) >> self.mantissa_bits, codes & ((1 << self.mantissa_bits) - 1)
        leading = (exponents > 0) << self.mantissa_bits
        numbers = np.ldexp((leading + mantissas) * 1.0, np.maximum(exponents, 1) - self.bias - self.mantissa_bits)
        above = numbers > self.largest
        if self.name == "float8_e5m2":
            numbers[above & (mantissas == 0)] = np.inf
            above &= mantissas != 0
        numbers[above] = np.nan
        signed: Array = np.where(codes & 0x80, -numbers, numbers)
        return signed.astype(np.float32)


E4M3 = Format("float8_e4m3fn", mantissa_bits=3, bias=7, largest=448.0)
E5M2 = Format("float8_e5m2", mantissa_bits=2, bias=15, largest=57344.0)
FORMATS = {each.name: each for each in (E4M3, E5M2)}
assert tuple(FORMATS) == get_args(Float8)


def format_of(dtype: Any) -> Format:
    """The format of a name such as ``"float8_e4m3fn"``, or of a dtype or scalar type of that name.

    Raises
    ------
    ValueError
        It is no 8-bit float that cuflash knows.
    """
    found = FORMATS.get(str(dtype).rpartition(".")[2].removesuffix("'>"))  # type: ignore[call-overload]
    if found is None:
        raise ValueError(f"dtype is {dtype!r}; accepted are {' and '.join(map(repr, FORMATS))}")
    return found  # type: ignore[no-any-return]
