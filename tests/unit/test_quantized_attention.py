"""Attention of quantized operands on the CPU: the quantized function, its options, its accuracy on the unquantized."""

from __future__ import annotations

from itertools import product
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cuflash
from cuflash import cpu
from cuflash.fp8 import FORMATS
from tests.operands import draw_qkv
from tests.oracle import DTYPES, oracle
from tests.readme import example

CAUSAL = (False, "bottom_right", "top_left")


def by_head(x: np.ndarray, layout: str = "bshd") -> np.ndarray:
    return x.swapaxes(1, 2) if layout == "bshd" else x


def draw(
    seed: int,
    lengths: tuple[int, int],
    heads: tuple[int, int] = (2, 1),
    dims: tuple[int, int] = (16, 16),
    dtype: str = "float32",
    batch: int = 2,
) -> list[np.ndarray]:
    return draw_qkv(np.random.default_rng(seed), lengths, heads, dims, dtype, batch)


def assert_quantized_function(quantized: Any, *, layout: str = "bshd", causal: Any = False, scale: Any = None) -> None:
    """Against the oracle of the dequantized operands."""
    out, lse = cuflash.attention(*quantized, causal=causal, scale=scale, return_lse=True, out_dtype="float32")
    real = [by_head(x.dequantize(), layout) for x in quantized]
    expected, expected_lse = oracle(*real, causal=causal, scale=scale)
    np.testing.assert_allclose(by_head(out, layout), expected, atol=2e-5, rtol=2e-5)
    np.testing.assert_allclose(lse, expected_lse, atol=2e-5, rtol=2e-5)


# ---- the quantized function


@pytest.mark.parametrize("causal", CAUSAL)
@pytest.mark.parametrize("options", [{}, {"hadamard": True}, {"center": False}, {"dtype": "float8_e5m2"}], ids=str)
@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_options(causal: Any, options: dict[str, Any], layout: str) -> None:
    q, k, v = draw(0, (200, 300), (4, 2), (40, 24))
    k = k + np.float32(3)
    arrays = [np.ascontiguousarray(by_head(x)) if layout == "bhsd" else x for x in (q, k, v)]
    assert_quantized_function(cuflash.quantize_qkv(*arrays, layout=layout, **options), layout=layout, causal=causal)


def test_every_operand_has_a_format_of_its_own() -> None:
    arrays = draw(8, (150, 200), (4, 2), (40, 24))
    for forms in product(FORMATS, repeat=3):
        assert_quantized_function(
            [cuflash.quantize(x, role=role, dtype=form) for x, role, form in zip(arrays, "qkv", forms, strict=True)]  # type: ignore[arg-type]
        )


@given(
    seed=st.integers(0, 2**32 - 1),
    lengths=st.tuples(st.integers(1, 300), st.integers(1, 300)),
    group=st.sampled_from([1, 2, 3]),
    dims=st.tuples(st.integers(1, 20), st.integers(1, 20)),
    causal=st.sampled_from(CAUSAL),
    scale=st.floats(-2, 2),
    hadamard=st.booleans(),
    in_rows=st.booleans(),
)
@settings(max_examples=60)
def test_fresh_shapes(
    seed: int,
    lengths: tuple[int, int],
    group: int,
    dims: tuple[int, int],
    causal: Any,
    scale: float,
    hadamard: bool,
    in_rows: bool,
) -> None:
    """Blocks that begin and end anywhere in the tiles of the scales; V as an image and in rows."""
    q8, k8, v8 = cuflash.quantize_qkv(*draw(seed, lengths, (2 * group, 2), dims), hadamard=hadamard)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (("TILE_ROWS", 50), ("TILE_KEYS", 37), ("TILE_ELEMENTS", 5000)):
            patch.setattr(cpu, name, value)
        assert_quantized_function((q8, k8, v8.to_rows() if in_rows else v8), causal=causal, scale=scale)


@pytest.mark.parametrize("source", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("out_dtype", [None, "float16", "bfloat16", "float32", np.float16, "out"])
def test_output_dtypes(source: str, out_dtype: Any) -> None:
    quantized = cuflash.quantize_qkv(*draw(1, (30, 40), dtype=source))
    exact = cuflash.attention(*quantized, out_dtype="float32")
    if out_dtype == "out":
        given_out = np.empty(exact.shape, np.float16)[:, ::-1]
        out = cuflash.attention(*quantized, out=given_out, out_dtype="float16")
        assert out is given_out
        out_dtype = "float16"
    else:
        out = cuflash.attention(*quantized, out_dtype=out_dtype)
    name = source if out_dtype is None else np.dtype(out_dtype).name if out_dtype is np.float16 else out_dtype
    assert out.dtype == DTYPES[name]
    np.testing.assert_array_equal(out, exact.astype(DTYPES[name]))


@pytest.mark.parametrize("source", ["float16", "bfloat16", "float32"])
def test_precision_fp8(source: str) -> None:
    q, k, v = draw(2, (50, 150), (4, 2), dtype=source)
    out, lse = cuflash.attention(q, k, v, causal=True, scale=0.2, return_lse=True, precision="fp8")
    quantized = cuflash.quantize_qkv(q, k, v)
    expected, expected_lse = cuflash.attention(*quantized, causal=True, scale=0.2, return_lse=True)
    assert out.dtype == q.dtype and (out == expected).all() and (lse == expected_lse).all()
    given_out = np.empty_like(out)
    assert cuflash.attention(q, k, v, causal=True, scale=0.2, precision="fp8", out=given_out) is given_out
    assert (given_out == out).all()
    assert cuflash.attention(q, k, v, precision="fp8", out_dtype="float32").dtype == np.float32
    for operands in ((q, k, v), quantized):
        fast = cuflash.attention(*operands, causal=True, scale=0.2, precision="fp8-fast")
        assert (fast == out).all()  # here it is the same function


def test_rows_that_see_no_key() -> None:
    quantized = cuflash.quantize_qkv(*draw(3, (10, 4)))
    out, lse = cuflash.attention(*quantized, causal=True, return_lse=True)
    assert (out[:, :6] == 0).all() and (out[:, 6:] != 0).all()
    assert (lse[:, :, :6] == -np.inf).all() and np.isfinite(lse[:, :, 6:]).all()
    empty = [cuflash.quantize(x[:, :0], role=role) for role, x in zip("kv", draw(3, (10, 4))[1:], strict=True)]  # type: ignore[arg-type]
    out, lse = cuflash.attention(quantized[0], *empty, return_lse=True)
    assert (out == 0).all() and (lse == -np.inf).all()


@pytest.mark.parametrize("which", range(3))
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_nan_stays_in_the_rows_that_see_it(which: int, bad: float) -> None:
    arrays = draw(4, (300, 300), (1, 1), batch=1)
    clean = cuflash.attention(*arrays, causal=True, precision="fp8")
    arrays[which][0, 150, 0, 3] = bad
    out = cuflash.attention(*arrays, causal=True, precision="fp8")
    rows = np.isnan(out).any(axis=(0, 2, 3))
    assert rows[150] and not rows[:150].any() and (rows[151:].all() if which else not rows[151:].any())
    # Its value was part of the mean and perhaps the maximum of its tile; all else is as it was.
    np.testing.assert_allclose(out[:, :128], clean[:, :128], atol=0.3)


# ---- accuracy on the inputs before quantization


def errors_of(arrays: list[np.ndarray], **options: Any) -> tuple[float, float]:
    """RMSE and mean of the errors that the payloads cause: attention itself is in float32, P is not rounded."""
    arrays = [x.astype(ml_dtypes.bfloat16) for x in arrays]
    out = cuflash.attention(*cuflash.quantize_qkv(*arrays, **options), out_dtype="float32")
    error = by_head(out) - oracle(*(by_head(x) for x in arrays))[0]
    return float(np.sqrt(np.mean(error**2))), float(error.mean())


def long_call(seed: int, keys: int, heads: int = 2, queries: int = 128, dim: int = 128) -> list[np.ndarray]:
    """Some of the queries of a long sequence: errors of a row do not depend on the number of rows."""
    return draw(seed, (queries, keys), (heads, heads), (dim, dim), batch=1)


@pytest.mark.parametrize("hadamard", [False, True])
def test_normal_values(hadamard: bool) -> None:
    """Bar 1.45e-3, of which the rounding of the probabilities in a kernel takes its share: 1.3e-3 here."""
    rmse, bias = errors_of(long_call(0, 4096), hadamard=hadamard)
    assert rmse < 1.3e-3 and abs(bias) < 1e-4


@pytest.mark.parametrize(("hadamard", "bar"), [(False, 1.75e-2), (True, 9.0e-3)])
def test_outliers(hadamard: bool, bar: float) -> None:
    """The FlashAttention-3 paper's: N(0, 1) + N(0, 100) * Bernoulli(0.001)."""
    rng = np.random.default_rng(1)
    arrays = long_call(1, 4096, heads=4)
    outliers = [x + 10 * rng.standard_normal(x.shape) * (rng.random(x.shape) < 1e-3) for x in arrays]
    rmse, _ = errors_of(outliers, hadamard=hadamard)
    assert rmse < bar


@pytest.mark.parametrize("hadamard", [False, True])
def test_constant_channels_of_k(hadamard: bool) -> None:
    q, k, v = long_call(2, 4096)
    k[..., [3, 17, 64, 100]] += 30
    assert errors_of([q, k, v], hadamard=hadamard)[0] < 1.4e-3
    assert errors_of([q, k, v], hadamard=hadamard, center=False)[0] > 2.5e-3


@pytest.mark.parametrize(("keys", "bar"), [(4096, 1.4e-3), (16384, 7e-4), (65536, 4e-4)])
def test_values_with_a_mean(keys: int, bar: float) -> None:
    q, k, v = long_call(3, keys, heads=1, queries=64)
    rmse, bias = errors_of([q, k, v + 1])
    assert rmse < bar and abs(bias) < 3e-4


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_values_whose_mean_drifts(dim: int) -> None:
    """From -1 to 1: their magnitude is 0.5, of which the bias may be 0.3 %."""
    q, k, v = long_call(4, 65536, heads=1, queries=32, dim=dim)
    drift = np.linspace(-1, 1, 65536, dtype=np.float32)[None, :, None, None]
    _, bias = errors_of([q, k, v + drift])
    assert abs(bias) < 0.003 * 0.5


def test_scales_of_extreme_size() -> None:
    """B-098: scores are the same wherever the powers of two stand, in Q and K or in the scale of the call."""
    q, k, v = draw(5, (100, 200))
    expected = cuflash.attention(q, k, v, precision="fp8")
    for up in (-60, -20, 20, 60):
        powers = np.ldexp(np.float32(1), [up, up - 10, up])
        scaled = (x * power for x, power in zip((q, k, v), powers, strict=True))
        out = cuflash.attention(*scaled, precision="fp8", scale=0.25 * 2.0 ** (10 - 2 * up))
        np.testing.assert_allclose(out / powers[2], expected, rtol=1e-5, atol=1e-6)


# ---- refusals


def test_refused() -> None:
    q, k, v = draw(6, (20, 20))
    q8, k8, v8 = cuflash.quantize_qkv(q, k, v)
    rotated = cuflash.quantize(k, role="k", hadamard=True)
    turned = cuflash.quantize(by_head(k), role="k", layout="bhsd")
    for arguments, options, error, match in (
        ((q8, k, v8), {}, TypeError, "k is a ndarray and others are quantized"),
        ((q8, v8, k8), {}, ValueError, "k was quantized as 'v'; quantize it with role='k'"),
        ((q8, rotated, v8), {}, ValueError, "q is rotated with seed None and k with 0"),
        ((q8, turned, v8), {}, ValueError, "q has layout 'bshd' and k has 'bhsd'"),
        ((q8, k8, v8), {"layout": "bhsd"}, ValueError, "layout is 'bhsd'; the tensors were quantized in 'bshd'"),
        ((q8, k8, v8), {"out_dtype": "float64"}, ValueError, "out_dtype is 'float64'; accepted are 'float16'"),
        ((q8, k8, v8), {"causal": "left"}, ValueError, "causal is 'left'"),
        ((q8, k8, v8), {"scale": np.inf}, ValueError, "scale is inf"),
        (
            (q8, k8, v8),
            {"out": np.empty(q.shape, np.float16)},
            TypeError,
            "out has dtype float16 and the result float32",
        ),
        ((q8, k8, v8), {"out": np.empty((1, 2, 3, 4), np.float32)}, ValueError, "out has shape"),
        ((q, k, v), {"precision": "fp16"}, ValueError, "precision is 'fp16'; accepted are None, 'fp8', 'fp8-fast'"),
        ((q, k, v), {"out_dtype": "float16"}, TypeError, "out_dtype is for quantized operands"),
        ((q, k[:, :5], v), {"precision": "fp8"}, ValueError, "k and v differ"),
        (tuple(x.astype(np.float64) for x in (q, k, v)), {"precision": "fp8"}, cuflash.UnsupportedError, "float64"),
    ):
        with pytest.raises(error, match=match):
            cuflash.attention(*arguments, **options)  # type: ignore[arg-type]


def test_layout_of_the_tensors_is_that_of_the_result() -> None:
    arrays = draw(7, (20, 30))
    expected = cuflash.attention(*cuflash.quantize_qkv(*arrays))
    turned = cuflash.quantize_qkv(*(by_head(x) for x in arrays), layout="bhsd")
    np.testing.assert_array_equal(by_head(cuflash.attention(*turned)), expected)
    np.testing.assert_array_equal(by_head(cuflash.attention(*turned, layout="bhsd")), expected)


def test_readme_example() -> None:
    names = example("to_float8", example("quantize_qkv"))
    exact, _ = oracle(*(by_head(names[name]) for name in "qkv"), causal="bottom_right")
    assert names["out"].dtype == np.float16 and names["direct"].dtype == np.float32
    for out in (names["out"], names["direct"], names["raw"]):
        assert 1e-4 < np.sqrt(np.mean((by_head(out) - exact) ** 2)) < 1e-2
