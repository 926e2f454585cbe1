"""The quantizer in NumPy: every step by another way, values of every kind, and what the public calls promise."""

from __future__ import annotations

import ctypes
import ctypes.util
import dataclasses
import math
from itertools import product
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import cuflash
from cuflash import cpu_quantize
from cuflash.fp8 import FORMATS
from cuflash.fp8_layout import TILE, padded
from tests.oracle import DTYPES, randn, strided_copy

E4M3, E5M2 = "float8_e4m3fn", "float8_e5m2"
SOURCES = ("float16", "bfloat16", "float32")
LENGTHS = (1, 127, 128, 129, 255, 256, 257, 400)
Floats = NDArray[np.float32]


def by_head(x: np.ndarray, layout: str = "bshd") -> np.ndarray:
    return x.swapaxes(1, 2) if layout == "bshd" else x


def codes_of(x: cuflash.QuantizedTensor) -> np.ndarray:
    """(batch, heads, seq, padded dim)."""
    return by_head(x.to_rows().payload, x.layout)


def scales_of_tokens(x: cuflash.QuantizedTensor) -> np.ndarray:
    return x.scales.repeat(TILE, axis=2)[:, :, : x.sizes[1], None]


def expected_mean(rows: Floats) -> Floats:
    """Of the tokens of one head, scalar by scalar, in the order of the definition."""
    length, dim = rows.shape
    step = max(math.ceil(length / 256), min(8, math.ceil(length / 128)))
    tokens = range(step // 2, length, step)
    mean = np.zeros(dim, np.float32)
    for d in range(dim):
        sums, added = [np.float32(0)] * 32, 0
        for j, token in enumerate(tokens):
            if np.isfinite(rows[token, d]):
                sums[j % 32] = sums[j % 32] + rows[token, d]
                added += 1
        while len(sums) > 1:
            half = len(sums) // 2
            sums = [sums[r] + sums[r + half] for r in range(half)]
        quotient = sums[0] / np.float32(max(added, 1))
        mean[d] = quotient if np.isfinite(quotient) else 0
    return mean


def expected_rotation(rows: Floats, seed: int, of: float = 1) -> Floats:
    """Butterflies of one block after the other; a block's size is the largest power of two that is left; in units."""
    dim = rows.shape[-1]
    x = np.where(cpu_quantize.signs(seed, dim), -rows, rows)
    first = 0
    while first < dim:
        block = 1 << ((dim - first).bit_length() - 1)
        distance = 1
        while distance < block:
            turned = x.copy()
            for c in range(first, first + block):
                other = first + ((c - first) ^ distance)
                turned[..., c] = x[..., other] - x[..., c] if other < c else x[..., c] + x[..., other]
            x, distance = turned, 2 * distance
        x[..., first : first + block] *= np.float32(block**-0.5 / of)
        first += block
    return x


def fma(a: Floats, b: np.float32, c: Floats) -> Floats:
    """The C library's."""
    fmaf = ctypes.CDLL(ctypes.util.find_library("m")).fmaf
    fmaf.argtypes, fmaf.restype = [ctypes.c_float] * 3, ctypes.c_float
    return np.frompyfunc(fmaf, 3, 1)(a, b, c).astype(np.float32)  # type: ignore[no-any-return]


def expected(x: np.ndarray, form_name: str, *, center: bool, seed: int | None) -> tuple[np.ndarray, Floats, Floats]:
    """Codes, scales and mean of one head (seq, dim), with ml_dtypes' conversion."""
    form = FORMATS[form_name]  # type: ignore[index]
    rows = x.astype(np.float32)
    with np.errstate(all="ignore"):
        mean = expected_mean(rows) if center else np.zeros(rows.shape[1], np.float32)
        of = np.float32(1)
        if seed is not None:
            mean = expected_rotation(mean, seed)
            of = np.float32(1 / math.sqrt(2 ** int(math.log2(rows.shape[1]))))
            rows = expected_rotation(rows, seed, float(of))
        rows = fma(mean, -np.float32(1) / of, rows) if center else rows
        scales, codes = [], np.zeros((len(rows), padded(rows.shape[1])), np.uint8)
        for first in range(0, len(rows), TILE):
            tile = rows[first : first + TILE]
            finite = np.abs(tile[np.isfinite(tile)])
            largest = finite.max() if len(finite) else np.float32(0)
            least = np.float32(2.0**-126 if seed is None else 2.0**-122)
            scale = max(largest / np.float32(form.largest), least) if largest > 0 else np.float32(1)
            quotient = np.clip(tile / scale, -form.largest, form.largest)
            rounded = quotient.astype(getattr(ml_dtypes, form_name)).view(np.uint8)
            codes[first : first + TILE, : rows.shape[1]] = np.where(np.isfinite(tile), rounded, 0x7F)
            scales.append(scale * of if largest > 0 else scale)
    return codes, np.array(scales, np.float32), mean


def check(x: np.ndarray, *, role: str, dtype: str = E4M3, layout: str = "bshd", **options: Any) -> Any:
    """Quantize, and compare with `expected` by the bit."""
    result = cuflash.quantize(x, role=role, dtype=dtype, layout=layout, **options)  # type: ignore[arg-type]
    batch, seq, heads, dim = result.sizes
    centred = options.get("center", True) and role != "q"
    seed = options.get("seed", 0) if options.get("hadamard") and role != "v" else None
    assert (result.mean is not None) == centred and result.seed == seed
    assert result.scales.shape == (batch, heads, -(-seq // TILE))
    for at in np.ndindex(batch, heads):
        codes, scales, mean = expected(by_head(x, layout)[at], dtype, center=centred, seed=seed)
        np.testing.assert_array_equal(codes_of(result)[at], codes)
        np.testing.assert_array_equal(result.scales[at], scales)
        if centred:
            np.testing.assert_array_equal(result.mean[at], np.pad(mean, (0, padded(dim) - dim)))
    return result


# ---- bit for bit


@pytest.mark.parametrize("role", ["q", "k", "v"])
@pytest.mark.parametrize("length", LENGTHS)
def test_lengths(role: str, length: int) -> None:
    rng = np.random.default_rng(length)
    check(randn(rng, (1, length, 2, 16), "bfloat16"), role=role, hadamard=length % 2 == 1)


@pytest.mark.parametrize("dim", [1, 2, 3, 15, 17, 33, 80, 96, 100, 127, 192, 255, 256])
def test_head_dims(dim: int) -> None:
    """Odd ones, and every kind of blocks of the rotation."""
    x = randn(np.random.default_rng(dim), (1, 130, 1, dim), "float16") + np.float16(2)
    for role, hadamard in product("qkv", (False, True)):
        check(x, role=role, hadamard=hadamard, seed=dim)


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_formats_sources_layouts(dtype: str, source: str, layout: str) -> None:
    x = randn(np.random.default_rng(1), (2, 140, 3, 24) if layout == "bshd" else (2, 3, 140, 24), source, size=7)
    for role, center in product("qkv", (False, True)):
        check(x, role=role, dtype=dtype, layout=layout, center=center, hadamard=role == "k")


def test_formats_by_the_types_of_frameworks() -> None:
    x = np.ones((1, 5, 2, 16), np.float16)
    for each in (ml_dtypes.float8_e5m2, np.dtype(ml_dtypes.float8_e5m2)):
        assert cuflash.quantize(x, role="q", dtype=each).dtype == E5M2
        assert {made.dtype for made in cuflash.quantize_qkv(x, x, x, dtype=each)} == {E5M2}


def test_strides_do_not_matter() -> None:
    x = randn(np.random.default_rng(2), (2, 150, 2, 20), "bfloat16")
    strided = strided_copy(x, (2, 0, 3, 1), (1, 2, 3, 1), (False, True, False, True))
    for role in "kv":
        one, other = (cuflash.quantize(each, role=role, hadamard=True) for each in (x, strided))  # type: ignore[arg-type]
        assert (one.payload == other.payload).all() and (one.scales == other.scales).all()


@given(
    seed=st.integers(0, 2**32 - 1),
    length=st.integers(1, 300),
    dim=st.integers(1, 40),
    role=st.sampled_from("qkv"),
    dtype=st.sampled_from([E4M3, E5M2]),
    source=st.sampled_from(SOURCES),
    exponent=st.integers(-149, 120),
    hadamard=st.booleans(),
    center=st.booleans(),
    specials=st.lists(st.sampled_from([0.0, -0.0, np.inf, -np.inf, np.nan, 1e-45, -1e-39, 3e38]), max_size=6),
)
@settings(max_examples=150)
def test_anything(
    seed: int,
    length: int,
    dim: int,
    role: str,
    dtype: str,
    source: str,
    exponent: int,
    hadamard: bool,
    center: bool,
    specials: list[float],
) -> None:
    """Sizes from the smallest subnormal number on, and zeros, infinities, NaNs, tiny and huge numbers in places."""
    rng = np.random.default_rng(seed)
    with np.errstate(all="ignore"):
        values = np.ldexp(rng.standard_normal((1, length, 1, dim)), exponent)
        for value in specials:
            values[0, rng.integers(length), 0, rng.integers(dim)] = value
        x = values.astype(DTYPES[source])
    check(x, role=role, dtype=dtype, hadamard=hadamard, center=center, seed=seed)


def test_the_fused_operation_rounds_once() -> None:
    """Sums that are ties of float32 but for a rest beyond float64, and numbers of every size."""
    rng = np.random.default_rng(9)
    c = np.ldexp(rng.integers(2**23, 2**24, 20000), rng.integers(-140, 90, 20000)).astype(np.float32)
    a = np.ldexp(rng.standard_normal(20000), np.frexp(c)[1] - rng.integers(-3, 60, 20000)).astype(np.float32)
    a[:10000] = np.ldexp(np.float32(1) + rng.integers(-1, 2, 10000) * 2.0**-23, np.frexp(c[:10000])[1] - 25)
    for b in np.float32([1, -11.313708, 1 / 3, -(1 + 2.0**-23)]):
        np.testing.assert_array_equal(cpu_quantize._fma(a, b, c), fma(a, b, c))


# ---- values of every kind


def test_zeros() -> None:
    """B-098: tiles of zeros have scale 1, beside others that have not."""
    x = np.zeros((1, 3 * TILE, 1, 16), np.float16)
    x[0, TILE] = 3
    for role in "qkv":
        q8 = check(x, role=role, center=False)
        np.testing.assert_array_equal(q8.scales[0, 0], np.float32([1, 3 / 448, 1]))
        np.testing.assert_array_equal(q8.dequantize(), x)


def test_negative_zero_keeps_its_sign() -> None:
    x = np.float32([[[[-0.0, 0.0, 1.0, -1e-30]]]])
    assert cuflash.quantize(x, role="q").payload[0, 0, 0, :4].tolist() == [0x80, 0x00, 0x7E, 0x80]


@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf, -np.inf])
def test_non_finite_values(bad: float) -> None:
    """They become NaN, and neither maxima nor means notice them."""
    x = randn(np.random.default_rng(3), (1, 256, 1, 16), "float32")
    spoilt = x.copy()
    spoilt[0, 7, 0, 3] = bad
    with_zero = x.copy()
    with_zero[0, 7, 0, 3] = 0
    for role in "qkv":
        result, clean = check(spoilt, role=role, center=False), cuflash.quantize(with_zero, role=role, center=False)  # type: ignore[arg-type]
        assert codes_of(result)[0, 0, 7, 3] == 0x7F
        np.testing.assert_array_equal(result.scales, clean.scales)
        rest = codes_of(result) != codes_of(clean)
        assert rest.sum() == 1
        assert np.isnan(result.dequantize()).sum() == 1
    centred = check(spoilt, role="k").mean[0, 0, 3]
    sampled = x[0, cpu_quantize.sample(256), 0, 3]
    assert sampled[3] == x[0, 7, 0, 3]
    np.testing.assert_allclose(centred, np.delete(sampled, 3).mean(), atol=1e-6)


def test_nothing_finite() -> None:
    x = np.full((1, 130, 1, 8), np.nan, np.float16)
    for role in "kv":
        result = check(x, role=role, hadamard=True)
        assert (result.scales == 1).all() and (result.mean == 0).all() and np.isnan(result.dequantize()).all()


def test_a_rotation_spreads_a_nan_over_its_row_and_no_further() -> None:
    x = randn(np.random.default_rng(4), (1, 40, 1, 64), "float32")
    x[0, 5, 0, 9] = np.inf
    bad = np.isnan(check(x, role="k", hadamard=True).dequantize()).any(axis=(0, 2, 3))
    assert np.flatnonzero(bad).tolist() == [5]


@pytest.mark.parametrize("exponent", [-149, -140, -126, -120, -100, -60, 0, 60, 110, 120])
def test_extreme_sizes(exponent: int) -> None:
    """Scales are normal numbers whatever comes; what is left of tiny numbers is what float32 leaves of them."""
    with np.errstate(all="ignore"):
        x = np.ldexp(randn(np.random.default_rng(5), (1, 130, 1, 16), "float32"), exponent).astype(np.float32)
    for dtype, hadamard in product((E4M3, E5M2), (False, True)):
        result = check(x, role="k", dtype=dtype, hadamard=hadamard)
        assert (result.scales >= 2.0**-126).all() and np.isfinite(result.scales).all()
    if -110 < exponent <= 110:
        error = np.abs(cuflash.quantize(x, role="k").dequantize() - x)
        assert (error <= np.maximum(np.abs(x) * 2.0**-4, np.ldexp(0.1, exponent))).all()


def test_means_beyond_float32() -> None:
    """Sums that overflow give no mean; differences that overflow are no numbers."""
    x = np.full((1, 4, 1, 2), 3.0e38, np.float32)
    x[0, :, 0, 1] = [3e38, 3e38, -3e38, 1]
    result = check(x, role="v")
    np.testing.assert_array_equal(result.mean[0, 0, :2], np.float32([0, 3e38 / 4]))
    assert np.isnan(result.dequantize()[0, :, 0]).tolist() == [[False, False]] * 2 + [[False, True], [False, False]]


def test_the_sample() -> None:
    """All tokens up to 128; beyond, 64 to 256 at equal distances, as far from both ends, of long sequences one in 8."""
    assert cpu_quantize.sample(0).tolist() == []
    for length in (1, 2, 127, 128):
        assert cpu_quantize.sample(length).tolist() == list(range(length))
    for length in (129, 255, 256, 257, 1000, 1023, 1024, 2047, 2048, 2049, 131072, 2**31 - 1024):
        tokens = cpu_quantize.sample(length)
        distances = np.unique(np.diff(tokens))
        assert 64 <= len(tokens) <= 256 and len(distances) == 1
        step = distances[0]
        assert step == 8 if 1024 <= length <= 2048 else step < 8 if length < 897 else step >= 8
        assert tokens[0] == step // 2 and length - step <= tokens[-1] + step // 2 < length + step // 2


def test_means_that_drift() -> None:
    """The sample sees the whole sequence: the mean of a drift from -1 to 3 is 1."""
    drift = np.linspace(-1, 3, 20000, dtype=np.float32)[None, :, None, None]
    x = randn(np.random.default_rng(6), (1, 20000, 1, 32), "float32", size=0.01) + drift
    result = cuflash.quantize(x, role="v")
    np.testing.assert_allclose(result.mean[0, 0], 1, atol=0.01)
    np.testing.assert_allclose(result.dequantize(), x, atol=0.15)


def test_outliers_are_exact_and_cost_their_tile_alone() -> None:
    x = randn(np.random.default_rng(7), (1, 256, 1, 64), "bfloat16")
    x[0, 3, 0, 5] = 1000
    result = check(x, role="q")
    assert result.dequantize()[0, 3, 0, 5] == 1000 and result.scales[0, 0, 1] < 0.02 < 2 < result.scales[0, 0, 0]
    spread = check(x, role="q", hadamard=True)
    assert spread.scales[0, 0, 0] < 0.3


# ---- what dequantize gives


@given(seed=st.integers(0, 2**32 - 1), dim=st.integers(1, 130), role=st.sampled_from("qkv"), hadamard=st.booleans())
@settings(max_examples=40)
def test_round_trip(seed: int, dim: int, role: str, hadamard: bool) -> None:
    """A code is within half a step of its value: 2^-4 of it, or 2^-10 scales below the normal range.

    A rotation keeps the norm of a row's errors.
    """
    rng = np.random.default_rng(seed)
    x = randn(rng, (1, 140, 2, dim), "float32") + rng.standard_normal(dim).astype(np.float32) * 5
    result = cuflash.quantize(x, role=role, hadamard=hadamard)  # type: ignore[arg-type]
    back = result.dequantize()
    assert back.shape == x.shape and back.dtype == np.float32
    real = by_head(x) if result.seed is None else expected_rotation(by_head(x), 0)
    coded = real if result.mean is None else real - result.mean[:, :, None, :dim]
    bound = np.maximum(np.abs(coded) / 16, scales_of_tokens(result) * 2.0**-10) + np.abs(real).max() * 1e-6
    error = np.abs(by_head(back - x))
    if result.seed is not None:
        error, bound = np.linalg.norm(error, axis=3), np.linalg.norm(bound, axis=3)
    assert (error <= bound).all()


def test_rotations_are_orthonormal_and_differ() -> None:
    x = randn(np.random.default_rng(8), (5, 100), "float32")
    turned = [cpu_quantize.rotate(x, cpu_quantize.signs(seed, 100)) for seed in (0, 1, -1)]
    for each in turned:
        np.testing.assert_allclose(each @ each.T, x @ x.T, atol=1e-4)
    assert not np.allclose(turned[0], turned[1]) and not np.allclose(turned[0], turned[2])
    for seed in (0, 1, -1):
        assert 20 < cpu_quantize.signs(seed, 256)[64:128].sum() < 44


# ---- the type


def test_prints_and_is_frozen() -> None:
    x = np.ones((2, 130, 3, 20), np.float16)
    v8 = cuflash.quantize(x, role="v")
    assert repr(v8) == (
        "QuantizedTensor(float8_e4m3fn, v, bshd (2, 130, 3, 20) from float16, scales (2, 3, 2), stored as vt128, "
        "centred, NumPy arrays)"
    )
    k8 = cuflash.quantize(x, role="k", hadamard=True, seed=5, dtype=E5M2)
    assert repr(k8).startswith("QuantizedTensor(float8_e5m2, k, bshd") and "rotated with seed 5" in repr(k8)
    assert v8.nbytes == 2 * 3 * 2 * 32 * 128 + 4 * 12 + 4 * 6 * 32
    assert k8.payload.shape == (2, 130, 3, 32) and (k8.payload[..., 20:] == 0).all()
    with pytest.raises(dataclasses.FrozenInstanceError):
        k8.seed = 6  # type: ignore[misc]


def test_float8_views_the_payload() -> None:
    x = randn(np.random.default_rng(9), (1, 10, 2, 24), "float32")
    for dtype in (E4M3, E5M2):
        k8 = cuflash.quantize(x, role="k", dtype=dtype)  # type: ignore[arg-type]
        view = k8.float8()
        assert view.dtype.name == dtype and view.shape == x.shape and np.shares_memory(view, k8.payload)
    v8 = cuflash.quantize(x, role="v")
    with pytest.raises(cuflash.UnsupportedError, match=r"'vt128', an opaque image; call to_rows\(\) first"):
        v8.float8()
    rows = v8.to_rows()
    assert rows.float8().shape == x.shape and rows.to_rows() is rows
    np.testing.assert_array_equal(rows.to_image().payload, v8.payload)
    np.testing.assert_array_equal(rows.dequantize(), v8.dequantize())
    with pytest.raises(ValueError, match="the role is 'k'; only V"):
        cuflash.quantize(x, role="k").to_image()


def test_from_float8() -> None:
    rng = np.random.default_rng(10)
    x = randn(rng, (2, 3, 140, 16), "float32").astype(ml_dtypes.float8_e4m3fn)
    made = cuflash.QuantizedTensor.from_float8(x, 0.5, role="v", layout="bhsd", source_dtype="float32")
    assert np.shares_memory(made.payload, x)
    np.testing.assert_array_equal(made.dequantize(), x.astype(np.float32) / 2)
    np.testing.assert_array_equal(made.to_image().dequantize(), made.dequantize())
    scales = rng.uniform(0.5, 2, (2, 3, 2)).astype(np.float32)
    made = cuflash.QuantizedTensor.from_float8(x, scales, role="q", layout="bhsd")
    np.testing.assert_array_equal(made.dequantize(), x.astype(np.float32) * scales_of_tokens(made))
    made = cuflash.QuantizedTensor.from_float8(x, np.float32(0.25), role="q", layout="bhsd")
    assert (made.scales == 0.25).all()
    for bad, scale, match in (
        (x[..., :15], 1.0, "C-contiguous"),
        (x[:, :, ::2], 1.0, "C-contiguous"),
        (x, scales[..., :1], r"shape \(2, 3, 2\)"),
        (x, scales.astype(np.float64), "scale has dtype float64; .*: cast it to float32"),
        (x.view(np.uint8), 1.0, "dtype is"),
        ([1], 1.0, "accepted are CuPy"),
        (x[0], 1.0, "four axes"),
        *((x, number, "scale is .*; accepted are positive numbers") for number in (0, -1.0, np.nan, 2.0**120, 10**400)),
    ):
        with pytest.raises((TypeError, ValueError), match=match):
            cuflash.QuantizedTensor.from_float8(bad, scale, role="q", layout="bhsd")
    for options, match in (({"role": "x"}, "role is 'x'"), ({"role": "q", "layout": "sbhd"}, "layout is 'sbhd'")):
        with pytest.raises(ValueError, match=match):
            cuflash.QuantizedTensor.from_float8(x, 1.0, **options)  # type: ignore[arg-type]


# ---- the calls


def test_quantize_qkv_is_three_calls() -> None:
    rng = np.random.default_rng(11)
    q, k, v = randn(rng, (2, 130, 4, 32), "float16"), *(randn(rng, (2, 200, 2, d), "float16") for d in (32, 48))
    together = cuflash.quantize_qkv(q, k, v, hadamard=True, seed=3, dtype=E5M2)
    for role, x, each in zip("qkv", (q, k, v), together, strict=True):
        alone = cuflash.quantize(x, role=role, hadamard=True, seed=3, dtype=E5M2)  # type: ignore[arg-type]
        assert each.role == role and (each.payload == alone.payload).all() and (each.scales == alone.scales).all()


def test_no_tokens() -> None:
    for role in "qkv":
        result = cuflash.quantize(np.ones((2, 0, 3, 16), np.float16), role=role)  # type: ignore[arg-type]
        assert result.scales.shape == (2, 3, 0) and result.dequantize().shape == (2, 0, 3, 16)


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"role": "w"}, ValueError, "role is 'w'; accepted are 'q', 'k' and 'v'"),
        ({"dtype": "float8"}, ValueError, "dtype is 'float8'"),
        ({"layout": "sbhd"}, ValueError, "layout is 'sbhd'"),
        ({"hadamard": 2}, TypeError, "hadamard is 2"),
        ({"center": None}, TypeError, "center is None"),
        ({"seed": 0.5}, TypeError, "seed is 0.5; accepted are integers"),
        ({"seed": True}, TypeError, "seed is True"),
        ({"x": [[1.0]]}, TypeError, "x is a list; accepted are CuPy and NumPy arrays and torch tensors$"),
        ({"x": np.ones((1, 2, 3))}, cuflash.UnsupportedError, "x has dtype float64; accepted are float16"),
        ({"x": np.ones((1, 2, 3), np.float16)}, ValueError, r"x has shape \(1, 2, 3\); accepted are four axes"),
        ({"x": np.ones((1, 2, 3, 0), np.float16)}, ValueError, "x has head dim 0"),
        ({"x": np.ones((1, 2, 3, 257), np.float16)}, ValueError, "x has head dim 257"),
    ],
)
def test_refused(change: dict[str, Any], error: type[Exception], match: str) -> None:
    options = {"x": np.ones((1, 2, 3, 4), np.float16), "role": "q"} | change
    with pytest.raises(error, match=match):
        cuflash.quantize(options.pop("x"), **options)


def test_other_arrays_are_told_what_takes_them() -> None:
    jax = pytest.importorskip("jax")
    x = jax.numpy.ones((1, 5, 2, 16), jax.numpy.float16)
    with pytest.raises(
        TypeError, match=r"^q is a JAX array; accepted are .*attention\(q, k, v, precision='fp8'\) takes"
    ):
        cuflash.quantize_qkv(x, x, x)
    with pytest.raises(TypeError, match=r"^x is a JAX array; accepted are .*: cuflash.attention takes JAX arrays"):
        cuflash.QuantizedTensor.from_float8(x.astype(E4M3), 1.0, role="q")
    assert cuflash.attention(x, x, x, precision="fp8").shape == x.shape


def test_refused_together() -> None:
    q, k, v = (np.ones((1, 5, 2, 16), np.float16) for _ in range(3))
    with pytest.raises(TypeError, match="q has dtype float16 and v float32; all arrays of a call must have one dtype"):
        cuflash.quantize_qkv(q, k, v.astype(np.float32))
    with pytest.raises(ValueError, match="k and v differ"):
        cuflash.quantize_qkv(q, k, v[:, :4])
