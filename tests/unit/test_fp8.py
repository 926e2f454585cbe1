"""The 8-bit formats and V's image, against ml_dtypes and against the definitions written out."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cuflash.fp8 import FORMATS, Format, format_of
from cuflash.fp8_layout import TILE, pack_image, padded, unpack_image

EACH = pytest.mark.parametrize("form", FORMATS.values(), ids=lambda form: form.name)


def reference(x: np.ndarray, form: Format) -> np.ndarray:
    """ml_dtypes' conversion, which knows no saturation, of numbers that need none."""
    clipped = np.clip(x, -form.largest, form.largest)
    return clipped.astype(np.dtype(getattr(ml_dtypes, form.name))).view(np.uint8)


def assert_codes(x: np.ndarray, form: Format) -> None:
    codes, nan = form.encode(x), np.isnan(x)
    np.testing.assert_array_equal(codes[~nan], reference(x[~nan], form))
    assert (codes[nan] == 0x7F).all()


@EACH
def test_every_code(form: Format) -> None:
    codes = np.arange(256, dtype=np.uint8)
    expected = codes.view(getattr(ml_dtypes, form.name)).astype(np.float32)
    values = form.values()
    np.testing.assert_array_equal(values, expected)
    finite = np.isfinite(expected)
    assert (np.signbit(values) == np.signbit(expected))[finite].all()
    np.testing.assert_array_equal(form.encode(values[finite]), codes[finite])


@EACH
def test_every_tie_and_its_neighbours(form: Format) -> None:
    """Midpoints of neighbouring codes, and the float32 numbers beside them; subnormal codes and zeros among them."""
    numbers = np.unique(form.values()[np.isfinite(form.values())])
    ties = ((numbers[1:].astype(np.float64) + numbers[:-1]) / 2).astype(np.float32)
    for x in (ties, np.nextafter(ties, np.float32(np.inf)), np.nextafter(ties, np.float32(-np.inf)), numbers):
        assert_codes(x, form)


@EACH
def test_float32_all_over(form: Format) -> None:
    """Every sign, exponent and leading mantissa bit, with a few patterns below; NaNs and infinities among them."""
    high = np.arange(1 << 16, dtype=np.uint32) << 16
    for low in (0x0000, 0x0001, 0x7FFF, 0x8000, 0xFFFF):
        assert_codes((high | np.uint32(low)).view(np.float32), form)


@pytest.mark.parametrize(("name", "largest", "code"), [("float8_e4m3fn", 448.0, 0x7E), ("float8_e5m2", 57344.0, 0x7B)])
def test_saturation(name: str, largest: float, code: int) -> None:
    """B-101: beyond the largest number nothing turns into NaN or infinity, as it does in ml_dtypes."""
    form = FORMATS[name]  # type: ignore[index]
    beyond = np.array([1, 1 + 2.0**-4, 1.5, 1e4, 1e30, np.inf], np.float32) * np.float32(largest)
    assert (form.encode(beyond) == code).all()
    assert (form.encode(-beyond) == code | 0x80).all()


@EACH
@given(bits=st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=50))
def test_any_float32(form: Format, bits: list[int]) -> None:
    assert_codes(np.array(bits, np.uint32).view(np.float32), form)


def test_names() -> None:
    assert format_of(np.dtype(ml_dtypes.float8_e5m2)).largest == 57344
    with pytest.raises(ValueError, match="dtype is 'float8_e4m3'; accepted are 'float8_e4m3fn' and 'float8_e5m2'"):
        format_of("float8_e4m3")


@pytest.mark.parametrize("dim", [1, 16, 48, 256])
def test_image(dim: int) -> None:
    """Byte by byte from the definition: the row of a column, the swizzled unit of a token, and its place inside."""
    columns = padded(dim)
    codes = np.random.default_rng(dim).integers(0, 256, (2, TILE, columns), np.uint8)
    images = pack_image(codes)
    for token in range(TILE):
        unit, inside = divmod(token, 16)
        half, pair = divmod(inside, 8)
        place = pair // 2 * 4 + half * 2 + pair % 2
        for d in range(columns):
            np.testing.assert_array_equal(images[:, d * 128 + (unit ^ d % 8) * 16 + place], codes[:, token, d])
    np.testing.assert_array_equal(unpack_image(images), codes)
