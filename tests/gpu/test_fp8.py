"""Attention of 8-bit operands, against float64 on the same codes and on the inputs before quantization."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest

import cuflash
from cuflash import kernels
from cuflash.build import Job
from cuflash.reference import oracle
from tests.fp8 import Real, rounding_probabilities
from tests.gpu.float8_expected import judge_attention
from tests.gpu.float8_products import PRODUCTS, Call, jobs_of_kinds, kernels_of, of_one_kind
from tests.gpu.support import (
    CAUSAL,
    Array,
    assert_same_bits,
    assign,
    bits,
    host_qkv,
    numpy_dtype,
    poison_pool,
    poisoned,
    spin,
    swap_layout,
    target,
    to_device,
    to_host,
)
from tests.oracle import judge

pytestmark = pytest.mark.gpu

# Lengths, heads, head dims: tile edges, groups, rows that see no key, dims that are padded, one and two levels.
CASES = (
    ((1, 1), (1, 1), (64, 64)),
    ((127, 129), (2, 2), (64, 64)),
    ((128, 128), (4, 1), (128, 128)),
    ((129, 257), (2, 1), (128, 128)),
    ((700, 513), (4, 2), (128, 128)),
    ((300, 70), (2, 2), (128, 128)),
    ((5, 1000), (6, 2), (64, 64)),
    ((257, 384), (2, 2), (256, 256)),
    ((400, 130), (2, 1), (256, 256)),
    ((200, 300), (3, 1), (192, 128)),
    ((200, 300), (2, 2), (33, 70)),
    ((130, 200), (2, 2), (1, 1)),
    ((200, 300), (2, 1), (250, 130)),
)


@pytest.fixture(scope="module", autouse=True, params=PRODUCTS)
def kind(request: pytest.FixtureRequest) -> Iterator[str]:
    """Kernels of one kind, for all of this file."""
    with kernels_of(request) as name:
        yield name


def kernels_ahead() -> list[Job]:
    return jobs_of_kinds(_calls())


def _calls() -> Iterator[Call]:
    """What the tests below take."""
    for index, (_, heads, dims) in enumerate(CASES):
        arrays = host_qkv((2, 2), heads, dims, _dtype_of(index))
        for causal in CAUSAL[:2]:
            yield arrays, {"causal": causal, "return_lse": True, "precision": "fp8"}
    for dim in (64, 128, 256):
        arrays = host_qkv((2, 2), (2, 2), (dim, dim), "bfloat16")
        for options in ({"out_dtype": "float16"}, {"causal": True}):
            yield arrays, {"precision": "fp8", **options}
        if dim < 256:
            yield arrays, {"precision": "fp8-fast", "out_dtype": "float16"}
    yield host_qkv((2, 2), (2, 2), (128, 128), "bfloat16"), {"precision": "fp8", "scale": 0.0}
    yield host_qkv((2, 2), (2, 2), (70, 70)), {"precision": "fp8"}
    # CuPy's arrays without elements have strides of 0, which allow no wide accesses.
    yield tuple(x[..., ::2] for x in host_qkv((2, 2), (2, 2), (256, 256))), {"precision": "fp8"}


def _dtype_of(index: int) -> str:
    """That in which a case is tested: bfloat16 but for two of three cases with 64 columns."""
    return "float16" if index in (1, 6) else "bfloat16"


# --- what is right


def check(
    quantized: tuple[cuflash.QuantizedTensor, ...], *, causal: Any = False, scale: float | None = None, **options: Any
) -> Array:
    """Runs into poisoned memory, judges output and LSE, and returns the output."""
    q8, _, v8 = quantized
    batch, seq, heads, dim = q8.sizes
    poison_pool(8 * batch * seq * heads * max(v8.head_dim, dim))
    out, lse = cuflash.attention(*quantized, causal=causal, scale=scale, return_lse=True, **options)
    found = to_host(out) if q8.layout == "bhsd" else swap_layout(to_host(out))
    judge_attention(found, to_host(lse), Real.of(*quantized), causal, dim**-0.5 if scale is None else scale)
    return out


def quantize(arrays: Any, **options: Any) -> tuple[cuflash.QuantizedTensor, ...]:
    return cuflash.quantize_qkv(*map(to_device, arrays), **options)


# --- the quantized function


@pytest.mark.parametrize("causal", CAUSAL)
@pytest.mark.parametrize("index", range(len(CASES)), ids=lambda index: str(CASES[index]))
def test_shapes(index: int, causal: Any) -> None:
    q, k, v = host_qkv(*CASES[index], dtype=_dtype_of(index), batch=2, seed=index)
    out = check(quantize((q, k + k.dtype.type(1), v + v.dtype.type(1))), causal=causal)
    assert out.shape == (*q.shape[:3], v.shape[3]) and out.flags.c_contiguous


@pytest.mark.parametrize("causal", CAUSAL[:2])
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("options", [{"hadamard": True}, {"center": False}], ids=str)
def test_options(options: dict[str, Any], dim: int, causal: Any) -> None:
    arrays = host_qkv((260, 400), (4, 2), (dim, dim), "bfloat16", seed=dim)
    check(quantize(arrays, **options), causal=causal)


def test_tiles_of_very_different_scales() -> None:
    """Scales of K and V follow their tiles, forwards and backwards by a factor of a million."""
    q, k, v = host_qkv((300, 1024), (2, 2), (128, 128), "bfloat16")
    powers = np.exp2([0, -10, 10, 3, -20, 0, 7, -3]).repeat(128).astype(np.float32)[None, :, None, None]
    check(quantize((q, k, (v.astype(np.float32) * powers).astype(v.dtype)), center=False), causal=True)
    check(quantize((q, (k.astype(np.float32) * powers**0.1).astype(k.dtype), v), center=False), causal=True)


@pytest.mark.parametrize("scale", [0.0, -0.05, 0.3])
def test_scales_of_the_call(scale: float) -> None:
    check(quantize(host_qkv((200, 300), (2, 2), (128, 128), "bfloat16")), scale=scale)


def test_layouts_and_output_dtypes() -> None:
    arrays = host_qkv((200, 300), (4, 2), (128, 128), "bfloat16", batch=2)
    expected = check(quantize(arrays), causal=True)
    turned = quantize([np.ascontiguousarray(swap_layout(x)) for x in arrays], layout="bhsd")
    assert_same_bits(swap_layout(to_host(check(turned, causal=True))), expected)
    assert check(quantize(arrays), out_dtype="float16").dtype == np.float16


@pytest.mark.parametrize("dims", [(128, 128), (33, 70)], ids=str)
def test_out_is_written_where_it_is(dims: tuple[int, int]) -> None:
    """By TMA, or copied there; nothing beside it is touched."""
    quantized = quantize(host_qkv((200, 300), (2, 2), dims, "bfloat16"))
    expected = cuflash.attention(*quantized)
    for gap in (0, 8, 3):
        around = poisoned((1, 203, 4, dims[1] + gap), numpy_dtype("bfloat16"))
        out = around[:, 3:, 1:3, gap:]
        assert cuflash.attention(*quantized, out=out) is out
        assert_same_bits(to_device(to_host(out)), expected)
        outside = np.ones(around.shape, bool)
        outside[:, 3:, 1:3, gap:] = False
        assert np.isnan(to_host(around)[outside].astype(np.float32)).all()


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_codes_from_elsewhere(torch: Any, layout: str) -> None:
    """torch's 8-bit tensors with scales of their owner, V in rows; on the GPU throughout."""
    lengths = (200, 300, 300)
    shapes = [(2, n, 2, 64) if layout == "bshd" else (2, 2, n, 64) for n in lengths]
    codes = [torch.randn(shape, device="cuda").to(torch.float8_e4m3fn) for shape in shapes]
    tensors = [
        cuflash.QuantizedTensor.from_float8(x, 0.5 + i, role=role, layout=layout)  # type: ignore[arg-type]
        for i, (x, role) in enumerate(zip(codes, "qkv", strict=True))
    ]
    q8, k8, v8 = tensors[0], tensors[1], tensors[2].to_image()
    out = cuflash.attention(q8, k8, v8, causal=True)
    real = [(x.float() * (0.5 + i)).cpu().numpy().astype(np.float64) for i, x in enumerate(codes)]
    q, k, v = (swap_layout(x) if layout == "bshd" else x for x in real)
    expected, _ = oracle(q, k, v, causal="bottom_right")
    found = out.float().cpu().numpy().astype(ml_dtypes.bfloat16)
    baseline = rounding_probabilities(Real(q, k, v, 0 * v[:, :, 0]), "bottom_right", 0.125, found.dtype)
    judge(swap_layout(found) if layout == "bshd" else found, expected, baseline)
    assert torch.equal(v8.to_rows().payload, tensors[2].payload)


def test_images_are_made_on_the_gpu() -> None:
    v8 = cuflash.quantize(to_device(host_qkv((1, 300), (2, 2), (64, 70))[2]), role="v")
    rows = v8.to_rows()
    np.testing.assert_array_equal(rows.to_host().payload, v8.to_host().to_rows().payload)
    np.testing.assert_array_equal(rows.to_image().to_host().payload, v8.to_host().payload)


def test_nothing_to_compute() -> None:
    for lengths in ((0, 10), (10, 0)):
        out, lse = cuflash.attention(*quantize(host_qkv(lengths, (2, 2), (128, 128))), return_lse=True)
        assert out.shape[1] == lengths[0] and not bits(out).any() and np.isneginf(to_host(lse)).all()


def test_non_finite_values_stay_with_the_rows_that_see_them() -> None:
    for which, bad in ((0, np.nan), (1, np.inf), (2, np.nan)):
        arrays = host_qkv((300, 300), (2, 2), (128, 128), "bfloat16")
        arrays[which][0, 150, 1, 3] = bad
        quantized = quantize(arrays)
        found = to_host(cuflash.attention(*quantized, causal=True)).astype(np.float32)
        host = [x.to_host() for x in quantized]
        expected = cuflash.attention(*host, causal=True, out_dtype="float32")
        nan = np.isnan(found)
        assert not nan[:, :, 0].any() and nan[0, 150, 1].any()
        if which == 2:  # rows that share the tile of key 150, and do not see it, may be NaN or not
            assert nan[:, 150:, 1, 3].all() and not nan[:, :128].any() and not np.delete(nan, 3, axis=3).any()
        else:
            np.testing.assert_array_equal(nan, np.isnan(expected))


def test_rows_that_see_no_key_are_zero_whatever_the_operands_hold() -> None:
    for dim in (128, 256):
        q, k, v = host_qkv((300, 70), (2, 2), (dim, dim), "bfloat16")
        q[:, 100] = v[:, 69] = np.nan
        out, lse = cuflash.attention(*quantize((q, k, v)), causal=True, return_lse=True)
        assert not bits(out)[:, :230].any() and np.isneginf(to_host(lse)[:, :, :230]).all()


def test_runs_repeat_bit_for_bit() -> None:
    for dim in (64, 128, 256):
        quantized = quantize(host_qkv((1500, 1500), (8, 4), (dim, dim), "bfloat16", batch=2))
        first, first_lse = cuflash.attention(*quantized, causal=True, return_lse=True)
        for _ in range(100):
            out, lse = cuflash.attention(*quantized, causal=True, return_lse=True)
        assert_same_bits(out, first)
        assert_same_bits(lse, first_lse)


# --- accuracy on the inputs before quantization: the bars of the README's table


class Inputs(NamedTuple):
    """Inputs before quantization, bshd, and attention on them in float64, without a mask."""

    arrays: tuple[np.ndarray, ...]
    exact: np.ndarray

    @classmethod
    def of(cls, *arrays: np.ndarray) -> Inputs:
        rounded = tuple(x.astype(ml_dtypes.bfloat16) for x in arrays)
        return cls(rounded, swap_layout(oracle(*map(swap_layout, rounded))[0]))


def normal(queries: int, keys: int, heads: int, dim: int, seed: int) -> list[np.ndarray]:
    """Some of the queries of a long sequence: the errors of a row do not depend on how many there are."""
    rng = np.random.default_rng(seed)
    shapes = (queries, keys, keys)
    return [rng.standard_normal((1, n, heads, dim), np.float32) for n in shapes]


# Of each the exact result is computed once: kernels of all kinds, and calls with other options, are held against it.


@functools.cache
def normal_values() -> Inputs:
    return Inputs.of(*normal(1024, 4096, 4, 128, 0))


@functools.cache
def outliers() -> Inputs:
    """The FlashAttention-3 paper's: N(0, 1) + N(0, 100) * Bernoulli(0.001)."""
    rng = np.random.default_rng(1)
    arrays = normal(1024, 4096, 8, 128, 1)
    return Inputs.of(*(x + 10 * rng.standard_normal(x.shape) * (rng.random(x.shape) < 1e-3) for x in arrays))


@functools.cache
def constant_channels_of_k() -> Inputs:
    q, k, v = normal(1024, 4096, 4, 128, 2)
    k[..., [3, 17, 64, 100]] += 30
    return Inputs.of(q, k, v)


@functools.cache
def values_with_a_mean(dim: int, keys: int) -> Inputs:
    q, k, v = normal(512, keys, 2, dim, 3)
    return Inputs.of(q, k, v + 1)


@functools.cache
def values_whose_mean_drifts(dim: int) -> Inputs:
    q, k, v = normal(128, 65536, 1, dim, 5)
    return Inputs.of(q, k, v + np.linspace(-1, 1, 65536)[None, :, None, None])


def error_of(inputs: Inputs, precision: str = "fp8", **options: Any) -> np.ndarray:
    """By float16 outputs, since rounding 1 to bfloat16 costs more; with options of the quantizer, by its tensors."""
    operands = quantize(inputs.arrays, **options) if options else map(to_device, inputs.arrays)
    out = cuflash.attention(*operands, precision=precision, out_dtype="float16")
    return to_host(out).astype(np.float64) - inputs.exact


def errors_of(inputs: Inputs, precision: str = "fp8", **options: Any) -> tuple[float, float]:
    """RMSE, and the mean error relative to the mean magnitude."""
    error = error_of(inputs, precision, **options)
    return float(np.sqrt(np.mean(error**2))), float(error.mean() / np.abs(inputs.exact).mean())


def test_normal_values() -> None:
    rmse, _ = errors_of(normal_values())
    assert rmse <= 1.45e-3


@pytest.mark.parametrize(("hadamard", "bar"), [(False, 1.75e-2), (True, 9.0e-3)])
def test_outliers(hadamard: bool, bar: float) -> None:
    assert errors_of(outliers(), hadamard=hadamard)[0] <= bar


def test_constant_channels_of_k() -> None:
    assert errors_of(constant_channels_of_k())[0] <= 1.5e-3


@pytest.mark.parametrize(
    ("dim", "keys", "bar"),
    [
        (64, 4096, 1.5e-3),
        (64, 16384, 1.5e-3),
        (128, 4096, 1.5e-3),
        (128, 16384, 1.5e-3),
        (256, 4096, 1.5e-3),
        (256, 16384, 2.5e-3),  # one level: what tensor cores drop of smaller and smaller products adds up
    ],
)
def test_values_with_a_mean(dim: int, keys: int, bar: float) -> None:
    rmse, bias = errors_of(values_with_a_mean(dim, keys))
    assert rmse <= bar and abs(bias) <= 3e-3


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("keys", [4096, 16384])
def test_values_with_a_mean_that_is_not_subtracted(keys: int, dim: int, kind: str) -> None:
    """Two levels: the tensor cores alone would lose 5 and 18 per cent."""
    if dim == 256 and kind == "wgmma" and target() in kernels.TMA_TARGETS:
        pytest.skip("GPU test: two levels, of which these kernels have one")
    _, bias = errors_of(values_with_a_mean(dim, keys), center=False)
    assert abs(bias) <= 3e-3


@of_one_kind
@pytest.mark.parametrize("dim", [64, 128])
def test_what_fast_calls_give_up(dim: int) -> None:
    """Nothing where V is centred; of a mean that is left, what the documentation says of Hopper's ``wgmma``."""
    if target() not in kernels.TMA_TARGETS:
        pytest.skip("GPU test: of sums that only wgmma truncates so")
    rmse, bias = errors_of(values_with_a_mean(dim, 4096), "fp8-fast")
    assert rmse <= 1.6e-3 and abs(bias) <= 3e-3
    _, bias = errors_of(values_with_a_mean(dim, 4096), "fp8-fast", center=False)
    assert -0.07 < bias < -0.03


@pytest.mark.parametrize("dim", [64, 128])
def test_values_whose_mean_drifts(dim: int) -> None:
    """From -1 to 1: of their magnitude, 0.5, the bias may be 0.3 %."""
    assert abs(error_of(values_whose_mean_drifts(dim)).mean()) <= 0.003 * 0.5


# --- frameworks, streams, graphs


def test_torch_tensors(torch: Any) -> None:
    arrays = host_qkv((200, 300), (4, 2), (128, 128), "bfloat16")
    tensors = [torch.from_numpy(x.view(np.int16)).cuda().view(torch.bfloat16) for x in arrays]
    out, lse = cuflash.attention(*tensors, causal=True, return_lse=True, precision="fp8")
    expected, expected_lse = cuflash.attention(*map(to_device, arrays), causal=True, return_lse=True, precision="fp8")
    assert isinstance(out, torch.Tensor) and out.dtype is torch.bfloat16
    assert_same_bits(out.view(torch.int16).cpu().numpy().view(np.uint16), expected)
    assert_same_bits(lse.cpu().numpy(), expected_lse)
    with pytest.raises(cuflash.UnsupportedError, match="requires grad, and attention with"):
        cuflash.attention(*(x.requires_grad_() for x in tensors), precision="fp8")


@pytest.fixture
def late() -> Iterator[tuple[list[Array], list[Array], Array]]:
    """Poisoned inputs, what they will become, and the output that those give."""
    import cupy as cp

    spin(1)  # compiled here, not in the middle of a test
    inputs = [to_device(x) for x in host_qkv((200, 200), (4, 2), (128, 128), "bfloat16")]
    expected = cuflash.attention(*inputs, causal=True, precision="fp8")
    poison = [poisoned(x.shape, x.dtype) for x in inputs]
    assign(poison[1], poison[2])  # CuPy's kernel for this is compiled here, too
    cp.cuda.Device().synchronize()
    yield poison, inputs, expected


def test_all_kernels_run_on_the_current_stream(late: Any) -> None:
    import cupy as cp

    poison, inputs, expected = late
    for _ in range(2):  # the second time the plans are hot
        for x in poison:
            x.view(np.uint16).fill(0x7FFF)
        cp.cuda.Device().synchronize()
        stream = cp.cuda.Stream(non_blocking=True)
        with stream:
            spin()
            for to, x in zip(poison, inputs, strict=True):
                assign(to, x)
            out, lse = cuflash.attention(*poison, causal=True, return_lse=True, precision="fp8")
            assert not stream.done, "the call waited for the device"
            stream.synchronize()
        assert_same_bits(out, expected)
        assert np.isfinite(to_host(lse)).all()


@pytest.mark.parametrize("return_lse", [False, True])
def test_captured_in_a_graph(torch: Any, return_lse: bool) -> None:
    """Also the first call, after a warm-up: nothing but launches and the framework's own memory."""
    tensors = [
        torch.from_numpy(x.view(np.int16)).cuda().view(torch.bfloat16)
        for x in host_qkv((300, 400), (4, 2), (128, 128), "bfloat16", seed=1)
    ]
    call: Callable[[], Any] = lambda: cuflash.attention(  # noqa: E731
        *tensors, causal=True, return_lse=return_lse, precision="fp8"
    )
    expected = call()
    cuflash.warmup(*tensors, causal=True, return_lse=return_lse, precision="fp8")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = call()
    for change in (False, True):
        if change:
            tensors[2].mul_(2)
            expected = call()
        graph.replay()
        torch.cuda.synchronize()
        pairs = zip(found, expected, strict=True) if return_lse else [(found, expected)]
        for mine, other in pairs:
            assert torch.equal(mine, other)
