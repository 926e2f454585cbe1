"""Attention of quantized tensors on a GPU, up to the launch: plans, parameters, results, refusals, the hot path."""

from __future__ import annotations

import dataclasses
import sys
from functools import partial
from itertools import product
from typing import Any
from unittest import mock

import ml_dtypes
import numpy as np
import pytest

import cuflash
from cuflash import driver, jit, kernels, quantized_attention, quantized_call, quantized_plan
from cuflash.arch import fp8_sm80
from cuflash.fp8 import FORMATS
from tests.operands import draw_qkv
from tests.oracle import DTYPES
from tests.unit import fake_gpu
from tests.unit.fake_gpu import FakeGpu
from tests.unit.fp8_calls import SHAPES

CAUSAL = (False, "bottom_right", "top_left")


def draw(
    lengths: tuple[int, int] = (130, 300),
    dims: tuple[int, int] = (64, 48),
    heads: tuple[int, int] = (4, 2),
    dtype: str = "float16",
) -> list[Any]:
    """Off their centre, so that a mean that is forgotten shows."""
    drawn = draw_qkv(np.random.default_rng(0), lengths, heads, dims, "float32", batch=2)
    return [(x + np.float32(0.5)).astype(DTYPES[dtype]) for x in drawn]


def tasks(gpu: FakeGpu) -> list[str]:
    return [launch.loaded.problem.task for launch in gpu.launches]


def assert_close(gpu: FakeGpu, found: Any, expected: Any) -> None:
    """As the CPU's float32 result, rounded once."""
    out, lse = (gpu.host(x).astype(np.float64) for x in found)
    np.testing.assert_allclose(out, expected[0], atol=2e-4, rtol=5e-3 if found[0].dtype != np.float16 else 7e-4)
    np.testing.assert_allclose(lse, expected[1], atol=1e-5, rtol=1e-5)


# --- results


@pytest.mark.parametrize("causal", CAUSAL)
@pytest.mark.parametrize("options", [{}, {"hadamard": True}, {"center": False}], ids=str)
@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_as_on_the_cpu(gpu: FakeGpu, causal: Any, options: dict[str, Any], layout: str) -> None:
    arrays = draw()
    if layout == "bhsd":
        arrays = [np.ascontiguousarray(x.swapaxes(1, 2)) for x in arrays]
    expected = cuflash.attention(
        *cuflash.quantize_qkv(*arrays, layout=layout, **options), causal=causal, return_lse=True, out_dtype="float32"
    )
    quantized = cuflash.quantize_qkv(*(gpu.array(x) for x in arrays), layout=layout, **options)
    assert_close(gpu, cuflash.attention(*quantized, causal=causal, return_lse=True), expected)
    shifted = options.get("center", True)
    assert tasks(gpu)[-2:] == ["quantize_lse" if shifted else "quantize", "forward"]
    problem = gpu.launches[-1].loaded.problem
    assert (problem.arch, problem.input_dtype, problem.dtype) == ("sm_90a", "float8_e4m3fn", "float16")


@pytest.mark.parametrize(("lengths", "dims", "heads"), SHAPES, ids=str)
@pytest.mark.parametrize("causal", CAUSAL)
def test_shapes(gpu: FakeGpu, lengths: Any, dims: Any, heads: Any, causal: Any) -> None:
    """Tile edges, odd head dims, groups, rows that see no key."""
    arrays = draw(lengths, dims, heads, "bfloat16")
    expected = cuflash.attention(
        *arrays, causal=causal, scale=0.2, return_lse=True, precision="fp8", out_dtype="float32"
    )
    found = cuflash.attention(*map(gpu.array, arrays), causal=causal, scale=0.2, return_lse=True, precision="fp8")
    assert found[0].dtype == ml_dtypes.bfloat16 and found[0].flags.c_contiguous
    assert_close(gpu, found, expected)


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0), (10, 0), (12, 0)])
@pytest.mark.parametrize("forms", list(product(FORMATS, repeat=3)), ids=str)
def test_formats(monkeypatch: pytest.MonkeyPatch, forms: tuple[Any, Any, Any], capability: tuple[int, int]) -> None:
    """Any combination on any GPU; also what the mean of K adds to the LSE depends on that of Q."""
    gpu = fake_gpu.install(monkeypatch, capability=capability)
    arrays = draw(dims=(64, 64))
    quantized = [
        [cuflash.quantize(place(x), role=role, dtype=form) for x, role, form in zip(arrays, "qkv", forms, strict=True)]  # type: ignore[arg-type]
        for place in (gpu.array, np.asarray)
    ]
    expected = cuflash.attention(*quantized[1], causal=True, return_lse=True, out_dtype="float32")
    assert_close(gpu, cuflash.attention(*quantized[0], causal=True, return_lse=True), expected)
    assert gpu.launches[-1].loaded.problem.formats == tuple(FORMATS[form].name[7:11] for form in forms)
    explained = cuflash.explain(*quantized[0])
    assert explained.kernel is not None
    assert explained.kernel.problem == dataclasses.replace(gpu.launches[-1].loaded.problem, mask="full")
    fake_gpu.remove(gpu)


@pytest.mark.parametrize(
    ("capability", "arch"),
    [
        ((8, 0), "sm_80"),
        ((8, 6), "sm_86"),
        ((8, 9), "sm_89"),
        ((10, 0), "sm_100"),
        ((10, 3), "sm_100"),
        ((12, 1), "sm_120"),
    ],
)
@pytest.mark.parametrize("causal", CAUSAL)
def test_other_gpus(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], arch: str, causal: Any) -> None:
    """The same operands, the kernel of another family; results as on the CPU."""
    gpu = fake_gpu.install(monkeypatch, capability=capability)
    for layout, lengths, dims in (("bshd", (300, 170), (64, 48)), ("bhsd", (130, 300), (33, 70))):
        arrays = draw(lengths, dims)
        if layout == "bhsd":
            arrays = [np.ascontiguousarray(x.swapaxes(1, 2)) for x in arrays]
        options: dict[str, Any] = {"layout": layout, "causal": causal, "return_lse": True, "precision": "fp8"}
        expected = cuflash.attention(*arrays, **options, out_dtype="float32")
        assert_close(gpu, cuflash.attention(*map(gpu.array, arrays), **options), expected)
        loaded = gpu.launches[-1].loaded
        assert (loaded.problem.arch, loaded.config.family) == (arch, "forward_fp8_sm80")
        explained = cuflash.explain(*map(gpu.array, arrays), **options)
        assert explained.kernels[-1].problem == loaded.problem and explained.kernels[-1].grid == (
            gpu.launches[-1].grid,
        )
        symbol = cuflash.warmup(*map(gpu.array, arrays), **options)[-1]
        assert symbol.startswith("cuflash_fwd_fp8_sm80_") and symbol.endswith(loaded.config.label)
    fake_gpu.remove(gpu)


@pytest.mark.parametrize("scale", [0.0, -0.3, 1e-35])
def test_scales(gpu: FakeGpu, scale: float) -> None:
    arrays = draw()
    expected = cuflash.attention(*arrays, scale=scale, return_lse=True, precision="fp8", out_dtype="float32")
    assert_close(
        gpu, cuflash.attention(*map(gpu.array, arrays), scale=scale, return_lse=True, precision="fp8"), expected
    )
    assert gpu.launches[-1].loaded.problem.scale_first


@pytest.mark.parametrize("out_dtype", ["float16", "bfloat16", np.float16])
def test_out_dtype(gpu: FakeGpu, out_dtype: Any) -> None:
    out = cuflash.attention(*map(gpu.array, draw(dtype="bfloat16")), precision="fp8", out_dtype=out_dtype)
    assert out.dtype == DTYPES["bfloat16" if out_dtype == "bfloat16" else "float16"]
    assert gpu.launches[-1].loaded.problem.dtype == out.dtype.name


@pytest.mark.parametrize("dim", [48, 41])
@pytest.mark.parametrize("place", ["contiguous", "gaps", "odd gaps", "reversed", "columns"])
def test_out(gpu: FakeGpu, dim: int, place: str) -> None:
    """Written where it is where TMA can, and copied there where not; nothing beside it is touched."""
    arrays = draw(dims=(64, dim))
    expected = cuflash.attention(*arrays, precision="fp8")
    around = np.full((2, 260, 8, 2 * dim + 1 if place == "columns" else 2 * dim + 16), 7, np.float16)
    where = {
        "contiguous": np.s_[:, :130, :4, :dim],
        "gaps": np.s_[:, ::2, ::2, :dim],
        "odd gaps": np.s_[:, :130, :4, 1 : dim + 1],
        "reversed": np.s_[:, 129::-1, :4, :dim],
        "columns": np.s_[:, :130, :4, : 2 * dim : 2],
    }[place]
    inside = np.full(expected.shape, 7, np.float16) if place == "contiguous" else around[where]
    out = gpu.array(inside)
    assert cuflash.attention(*map(gpu.array, arrays), precision="fp8", out=out) is out
    np.testing.assert_allclose(inside.astype(np.float32), expected.astype(np.float32), rtol=2e-3, atol=1e-4)
    around[where] = 7
    assert (around == 7).all()
    direct = dim == 48 and place in ("contiguous", "gaps")
    assert (gpu.launches[-1].params["out"] == out.data.ptr) == direct


def test_nothing_to_compute(gpu: FakeGpu) -> None:
    for lengths in ((0, 5), (5, 0), (0, 0)):
        arrays = draw(lengths)
        for return_lse in (False, True):
            found = cuflash.attention(*map(gpu.array, arrays), return_lse=return_lse, precision="fp8")
            out, lse = found if return_lse else (found, None)
            assert out.shape == (2, lengths[0], 4, 48) and (gpu.host(out) == 0).all()
            assert lse is None or (gpu.host(lse) == -np.inf).all()
    assert "forward" not in tasks(gpu) and "quantize_lse" not in tasks(gpu)
    none = cuflash.attention(*(gpu.array(x[:0]) for x in draw()), return_lse=True, precision="fp8")
    assert [x.shape for x in none] == [(0, 130, 4, 48), (0, 4, 130)]


def test_the_lse_of_a_dead_row_of_nan(gpu: FakeGpu) -> None:
    q, k, v = draw((10, 4))
    q[:, :7] = np.nan
    out, lse = cuflash.attention(*map(gpu.array, (q, k, v)), causal=True, return_lse=True, precision="fp8")
    assert (gpu.host(out)[:, :6] == 0).all() and (gpu.host(lse)[:, :, :6] == -np.inf).all()
    assert np.isnan(gpu.host(lse)[:, :, 6]).all() and np.isfinite(gpu.host(lse)[:, :, 7:]).all()


# --- devices, streams, plans


def test_devices_and_streams(gpu: FakeGpu) -> None:
    gpu.streams[1] = 77
    cuflash.attention(*(gpu.array(x, device=1) for x in draw()), return_lse=True, precision="fp8")
    quantized = cuflash.quantize_qkv(*(gpu.array(x, device=1) for x in draw()))
    for _ in range(2):
        out = cuflash.attention(*quantized)
        assert gpu.device == 0 and out.data.device_id == 1
    assert {(launch.stream, launch.loaded.device) for launch in gpu.launches} == {(77, 1)}


def test_equal_calls_are_hits(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """No check, no plan, no kernel lookup: only the table, the allocator and the launches."""
    out = gpu.array(np.zeros((2, 130, 4, 48), np.float16))
    cases: list[dict[str, Any]] = [{}, {"causal": True, "return_lse": True}, {"out": out}, {"out_dtype": "bfloat16"}]
    first, second = (cuflash.quantize_qkv(*map(gpu.array, draw())) for _ in range(2))
    expected = [cuflash.attention(*first, **case) for case in cases]
    count = len(gpu.launches)

    def cold(*_: Any, **__: Any) -> Any:
        raise AssertionError("the cold path")

    for name in ("check_quantized", "foresee"):
        monkeypatch.setattr(quantized_attention, name, cold)
    monkeypatch.setattr(quantized_call, "request_for", cold)
    monkeypatch.setattr(quantized_plan, "plan_for", cold)
    monkeypatch.setattr(jit, "kernel_for", cold)
    for name in ("device_compute_capability", "device_properties", "multiprocessors"):
        monkeypatch.setattr(driver, name, cold)
    for quantized in (first, first):
        for case, before in zip(cases, expected, strict=True):
            found = cuflash.attention(*quantized, **case)
            pairs = zip(found, before, strict=True) if isinstance(found, tuple) else [(found, before)]
            for mine, other in pairs:
                np.testing.assert_array_equal(gpu.host(mine), gpu.host(other))
    assert len(jit.QUANTIZED_PLANS) == len(cases) and len(gpu.launches) == count + 2 * (len(cases) + 1)
    monkeypatch.undo()
    assert second[0].traits == first[0].traits and second[0].addresses != first[0].addresses


def test_equal_calls_that_quantize_are_hits(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their plans know everything but addresses: of other arrays they give what those hold."""
    options: dict[str, Any] = {"causal": True, "return_lse": True, "precision": "fp8"}
    first, second = draw(), [2 * x for x in draw()]
    expected = [cuflash.attention(*arrays, **options, out_dtype="float32") for arrays in (first, second)]
    cuflash.attention(*map(gpu.array, first), **options)

    def cold(*_: Any, **__: Any) -> Any:
        raise AssertionError("the cold path")

    for name in ("check_quantized", "foresee", "quantize_qkv"):
        monkeypatch.setattr(quantized_attention, name, cold)
    monkeypatch.setattr(quantized_call, "request_for", cold)
    for name in ("device_compute_capability", "device_properties", "multiprocessors"):
        monkeypatch.setattr(driver, name, cold)
    for arrays, right in zip((first, second, first), (*expected, expected[0]), strict=True):
        assert_close(gpu, cuflash.attention(*map(gpu.array, arrays), **options), right)
    assert len(jit.QUANTIZING_PLANS) == 1
    monkeypatch.undo()


def test_calls_that_quantize_have_plans_of_their_own(gpu: FakeGpu) -> None:
    arrays = draw(dims=(64, 64))
    q, k, v = map(gpu.array, arrays)
    odd = np.zeros(q.size + 1, np.float16)[1:].reshape(q.shape)
    odd[:] = arrays[0]
    calls: list[tuple[list[Any], dict[str, Any]]] = [
        ([q, k, v], {}),
        ([gpu.array(odd), k, v], {}),
        ([q, k, v], {"causal": "top_left"}),
        ([q, k, v], {"scale": 0.5}),
        ([q, k, v], {"return_lse": True}),
        ([q, k, v], {"out_dtype": "bfloat16"}),
        ([q, k, v], {"out": gpu.array(np.zeros(q.shape, np.float16))}),
        ([gpu.array(x.swapaxes(1, 2)) for x in arrays], {"layout": "bhsd"}),
        ([gpu.array(x.astype(ml_dtypes.bfloat16)) for x in arrays], {}),
        ([gpu.array(x, device=1) for x in arrays], {}),
    ]
    for number, (operands, options) in enumerate(calls, 1):
        for _ in range(2):
            out = cuflash.attention(*operands, precision="fp8", **{"causal": True} | options)
        assert len(jit.QUANTIZING_PLANS) == number
        options = {"causal": True} | options | {"out": None, "return_lse": False}
        out = out[0] if isinstance(out, tuple) else out
        expected = cuflash.attention(*(gpu.host(x) for x in operands), precision="fp8", **options)
        np.testing.assert_allclose(gpu.host(out).astype(np.float32), expected.astype(np.float32), rtol=1e-2, atol=2e-3)


def test_everything_that_matters_is_in_the_key(gpu: FakeGpu) -> None:
    arrays = draw(dims=(64, 64))
    q8, k8, v8 = cuflash.quantize_qkv(*map(gpu.array, arrays))
    longer = cuflash.quantize_qkv(*map(gpu.array, draw((130, 301), (64, 64))))
    calls: list[tuple[Any, dict[str, Any]]] = [
        ((q8, k8, v8), {}),
        ((q8, k8, v8), {"causal": True}),
        ((q8, k8, v8), {"causal": "top_left"}),
        ((q8, k8, v8), {"scale": 0.5}),
        ((q8, k8, v8), {"return_lse": True}),
        ((q8, k8, v8), {"out_dtype": "bfloat16"}),
        ((q8, k8, dataclasses.replace(v8, mean=None)), {}),
        ((q8, dataclasses.replace(k8, mean=None), v8), {"return_lse": True}),
        (longer, {}),
        ((*cuflash.quantize_qkv(*map(gpu.array, arrays), hadamard=True),), {}),
        ((q8, k8, cuflash.quantize(gpu.array(arrays[2][..., :48].copy()), role="v")), {}),
        (tuple(cuflash.quantize_qkv(*(gpu.array(x.astype(ml_dtypes.bfloat16)) for x in arrays))), {}),
        (tuple(cuflash.quantize_qkv(*(gpu.array(x, device=1) for x in arrays))), {}),
    ]
    for number, (operands, options) in enumerate(calls, 1):
        for _ in range(2):
            cuflash.attention(*operands, **options)
        assert len(jit.QUANTIZED_PLANS) == number


def test_warmup(gpu: FakeGpu) -> None:
    arrays = [gpu.array(x) for x in draw()]
    ready = cuflash.warmup(*arrays, return_lse=True, precision="fp8")
    assert not gpu.launches and len(ready) == len(gpu.compiled) == 4
    cuflash.attention(*arrays, return_lse=True, precision="fp8")
    quantized = cuflash.quantize_qkv(*arrays)
    assert cuflash.warmup(*quantized, return_lse=True) == ready[2:]
    assert cuflash.warmup(*quantized) == ready[3:] and len(gpu.compiled) == 4
    assert len(cuflash.warmup(*quantized, out_dtype="bfloat16")) == 1 and len(gpu.compiled) == 5
    assert cuflash.warmup(*draw(), precision="fp8") == ()
    with pytest.raises(cuflash.UnsupportedError, match="quantized operands have no gradients"):
        cuflash.warmup(*arrays, precision="fp8", backward=True)


def test_fast_calls_have_kernels_of_their_own(gpu: FakeGpu) -> None:
    """Of arrays and of quantized tensors, with plans of their own; but not where there is one kernel for both."""
    for dim_v, levels in ((64, [False, True]), (144, [False])):
        arrays = draw(dims=(64, dim_v))
        inputs = [gpu.array(x) for x in arrays]
        quantized = cuflash.quantize_qkv(*inputs)
        gpu.compiled.clear()
        expected = cuflash.attention(*arrays, return_lse=True, precision="fp8", out_dtype="float32")
        for operands in (inputs, quantized):
            for precision in ("fp8", "fp8-fast", "fp8"):
                gpu.launches.clear()
                found = cuflash.attention(*operands, return_lse=True, precision=precision)
                assert_close(gpu, found, expected)
                wants = precision == "fp8-fast" and dim_v <= 128
                assert gpu.launches[-1].loaded.problem.one_level is wants
                explained = cuflash.explain(*operands, return_lse=True, precision=precision)
                assert explained.kernel.problem == gpu.launches[-1].loaded.problem  # type: ignore[union-attr]
                assert any("truncate" in note for note in explained.notes) is (precision == "fp8-fast" or dim_v > 128)
                assert any("precision='fp8-fast': " in note for note in explained.notes) is wants
        attending = [problem for problem in gpu.compiled if problem.task == "forward"]
        assert [problem.one_level for problem in attending] == levels
    ready = cuflash.warmup(*map(gpu.array, draw(dims=(32, 32))), precision="fp8-fast")
    assert len(ready) == 3 and gpu.compiled[-1].one_level


@pytest.mark.parametrize(("capability", "dim_v", "kernels"), [((8, 0), 64, 1), ((8, 9), 64, 2), ((8, 9), 144, 1)])
def test_fast_calls_compile_nothing_where_they_make_no_difference(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], dim_v: int, kernels: int
) -> None:
    gpu = fake_gpu.install(monkeypatch, capability=capability)
    for precision in ("fp8", "fp8-fast"):
        cuflash.warmup(*map(gpu.array, draw(dims=(64, dim_v))), precision=precision)
    assert len([problem for problem in gpu.compiled if problem.task == "forward"]) == kernels
    fake_gpu.remove(gpu)


def test_explain_names_the_variant_for_few_queries(gpu: FakeGpu) -> None:
    arrays = [gpu.array(x) for x in draw(dims=(64, 64))]
    for precision, causal in product(("fp8", "fp8-fast"), (False, True)):
        explained = cuflash.explain(*arrays, causal=causal, precision=precision)
        assert any("few queries" in note for note in explained.notes) is (causal and precision == "fp8-fast")


# --- refusals


def test_gpus_without_kernels_are_refused_before_anything_is_done(gpu: FakeGpu) -> None:
    arrays = [gpu.array(x) for x in draw()]
    quantized = cuflash.quantize_qkv(*arrays)
    gpu.launches.clear()
    gpu.capability = (7, 5)
    jit.forget_plans()
    message = r"compute capability 7\.5; cuflash's kernels need 8\.0"
    for operands, options in ((quantized, {}), (arrays, {"precision": "fp8"})):
        for call in (cuflash.attention, cuflash.warmup):
            with pytest.raises(cuflash.UnsupportedError, match=message):
                call(*operands, **options)
        assert "need 8.0" in (cuflash.explain(*operands, **options).refused or "")
    assert not gpu.launches


def test_refused(gpu: FakeGpu) -> None:
    q, k, v = (gpu.array(x) for x in draw())
    q8, k8, v8 = cuflash.quantize_qkv(q, k, v)
    rows = dataclasses.replace(v8, storage="rows")
    short_mean = dataclasses.replace(k8, mean=k8.mean[:, :1])
    odd = dataclasses.replace(q8, scales=gpu.at(q8.scales.data.ptr + 4, q8.scales.shape, np.float32))
    part = gpu.at(v8.payload.data.ptr + 64, (2, 130, 4, 48))
    gpu.launches.clear()
    for operands, options, error, match in (
        ((q8, k8, rows), {}, cuflash.UnsupportedError, r"v is stored as 'rows'; .* v.to_image\(\) makes it"),
        ((q8, short_mean, v8), {}, ValueError, r"k has a mean of shape \(2, 1, 64\)"),
        ((dataclasses.replace(q8, mean=gpu.array(np.zeros((2, 4, 64), np.float32))), k8, v8), {}, ValueError,
         "q has a mean; accepted is None"),
        ((odd, k8, v8), {}, ValueError, "q has arrays at .* must be multiples of 16"),
        ((q8, k8, v8), {"out_dtype": "float32"}, ValueError, "accepted are 'float16', 'bfloat16'"),
        ((q8, k8, v8), {"out": part}, ValueError, "out shares memory with"),
        ((q8, k8, v8), {"out": gpu.array(np.zeros((2, 130, 4, 48), ml_dtypes.bfloat16))}, TypeError,
         "out has dtype bfloat16"),
        ((q8, k8, cuflash.quantize(gpu.array(draw()[2], device=1), role="v")), {}, ValueError, "v has 1"),
        ((q, k, v), {"precision": "fp8", "out_dtype": "float32"}, ValueError, "accepted are 'float16', 'bfloat16'"),
        (tuple(gpu.array(x.astype(np.float32)) for x in draw()), {"precision": "fp8"}, cuflash.UnsupportedError,
         "float32; the GPU kernels take float16 and bfloat16"),
    ):  # fmt: skip
        for _ in range(2):  # what is refused once is refused again
            with pytest.raises(error, match=match):
                cuflash.attention(*operands, **options)  # type: ignore[arg-type]
    assert "forward" not in tasks(gpu)


def test_what_is_followed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    q, k, v = (torch.ones(1, 5, 2, 16, dtype=torch.bfloat16, requires_grad=name == "k") for name in "qkv")
    for call in (cuflash.attention, cuflash.warmup):
        with pytest.raises(cuflash.UnsupportedError, match=r"^k requires grad, .*'fp8' has no gradients: .* k.detach"):
            call(q, k, v, precision="fp8")
    assert "k requires grad, " in (cuflash.explain(q, k, v, precision="fp8").refused or "")
    with torch.no_grad():
        assert cuflash.attention(q, k, v, precision="fp8").shape == q.shape
    k = k.detach()
    attend = partial(cuflash.attention, precision="fp8")
    for follow, found in (
        (lambda call: torch.compile(call, backend="eager"), "torch.compile follows the call, .* outside of what is"),
        (torch.func.vmap, "a transformation of torch.func follows the call, .* outside of it"),
        (torch.fx.experimental.proxy_tensor.make_fx, "a dispatch mode, .* outside of it"),
    ):
        with pytest.raises(cuflash.UnsupportedError, match=found):
            follow(lambda q, k, v: attend(q, k, v) * 2)(q, k, v)
    disabled = torch.compile(lambda q, k, v: torch.compiler.disable(attend)(q, k, v) * 2, backend="eager")
    assert (disabled(q, k, v) == 2 * attend(q, k, v)).all()


def test_jax_tracers_are_refused() -> None:
    jax = pytest.importorskip("jax")
    x = jax.numpy.ones((1, 5, 2, 16), jax.numpy.bfloat16)
    with pytest.raises(cuflash.UnsupportedError, match="precision='fp8' is not for JAX tracers"):
        jax.jit(lambda x: cuflash.attention(x, x, x, precision="fp8"))(x)
    assert cuflash.attention(x, x, x, precision="fp8").shape == x.shape


@pytest.mark.parametrize("dim", [48, 41])
def test_torch_tensors(monkeypatch: pytest.MonkeyPatch, dim: int) -> None:
    torch = pytest.importorskip("torch")
    gpu = fake_gpu.install_for_torch(monkeypatch)
    arrays = draw(dims=(64, dim))
    try:
        tensors = [torch.from_numpy(x) for x in arrays]
        out, lse = cuflash.attention(*tensors, causal=True, return_lse=True, precision="fp8")
        given = torch.zeros_like(out)
        assert cuflash.attention(*tensors, causal=True, precision="fp8", out=given) is given and given._version > 0
    finally:
        fake_gpu.remove(gpu)
        monkeypatch.undo()
    expected, expected_lse = cuflash.attention(*arrays, causal=True, return_lse=True, precision="fp8")
    for mine in (out, given):
        np.testing.assert_allclose(mine.numpy(), expected, atol=1e-3, rtol=2e-3)
    np.testing.assert_allclose(lse.numpy(), expected_lse, atol=1e-5, rtol=1e-5)
    assert "cupy" not in sys.modules or gpu.cupy is None


# --- explain


def test_explain_names_what_is_launched(gpu: FakeGpu) -> None:
    for options in ({}, {"causal": True, "return_lse": True}, {"out_dtype": "bfloat16"}):
        arrays = [gpu.array(x) for x in draw()]
        gpu.launches.clear()
        cuflash.attention(*arrays, precision="fp8", **options)  # type: ignore[arg-type]
        explained = cuflash.explain(*arrays, precision="fp8", **options)  # type: ignore[arg-type]
        launched = [(launch.loaded.problem, (launch.grid,)) for launch in gpu.launches]
        assert [(kernel.problem, kernel.grid) for kernel in explained.kernels] == launched
        assert explained.kernel is explained.kernels[-1] and explained.kernel.cached == "memory"
        assert explained.hbm_bytes == sum(kernel.hbm_bytes for kernel in explained.kernels)
        quantized = cuflash.explain(*cuflash.quantize_qkv(*arrays), **options)  # type: ignore[arg-type]
        assert quantized.kernels == explained.kernels[2:]
        assert "quantized on the way" in str(explained) and "quantized on the way" not in str(quantized)


def test_explain_without_a_gpu() -> None:
    arrays = draw((2000, 3000), (256, 250), (2, 1), "bfloat16")
    planned = cuflash.explain(*arrays, precision="fp8", arch="sm_90")
    assert [kernel.family for kernel in planned.kernels] == ["quantize_means", "quantize", "forward_fp8_sm90"]
    means, quantize, attend = planned.kernels
    assert means.hbm_bytes == 2 * 250 * (256 + 250) * 2  # every 12th of 3000 tokens
    tokens = 2 * (2 * 2000 + 3000) * (2 * 256 + 256) + 2 * 3000 * (2 * 250 + 256)
    assert quantize.hbm_bytes == tokens + 4 * (4 * 16 + 2 * 2 * 24)
    own = 4 * 2000 * (256 + 2 * 256)
    assert attend.hbm_bytes >= own + 2 * 3000 * 512
    assert planned.device is not None and planned.device.peak_flops == 2 * 132 * 1.98e9 * 4096
    assert any("truncate" in note for note in planned.notes) and any("padded" in note for note in planned.notes)
    small = cuflash.explain(*draw(), precision="fp8", arch="sm_90")
    assert not any("truncate" in note for note in small.notes)
    on_cpu = cuflash.explain(*arrays, precision="fp8")
    assert on_cpu.backend == "numpy" and not on_cpu.kernels
    nothing = cuflash.explain(*draw((0, 0)), precision="fp8", arch="sm_90")
    assert nothing.refused is None


@pytest.mark.parametrize(
    ("arch", "family", "note", "rate"),
    [
        ("sm_80", "forward_fp8_sm80", "tiles become fp16 on chip", 1),
        ("sm_86", "forward_fp8_sm80", "tiles become fp16 on chip", 1),
        ("sm_89", "forward_fp8_sm80", "rounded to such codes", 2),
        ("sm_90", "forward_fp8_sm90", "rounded to such codes", 2),
        ("sm_90a", "forward_fp8_sm90", "rounded to such codes", 2),
        ("sm_100", "forward_fp8_sm80", "tiles become fp16 on chip", 2),
        ("sm_120", "forward_fp8_sm80", "rounded to such codes", 2),
    ],
)
def test_explain_names_the_kernel_of_every_target(arch: str, family: str, note: str, rate: int) -> None:
    planned = cuflash.explain(*draw(dtype="bfloat16"), precision="fp8", arch=arch)
    assert planned.kernel is not None and planned.kernel.family == family
    assert any(note in each for each in planned.notes) and planned.kernel.config.reason
    assert not any("truncate" in each for each in planned.notes)
    assert planned.device is not None and planned.device.float8 is (rate == 2)


def test_explain_names_operands_and_result() -> None:
    for operands, options, dtypes, result in (
        (draw(), {"precision": "fp8"}, "float16 quantized to e4m3", "float16, precision fp8"),
        (draw(), {"precision": "fp8-fast", "out_dtype": "bfloat16"}, "float16 quantized to e4m3",
         "bfloat16, precision fp8-fast"),
        (cuflash.quantize_qkv(*draw()), {}, "e4m3", "float16, precision fp8"),
        (cuflash.quantize_qkv(*draw(), dtype="float8_e5m2"), {}, "e5m2", "float16, precision fp8"),
    ):  # fmt: skip
        explained = cuflash.explain(*operands, **options, arch="sm_90")  # type: ignore[arg-type]
        assert f", {dtypes}, full, " in explained.call and explained.call.endswith(f", result {result}")
        assert any("RMSE near 1.4e-3" in note for note in explained.notes) is (dtypes != "e5m2")


@pytest.mark.parametrize("dim_v", [128, 144])
@pytest.mark.parametrize("arch", [None, "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120"])
def test_explain_says_where_the_fast_precision_makes_no_difference(arch: str | None, dim_v: int) -> None:
    arrays = draw(dims=(64, dim_v))
    usual, fast = (cuflash.explain(*arrays, precision=each, arch=arch) for each in ("fp8", "fp8-fast"))
    same = [(kernel.symbol, kernel.problem) for kernel in usual.kernels] == [
        (kernel.symbol, kernel.problem) for kernel in fast.kernels
    ]
    assert any("makes no difference here" in note for note in fast.notes) is same
    assert "makes no difference" not in str(usual)


def test_explain_says_what_ptxas_does() -> None:
    """Of a kernel on codes for a target that has no such instruction, which no table has."""
    codes = fp8_sm80.forward_config
    with (
        kernels.use_family("forward_fp8_sm80"),
        mock.patch.object(fp8_sm80, "forward_config", lambda p: codes(dataclasses.replace(p, arch="sm_89"))),
    ):
        planned = cuflash.explain(*draw(dtype="bfloat16"), precision="fp8", arch="sm_90")
    assert any("no instruction of sm_90: ptxas converts" in note for note in planned.notes)


@pytest.mark.parametrize(
    ("options", "rule", "match"),
    [
        ({"backward": True}, "UnsupportedError", "no gradients: accepted is False, or a call without precision"),
        ({"precision": "fp4"}, "ValueError", "accepted are None, 'fp8', 'fp8-fast'"),
        ({"precision": None, "out_dtype": "float16"}, "TypeError", "out_dtype is for quantized operands"),
        ({"causal": "left"}, "ValueError", "causal is 'left'"),
        ({"out_dtype": "float32", "arch": "sm_90"}, "ValueError", "out_dtype is 'float32'"),
    ],
)
def test_explain_names_the_rule(options: dict[str, Any], rule: str, match: str) -> None:
    explained = cuflash.explain(*draw(), **{"precision": "fp8", **options})
    assert explained.rule == rule and match in (explained.refused or "")


def test_explain_refuses_quantized_tensors_as_a_gpu_would() -> None:
    q8, k8, v8 = cuflash.quantize_qkv(*draw())
    moved = np.empty(q8.payload.size + 1, np.uint8)[1:].reshape(q8.payload.shape)
    assert cuflash.explain(dataclasses.replace(q8, payload=moved), k8, v8, arch="sm_90").refused is None
    for operands, match in (
        ((q8, k8, v8.to_rows()), "v is stored as 'rows'"),
        ((q8, dataclasses.replace(k8, mean=k8.mean[:, :1]), v8), "k has a mean of shape (2, 1, 64)"),
    ):
        assert match in (cuflash.explain(*operands, arch="sm_90").refused or "")
        assert cuflash.explain(*operands).backend == "numpy"


def test_explain_counts_a_result_that_is_copied(gpu: FakeGpu) -> None:
    arrays = [gpu.array(x) for x in draw()]
    around = np.zeros((2, 130, 4, 96), np.float16)
    plain = cuflash.explain(*arrays, precision="fp8")
    for out, copied in ((around[..., :48], False), (around[..., ::2], True), (around[..., 1:49], True)):
        explained = cuflash.explain(*arrays, precision="fp8", out=gpu.array(out))
        assert explained.workspace_bytes - plain.workspace_bytes == (2 * 2 * 130 * 4 * 48 if copied else 0)
        assert any("out is copied" in note for note in explained.notes) is copied


def test_explain_of_dtypes() -> None:
    arrays = draw(dtype="float32")
    assert cuflash.explain(*arrays, precision="fp8").backend == "numpy"
    assert "cast them" in (cuflash.explain(*arrays, precision="fp8", arch="sm_90").refused or "")
