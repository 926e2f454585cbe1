"""Attention of 8-bit arrays with the caller's scales: on the CPU, and on a GPU up to the launch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import product
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cuflash
from cuflash import driver, float8_attention, jit, prepare_plan
from cuflash.fp8 import FORMATS
from tests.fp8 import decoded
from tests.operands import draw_codes, draw_scales, scale_options, shapes_of
from tests.oracle import oracle
from tests.unit import fake_gpu
from tests.unit.fake_gpu import FakeGpu
from tests.unit.fp8_calls import SHAPES

CAUSAL = (False, "bottom_right", "top_left")
E4M3, E5M2 = FORMATS
AXES = ("number", 0, 2, 3, None)
"""Kinds of scales: how many axes an array has."""


def draw(
    lengths: tuple[int, int] = (130, 300),
    dims: tuple[int, int] = (64, 48),
    heads: tuple[int, int] = (4, 2),
    forms: tuple[str, str, str] = (E4M3, E4M3, E4M3),
    layout: str = "bshd",
    batch: int = 2,
    seed: int = 0,
) -> list[np.ndarray]:
    """Off their centre."""
    return draw_codes(np.random.default_rng(seed), shapes_of(lengths, heads, dims, batch, layout), forms, center=0.3)


def scales_of(arrays: list[np.ndarray], axes: tuple[Any, Any, Any], layout: str = "bshd", seed: int = 1) -> list[Any]:
    sizes = [tuple(x.shape[axis] for axis in ((0, 2, 1) if layout == "bshd" else (0, 1, 2))) for x in arrays]
    return draw_scales(np.random.default_rng(seed), sizes, axes, 0.2, 2)  # type: ignore[arg-type]


def assert_right(found: Any, arrays: list[np.ndarray], scales: list[Any], layout: str = "bshd", **options: Any) -> None:
    out, lse = found
    expected, expected_lse = oracle(*(decoded(x, s, layout) for x, s in zip(arrays, scales, strict=True)), **options)
    expected = expected.swapaxes(1, 2) if layout == "bshd" else expected
    tolerance = 5e-3 if out.dtype == ml_dtypes.bfloat16 else 7e-4
    np.testing.assert_allclose(out.astype(np.float64), expected, atol=3e-4, rtol=tolerance)
    np.testing.assert_allclose(lse, expected_lse, atol=2e-5, rtol=2e-5)


# ---- the function, on the CPU


@pytest.mark.parametrize("causal", CAUSAL)
@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("axes", [(kind,) * 3 for kind in AXES] + [(3, None, "number"), (0, 2, 3)], ids=str)
def test_scales(axes: tuple[Any, Any, Any], layout: str, causal: Any) -> None:
    arrays = draw(layout=layout)
    scales = scales_of(arrays, axes, layout)
    found = cuflash.attention(
        *arrays, causal=causal, layout=layout, return_lse=True, out_dtype="float32", **scale_options(scales)
    )
    assert_right(found, arrays, scales, layout, causal=causal)


@given(
    seed=st.integers(0, 2**32 - 1),
    lengths=st.tuples(st.integers(1, 300), st.integers(1, 300)),
    heads=st.sampled_from([(1, 1), (4, 2), (3, 1)]),
    dims=st.tuples(st.integers(1, 20), st.integers(1, 20)),
    forms=st.tuples(*[st.sampled_from([E4M3, E5M2])] * 3),
    axes=st.tuples(*[st.sampled_from(AXES)] * 3),
    causal=st.sampled_from(CAUSAL),
    step=st.sampled_from([1, -1, 2]),
)
@settings(max_examples=50)
def test_anything(
    seed: int, lengths: Any, heads: Any, dims: Any, forms: Any, axes: Any, causal: Any, step: int
) -> None:
    arrays = [x[:, ::step] for x in draw(lengths, dims, heads, forms, seed=seed)]
    scales = scales_of(arrays, axes, seed=seed)
    found = cuflash.attention(*arrays, causal=causal, return_lse=True, out_dtype="float32", **scale_options(scales))
    assert_right(found, arrays, scales, causal=causal)


def test_the_result_is_bfloat16_unless_told_otherwise() -> None:
    arrays = draw()
    exact = cuflash.attention(*arrays, out_dtype="float32")
    for options, dtype in (
        ({}, ml_dtypes.bfloat16),
        ({"out_dtype": "float16"}, np.float16),
        ({"precision": "fp8"}, ml_dtypes.bfloat16),
    ):
        out = cuflash.attention(*arrays, **options)  # type: ignore[arg-type]
        assert out.dtype == dtype and (out == exact.astype(dtype)).all()
    given_out = np.empty(exact.shape, ml_dtypes.bfloat16)
    assert cuflash.attention(*arrays, out=given_out) is given_out
    assert (given_out == exact.astype(ml_dtypes.bfloat16)).all()


def test_codes_are_what_the_quantizer_writes() -> None:
    """Its payloads, viewed as arrays, with its scales: the same operands, so the same result."""
    rng = np.random.default_rng(3)
    q8, k8, v8 = cuflash.quantize_qkv(
        *(rng.standard_normal((2, 200, 2, 40), np.float32) for _ in range(3)), center=False
    )
    expected = cuflash.attention(q8, k8, v8, causal=True, out_dtype="float32")
    codes = [x.to_rows().float8() for x in (q8, k8, v8)]
    found = cuflash.attention(
        *codes, causal=True, out_dtype="float32", **scale_options([x.scales for x in (q8, k8, v8)])
    )
    np.testing.assert_array_equal(found, expected)


def test_infinities_and_nan() -> None:
    """e5m2 has both: a NaN of V is in the rows that see it alone; an infinite score makes a row NaN, or hides a key."""
    arrays = draw((300, 300), (16, 16), (1, 1), (E5M2,) * 3, batch=1)
    clean = cuflash.attention(*arrays, causal=True, out_dtype="float32")
    arrays[2][0, 150, 0, 3] = np.nan
    out = cuflash.attention(*arrays, causal=True, out_dtype="float32")
    assert np.isnan(out[0, 150:, 0, 3]).all()
    np.testing.assert_allclose(out[:, :150], clean[:, :150], rtol=1e-4, atol=1e-6)
    arrays[1][0, 200] = -np.inf
    arrays[0][...] = np.abs(arrays[0].astype(np.float32)).astype(arrays[0].dtype) + arrays[0].dtype.type(0.5)
    lse = cuflash.attention(*arrays, return_lse=True, out_dtype="float32")[1]
    others = [np.delete(x, 200, axis=1) for x in arrays[1:]]
    np.testing.assert_allclose(lse, cuflash.attention(arrays[0], *others, return_lse=True)[1], rtol=1e-6)


# ---- on a GPU


def assert_close(gpu: FakeGpu, found: Any, expected: Any) -> None:
    """As the CPU's float32 result, rounded once."""
    out, lse = (gpu.host(x).astype(np.float64) for x in found)
    np.testing.assert_allclose(out, expected[0], atol=2e-4, rtol=5e-3 if found[0].dtype != np.float16 else 7e-4)
    np.testing.assert_allclose(lse, expected[1], atol=1e-5, rtol=1e-5)


def both(gpu: FakeGpu, arrays: list[np.ndarray], scales: list[Any], **options: Any) -> Any:
    """Runs on the GPU, and compares with the CPU."""
    expected = cuflash.attention(
        *arrays, return_lse=True, **{**options, "out_dtype": "float32"}, **scale_options(scales)
    )
    found = cuflash.attention(*map(gpu.array, arrays), return_lse=True, **options, **scale_options(scales, gpu.array))
    assert_close(gpu, found, expected)
    return found[0]


@pytest.mark.parametrize("causal", CAUSAL)
@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("axes", [(kind,) * 3 for kind in AXES] + [(3, None, "number"), (0, 2, 3)], ids=str)
def test_scales_on_the_gpu(gpu: FakeGpu, axes: tuple[Any, Any, Any], layout: str, causal: Any) -> None:
    arrays = draw(layout=layout)
    out = both(gpu, arrays, scales_of(arrays, axes, layout), causal=causal, layout=layout)
    assert out.dtype == ml_dtypes.bfloat16 and out.flags.c_contiguous
    assert [launch.loaded.problem.task for launch in gpu.launches] == ["prepare", "forward"]
    problem = gpu.launches[-1].loaded.problem
    assert (problem.arch, problem.formats, problem.dtype) == ("sm_90a", ("e4m3",) * 3, "bfloat16")
    # Q and K of such dims stay where they are, and so do their strides.
    assert gpu.launches[0].grid == (2 * 2 * 3, 1, 1) and gpu.launches[0].loaded.problem.head_dim == 48


@pytest.mark.parametrize("forms", list(product((E4M3, E5M2), repeat=3)), ids=str)
def test_formats(gpu: FakeGpu, forms: tuple[str, str, str]) -> None:
    both(gpu, draw(forms=forms), [0.5, None, 2.0], causal=True)
    assert gpu.launches[-1].loaded.problem.formats == tuple(form[7:11] for form in forms)


def test_precisions(gpu: FakeGpu) -> None:
    """The tensor cores alone sum the output if that is asked for."""
    arrays = draw()
    for precision, one_level in ((None, False), ("fp8-fast", True), ("fp8", False)):
        for _ in range(2):
            cuflash.attention(*map(gpu.array, arrays), precision=precision, q_scale=2.0)
            assert gpu.launches[-1].loaded.problem.one_level == one_level
        explained = cuflash.explain(*map(gpu.array, arrays), precision=precision)
        assert explained.kernel is not None and explained.kernel.problem == gpu.launches[-1].loaded.problem
        assert cuflash.warmup(*map(gpu.array, arrays), precision=precision)[-1] == explained.kernel.symbol
    assert cuflash.attention(*arrays, precision="fp8-fast").dtype == ml_dtypes.bfloat16


@pytest.mark.parametrize(("lengths", "dims", "heads"), SHAPES, ids=str)
@pytest.mark.parametrize("causal", CAUSAL)
def test_shapes(gpu: FakeGpu, lengths: Any, dims: Any, heads: Any, causal: Any) -> None:
    """Tile edges, odd head dims, groups, rows that see no key."""
    arrays = draw(lengths, dims, heads)
    both(gpu, arrays, scales_of(arrays, (3, 3, 3)), causal=causal, scale=0.2)
    assert ("q_payload" in parts_of(gpu)) == (dims[0] % 16 != 0)


def parts_of(gpu: FakeGpu) -> set[str]:
    """What the last call's preparing kernel has written."""
    (launch,) = [launch for launch in gpu.launches if launch.loaded.problem.task == "prepare"]
    return {name for name in ("q_payload", "k_payload", "v_payload") if launch.params[name]}


PLACES = {
    "contiguous": lambda x: x,
    "rows apart": lambda x: _inside(x, (0, 5, 0, 0), np.s_[:, 5:]),
    "heads apart": lambda x: _inside(x, (0, 0, 2, 0), np.s_[:, :, 2:]),
    "packed": lambda x: _inside(x, (0, 0, 0, 2 * x.shape[3]), np.s_[..., x.shape[3] : 2 * x.shape[3]]),
    "odd rows": lambda x: _inside(x, (0, 0, 0, 3), np.s_[..., 3:]),
    "four bytes": lambda x: _inside(x, (0, 0, 0, 4), np.s_[..., 4:]),
    "reversed": lambda x: np.ascontiguousarray(x[:, ::-1])[:, ::-1],
    "columns": lambda x: _inside(x, (0, 0, 0, x.shape[3]), np.s_[..., ::2]),
    "transposed": lambda x: np.ascontiguousarray(x.transpose(3, 1, 2, 0)).transpose(3, 1, 2, 0),
}
IN_PLACE = ("contiguous", "rows apart", "heads apart", "packed")


def _inside(x: np.ndarray, more: tuple[int, ...], where: Any) -> np.ndarray:
    around = np.full([extent + m for extent, m in zip(x.shape, more, strict=True)], 0x7F, np.uint8).view(x.dtype)
    around[where] = x
    return around[where]


@pytest.mark.parametrize("which", range(3))
@pytest.mark.parametrize("place", PLACES)
def test_strides(gpu: FakeGpu, place: str, which: int) -> None:
    """Any; Q and K are copied only where TMA cannot take them."""
    arrays = draw(dims=(64, 64))
    expected = both(gpu, arrays, [None] * 3)
    gpu.launches.clear()
    arrays[which] = PLACES[place](arrays[which])
    out = both(gpu, arrays, [None] * 3)
    np.testing.assert_array_equal(gpu.host(out), gpu.host(expected))
    copied = {f"{'qkv'[which]}_payload"} if which < 2 and place not in IN_PLACE else set()
    assert parts_of(gpu) == {"v_payload"} | copied
    for role in "qk":
        moved = gpu.launches[-1].params[f"{role}_map"].address != gpu.launches[0].params[role]
        assert moved == (f"{role}_payload" in copied)


def test_rows_that_end_inside_16_bytes_are_copied(gpu: FakeGpu) -> None:
    """Though all strides suit TMA: behind a row lies what is not its own."""
    arrays = [_inside(x, (0, 0, 0, 8), np.s_[..., :-8]) for x in draw(dims=(40, 40))]
    both(gpu, arrays, [None] * 3)
    assert parts_of(gpu) == {"q_payload", "k_payload", "v_payload"}


def test_broadcast_heads(gpu: FakeGpu) -> None:
    """A stride of 0, which TMA does not take."""
    q, k, v = draw(heads=(2, 1))
    arrays = [q, *(np.broadcast_to(x, (2, 300, 2, x.shape[3])) for x in (k, v))]
    both(gpu, arrays, [None] * 3)
    assert parts_of(gpu) == {"k_payload", "v_payload"}


def test_axes_of_one_element_have_any_stride(gpu: FakeGpu) -> None:
    q, k, v = draw((1, 1), (64, 64), (1, 1), batch=1)
    odd = np.lib.stride_tricks.as_strided(q, q.shape, (7, 5, 3, 1))
    both(gpu, [odd, k, v], [2.0, 0.5, None])
    assert parts_of(gpu) == {"v_payload"}


def test_scales_of_any_strides(gpu: FakeGpu) -> None:
    arrays = draw()
    scales = [np.asfortranarray(x) for x in scales_of(arrays, (3, 3, 2))]
    both(gpu, arrays, [scales[0], scales[1][:, ::-1], np.broadcast_to(scales[2][:1], (2, 2))])


@pytest.mark.parametrize("on_gpu", [False, True])
def test_the_lse_makes_no_difference_to_the_result(gpu: FakeGpu, on_gpu: bool) -> None:
    """Scales count once, with it and without."""
    arrays = draw()
    place, host = (gpu.array, gpu.host) if on_gpu else (lambda x: x, lambda x: x)
    scales = scale_options(scales_of(arrays, (3, "number", 0)), place)
    with_lse, _ = cuflash.attention(*map(place, arrays), return_lse=True, **scales)
    alone = cuflash.attention(*map(place, arrays), **scales)
    np.testing.assert_array_equal(host(alone), host(with_lse))


@pytest.mark.parametrize("dim", [48, 41])
def test_out(gpu: FakeGpu, dim: int) -> None:
    arrays = draw(dims=(64, dim))
    expected = cuflash.attention(*arrays, out_dtype="float16")
    around = np.full((2, 130, 4, dim + 16), 7, np.float16)
    out = gpu.array(around[..., :dim])
    assert cuflash.attention(*map(gpu.array, arrays), out_dtype="float16", out=out) is out
    np.testing.assert_allclose(around[..., :dim].astype(np.float32), expected.astype(np.float32), rtol=2e-3, atol=1e-4)
    assert (around[..., dim:] == 7).all()


def test_nothing_to_compute(gpu: FakeGpu) -> None:
    for lengths in ((0, 5), (5, 0), (0, 0)):
        arrays = draw(lengths)
        out, lse = cuflash.attention(
            *map(gpu.array, arrays), return_lse=True, **scale_options(scales_of(arrays, (3, 2, 3)), gpu.array)
        )
        assert out.shape == (2, lengths[0], 4, 48)
        assert (gpu.host(out) == 0).all() and (gpu.host(lse) == -np.inf).all()
    assert not gpu.launches


def test_what_is_no_scale_becomes_nan(gpu: FakeGpu) -> None:
    """Nobody looks at numbers on a GPU: they must not pass for others."""
    arrays = draw((300, 300), heads=(2, 2))
    for which, bad in product(range(3), (0.0, -1.0, np.inf, 2.0**120)):
        scales = scales_of(arrays, (2, 2, 2))
        scales[which][0, 1] = bad
        out = cuflash.attention(*map(gpu.array, arrays), **scale_options(scales, gpu.array))
        nan = np.isnan(gpu.host(out).astype(np.float32)).all(axis=(1, 3))
        np.testing.assert_array_equal(nan, [[False, True], [False, False]])


def test_devices_and_streams(gpu: FakeGpu) -> None:
    gpu.streams[1] = 77
    arrays = draw()
    place = lambda x: gpu.array(x, device=1)  # noqa: E731
    for _ in range(2):
        out = cuflash.attention(*map(place, arrays), **scale_options(scales_of(arrays, (3, 2, 0)), place))
        assert gpu.device == 0 and out.data.device_id == 1
    assert {(launch.stream, launch.loaded.device) for launch in gpu.launches} == {(77, 1)}


def test_equal_calls_are_hits(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of other arrays, other scales and other numbers, a plan gives what those hold."""
    calls = []
    for seed in range(3):
        arrays = draw(seed=seed)
        calls.append((arrays, scales_of(arrays, (3, "number", 0), seed=seed)))
    options: dict[str, Any] = {"causal": True, "return_lse": True}
    expected = [cuflash.attention(*a, **options, out_dtype="float32", **scale_options(s)) for a, s in calls]

    def call(index: int) -> Any:
        arrays, scales = calls[index]
        return cuflash.attention(*map(gpu.array, arrays), **options, **scale_options(scales, gpu.array))

    call(0)

    def cold(*_: Any, **__: Any) -> Any:
        raise AssertionError("the cold path")

    for module, name in (
        (float8_attention, "foresee_float8"), (prepare_plan, "make_plan"), (jit, "kernel_for"),
        (driver, "device_compute_capability"), (driver, "device_properties"), (driver, "multiprocessors"),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, cold)
    for index in (1, 2, 0):
        assert_close(gpu, call(index), expected[index])
    assert len(jit.QUANTIZING_PLANS) == 1
    monkeypatch.undo()


def test_everything_that_matters_is_in_the_key(gpu: FakeGpu) -> None:
    arrays = draw(dims=(64, 64))
    q, k, v = map(gpu.array, arrays)
    moved = np.zeros(arrays[0].size + 1, np.uint8)[1:].reshape(arrays[0].shape).view(arrays[0].dtype)
    moved[:] = arrays[0]
    tile = gpu.array(np.full((2, 2, 3), 0.5, np.float32))
    calls: list[tuple[Any, dict[str, Any]]] = [
        ((q, k, v), {}),
        ((gpu.array(moved), k, v), {}),
        ((q, k, v), {"k_scale": tile}),
        ((q, k, v), {"v_scale": tile}),
        ((q, k, v), {"v_scale": gpu.array(np.full((2, 2), 0.5, np.float32))}),
        ((q, k, v), {"v_scale": gpu.array(np.full((2, 3, 2), 0.5, np.float32).swapaxes(1, 2))}),
        ((q, k, v), {"causal": "top_left"}),
        ((q, k, v), {"scale": 0.5}),
        ((q, k, v), {"return_lse": True}),
        ((q, k, v), {"out_dtype": "float16"}),
        ((q, k, v), {"out": gpu.array(np.zeros(q.shape, ml_dtypes.bfloat16))}),
        (tuple(gpu.array(x.swapaxes(1, 2)) for x in arrays), {"layout": "bhsd"}),
        ((q, gpu.array(arrays[1].view(ml_dtypes.float8_e5m2)), v), {}),
        (tuple(gpu.array(x, device=1) for x in arrays), {}),
    ]
    for number, (operands, options) in enumerate(calls, 1):
        for _ in range(2):
            cuflash.attention(*operands, **{"causal": True, **options})
        assert len(jit.QUANTIZING_PLANS) == number
    for value in (2.0, 3, np.float32(4)):
        cuflash.attention(q, k, v, causal=True, k_scale=value)
    assert len(jit.QUANTIZING_PLANS) == len(calls)


def test_warmup_and_explain(gpu: FakeGpu) -> None:
    for dims, axes in (((64, 48), (None,) * 3), ((33, 48), (3, "number", 0))):
        arrays = draw(dims=dims)
        operands = [gpu.array(x) for x in arrays]
        options = {"causal": True, "return_lse": True, **scale_options(scales_of(arrays, axes), gpu.array)}
        gpu.launches.clear()
        ready = cuflash.warmup(*operands, **options)
        assert not gpu.launches and len(ready) == 2
        compiled = len(gpu.compiled)
        cuflash.attention(*operands, **options)
        assert len(gpu.compiled) == compiled
        explained = cuflash.explain(*operands, **options)
        launched = [(launch.loaded.problem, (launch.grid,)) for launch in gpu.launches]
        assert [(kernel.problem, kernel.grid) for kernel in explained.kernels] == launched
        assert explained.hbm_bytes == sum(kernel.hbm_bytes for kernel in explained.kernels)
        assert "v is transposed on the way" in str(explained)
        assert ("q is copied" in str(explained)) == (dims[0] == 33)
    assert cuflash.warmup(*arrays, q_scale=0.5) == ()
    for precision in (None, "fp8"):
        asked: dict[str, Any] = {"precision": precision, "backward": True}
        with pytest.raises(cuflash.UnsupportedError, match=r"no gradients: accepted is False$"):
            cuflash.warmup(*operands, **asked)
        assert (cuflash.explain(*operands, **asked).refused or "").endswith("no gradients: accepted is False")


def test_explain_counts_what_is_moved() -> None:
    arrays = draw((2000, 3000), (256, 250), (2, 1))
    prepare, attend = cuflash.explain(*arrays, arch="sm_90").kernels
    assert (prepare.family, attend.family) == ("prepare", "forward_fp8_sm90")
    assert prepare.hbm_bytes == 2 * 3000 * 250 + 2 * 24 * 128 * 256 + 4 * (2 * 2 * 16 + 2 * 2 * 24)
    scales = np.ones((2, 1, 24), np.float32)
    odd = draw((2000, 3000), (255, 250), (2, 1))
    more, _ = cuflash.explain(*odd, arch="sm_90", v_scale=scales).kernels
    assert more.hbm_bytes == prepare.hbm_bytes + (2 * 2 * 2000 + 2 * 3000) * (255 + 256) + 4 * scales.size
    explained = cuflash.explain(*arrays, arch="sm_90")
    assert explained.workspace_bytes == 2 * 24 * 128 * 256 + 4 * (2 * 2 * 16 + 2 * 2 * 24) + 2 * 2 * 2 * 2000 * 256
    assert any("truncate" in note for note in explained.notes) and any(
        "not centred" in note for note in explained.notes
    )
    assert cuflash.explain(*arrays).backend == "numpy"


def test_explain_says_what_the_operands_are() -> None:
    arrays = draw(forms=(E4M3, E5M2, E4M3))
    for options, call, missing in (
        ({}, "result bfloat16, precision fp8", "not given, so 1: q_scale, k_scale, v_scale"),
        ({"q_scale": 1.0, "out_dtype": "float16"}, "result float16, precision fp8", "so 1: k_scale, v_scale"),
        ({"precision": "fp8-fast", **scale_options([1.0] * 3)}, "result bfloat16, precision fp8-fast", None),
    ):
        for arch in (None, "sm_90"):
            explained = cuflash.explain(*arrays, **options, arch=arch)  # type: ignore[arg-type]
            assert ", q e4m3, k e5m2, v e4m3, full, " in explained.call and explained.call.endswith(call)
            assert ("not given" in str(explained)) == (missing is not None)
            assert missing is None or any(note.endswith(missing) for note in explained.notes)
    assert ", e5m2, full, " in cuflash.explain(*draw(forms=(E5M2,) * 3)).call
    assert "RMSE" not in str(cuflash.explain(*draw(), arch="sm_90"))


# ---- refusals


def test_refused() -> None:
    q, k, v = draw()
    halves = [x.astype(np.float16) for x in (q, k, v)]
    q8, k8, v8 = cuflash.quantize_qkv(*halves)
    tile, wide = np.ones((2, 4, 2), np.float32), np.ones((2, 4, 3), np.float32)
    number = r"accepted are positive numbers from 2\^-126 to 2\^119"
    unknown = q.astype(ml_dtypes.float8_e4m3fnuz)
    cases: tuple[tuple[Any, dict[str, Any], Any, str], ...] = (
        ((q, k, halves[2]), {}, TypeError, "v has dtype float16; accepted are q, k and v of float8_e4m3fn and"),
        ((halves[0], k, v), {}, cuflash.UnsupportedError, "k has dtype float8_e4m3fn; 8-bit floats are for cu"),
        ((unknown, k, v), {}, cuflash.UnsupportedError, "q has dtype float8_e4m3fnuz; of 8-bit floats cuflash takes"),
        (halves, {"k_scale": 1.0}, TypeError, "k_scale is for operands of float8_e4m3fn and .*, and q has dtype flo"),
        (halves, {"v_scale": wide, "precision": "fp8"}, TypeError, "v_scale is for operands of float8_e4m3fn"),
        ((q8, k8, v8), {"q_scale": 1.0}, TypeError, "q_scale is given and q is a QuantizedTensor, which has scales"),
        ((q, k8, v), {}, TypeError, "k is a"),
        ((q, k, v), {"q_scale": wide}, ValueError, r"q_scale has shape \(2, 4, 3\); .* \(2, 4, 2\), .* tokens\)$"),
        ((q, k, v), {"q_scale": tile[0, 0, :1]}, ValueError, r"q_scale has shape \(1,\); .*: reshape it to \(\)$"),
        (
            (q, k, v),
            {"k_scale": tile},
            ValueError,
            r"k_scale has shape .* accepted are .* \(\), \(2, 2\), .*\(2, 2, 3\)",
        ),
        *(
            ((q, k, v), {"q_scale": x}, TypeError, f"q_scale has dtype {x.dtype}; .*: cast it to float32")
            for x in (tile.astype(np.float16), np.ones(()), wide.astype(int), tile.astype(ml_dtypes.bfloat16))
        ),
        ((q, k, v), {"q_scale": "1"}, TypeError, "q_scale is a str"),
        ((q, k, v), {"q_scale": [1.0]}, TypeError, "q_scale is a list"),
        ((q, k, v), {"q_scale": 0.0}, ValueError, f"q_scale is 0.0; {number}"),
        ((q, k, v), {"k_scale": -1}, ValueError, f"k_scale is -1.0; {number}"),
        ((q, k, v), {"k_scale": 10**400}, ValueError, f"k_scale is inf; {number}"),
        ((q, k, v), {"v_scale": 2.0**120}, ValueError, f"v_scale is 1.3.*e\\+36; {number}"),
        ((q, k, v), {"v_scale": np.nan}, ValueError, f"v_scale is nan; {number}"),
        ((q, k, v), {"v_scale": 1e39}, ValueError, f"v_scale is 1e\\+39; {number}"),
        ((q, k, v), {"q_scale": 0 * tile}, ValueError, f"q_scale is 0.0; {number}"),
        ((q, k[:, :5], v), {}, ValueError, "k and v differ"),
        ((q, k, v), {"layout": "sbhd"}, ValueError, "layout is 'sbhd'"),
        ((q, k, v), {"causal": "left"}, ValueError, "causal is 'left'"),
        ((q, k, v), {"precision": "fp16"}, ValueError, "precision is 'fp16'"),
        ((q, k, v), {"out_dtype": "float8_e4m3fn"}, ValueError, "out_dtype is 'float8_e4m3fn'; accepted are"),
        (
            (q, k, v),
            {"out": np.empty((2, 130, 4, 48), np.float16)},
            TypeError,
            "out has dtype float16 and the result bf",
        ),
        ((q, k, v), {"out": q.view(np.uint8)[..., :48].view(q.dtype)}, TypeError, "out has dtype float8_e4m3fn"),
    )
    for operands, options, error, match in cases:
        with pytest.raises(error, match=match):
            cuflash.attention(*operands, **options)
        assert cuflash.explain(*operands, **options).rule == error.__name__


def test_out_that_shares_memory_is_refused(gpu: FakeGpu) -> None:
    memory = np.zeros(2 * 130 * 4 * 64 * 2, np.uint8)
    q = memory[: memory.size // 2].view(ml_dtypes.float8_e4m3fn).reshape(2, 130, 4, 64)
    _, k, v = draw(dims=(64, 64))
    for place in (lambda x: x, gpu.array):
        out = place(memory.view(ml_dtypes.bfloat16).reshape(q.shape))
        for _ in range(2):
            with pytest.raises(ValueError, match="out shares memory with q"):
                cuflash.attention(place(q), place(k), place(v), out=out)
    assert not gpu.launches


def test_refused_on_a_gpu(gpu: FakeGpu) -> None:
    q, k, v = map(gpu.array, draw())
    host = np.ones((2, 4), np.float32)
    cases: tuple[tuple[Any, dict[str, Any], Any, str], ...] = (
        ((q, k, v), {"q_scale": host}, TypeError, "q is a CuPy array and q_scale a NumPy array"),
        ((q, k, v), {"q_scale": gpu.array(host, device=1)}, ValueError, "q is on cuda:0 and q_scale on cuda:1"),
        ((q, k, gpu.array(draw()[2], device=1)), {}, ValueError, "q is on cuda:0 and v on cuda:1"),
        ((q, k, v), {"out_dtype": "float32"}, ValueError, "accepted are 'float16', 'bfloat16'"),
        ((q, k, v), {"q_scale": -2.0}, ValueError, "q_scale is -2.0"),
    )
    for operands, options, error, match in cases:
        for _ in range(2):  # what is refused once is refused again
            with pytest.raises(error, match=match):
                cuflash.attention(*operands, **options)
    assert not gpu.launches
    cuflash.attention(q, k, v, q_scale=2.0)
    with pytest.raises(ValueError, match=r"q_scale is -2\.0"):  # also where there is a plan
        cuflash.attention(q, k, v, q_scale=-2.0)


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (10, 0), (12, 0)])
def test_other_gpus(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> None:
    """The same operands, prepared by the same kernel, in any combination of formats."""
    gpu = fake_gpu.install(monkeypatch, capability=capability)
    for dims, forms in product(((64, 48), (33, 70)), product((E4M3, E5M2), repeat=3)):
        arrays = draw(dims=dims, forms=forms)
        both(gpu, arrays, scales_of(arrays, (3, 2, "number")), causal=True)
        assert [launch.loaded.config.family for launch in gpu.launches[-2:]] == ["prepare", "forward_fp8_sm80"]
        problem = gpu.launches[-1].loaded.problem
        assert problem.formats == tuple(form[7:11] for form in forms)
        explained = cuflash.explain(*map(gpu.array, arrays), causal=True)
        foreseen = cuflash.explain(*arrays, causal=True, arch=problem.arch)
        assert {each.kernels[-1].problem for each in (explained, foreseen)} == {problem}
    fake_gpu.remove(gpu)


def test_what_is_too_long_is_refused_by_all(gpu: FakeGpu) -> None:
    gpu.execute = False
    operands = [gpu.at(0x1000, (1, n, 1, 16), ml_dtypes.float8_e4m3fn) for n in (2**31 - 1024, 300, 300)]
    for call in (cuflash.attention, cuflash.warmup):
        with pytest.raises(cuflash.UnsupportedError, match="q has sequence length"):
            call(*operands)
    assert "q has sequence length" in (cuflash.explain(*operands).refused or "")
    assert not gpu.compiled


def test_rows_that_are_very_far_apart_are_copied(gpu: FakeGpu) -> None:
    """Kernels without TMA have 32 bits for offsets in a tile."""
    gpu.execute = False
    q, k, v = (gpu.at(0x1000, (1, 300, 1, 64), ml_dtypes.float8_e4m3fn, (0, step, 64, 1)) for step in (1 << 23, 64, 64))
    cuflash.attention(q, k, v)
    assert parts_of(gpu) == {"q_payload", "v_payload"}


# ---- frameworks


def as_torch(x: np.ndarray) -> Any:
    torch = pytest.importorskip("torch")
    if x.dtype.name.startswith("float8"):
        return torch.from_numpy(x.view(np.uint8)).view(getattr(torch, x.dtype.name))
    return torch.from_numpy(x)


@pytest.mark.parametrize("dims", [(64, 48), (33, 41)], ids=str)
@pytest.mark.parametrize("on_gpu", [False, True])
def test_torch_tensors(monkeypatch: pytest.MonkeyPatch, dims: tuple[int, int], on_gpu: bool) -> None:
    torch = pytest.importorskip("torch")
    arrays = draw(dims=dims, forms=(E4M3, E5M2, E4M3))
    scales = scales_of(arrays, (3, "number", 0))
    expected = cuflash.attention(*arrays, causal=True, return_lse=True, out_dtype="float32", **scale_options(scales))
    gpu = fake_gpu.install_for_torch(monkeypatch) if on_gpu else None
    try:
        for _ in range(2):
            out, lse = cuflash.attention(
                *map(as_torch, arrays), causal=True, return_lse=True, **scale_options(scales, as_torch)
            )
        target = torch.zeros_like(out)
        assert (
            cuflash.attention(*map(as_torch, arrays), causal=True, out=target, **scale_options(scales, as_torch))
            is target
        )
    finally:
        if gpu is not None:
            fake_gpu.remove(gpu)
            assert len(gpu.launches) == 6
        monkeypatch.undo()
    assert out.dtype is torch.bfloat16 and target._version > 0
    for mine in (out, target):
        np.testing.assert_allclose(mine.float().numpy(), expected[0], rtol=5e-3, atol=2e-4)
    np.testing.assert_allclose(lse.numpy(), expected[1], rtol=1e-5, atol=1e-5)


def test_torch_tensors_as_numpy_arrays() -> None:
    pytest.importorskip("torch")
    from cuflash.arrays import torch_arrays

    for x in draw(forms=(E4M3, E5M2, E4M3)):
        found = torch_arrays.numpy(as_torch(x))
        assert found.dtype == x.dtype and np.shares_memory(found, x)


def test_torch_is_not_followed() -> None:
    torch = pytest.importorskip("torch")
    q, k, v = map(as_torch, draw())
    scale = torch.ones(2, 4, requires_grad=True)
    with pytest.raises(cuflash.UnsupportedError, match="q_scale requires grad"):
        cuflash.attention(q, k, v, q_scale=scale)
    with pytest.raises(cuflash.UnsupportedError, match=r"torch.compile follows the call, .* outside of what is comp"):
        torch.compile(lambda q: cuflash.attention(q, k, v), backend="eager")(q)
    v.requires_grad_()
    message = "v requires grad, and attention of 8-bit floats has no gradients: call it under torch.no_grad()"
    with pytest.raises(cuflash.UnsupportedError, match=re.escape(message)):
        cuflash.attention(q, k, v)
    assert (cuflash.explain(q, k, v).refused or "").startswith(message)
    with torch.no_grad():
        assert cuflash.attention(q, k, v, q_scale=scale).shape == (2, 130, 4, 48)


@pytest.mark.parametrize("axes", [(None,) * 3, (3, "number", 0)], ids=str)
def test_jax_arrays(axes: tuple[Any, Any, Any]) -> None:
    jax = pytest.importorskip("jax")
    arrays = draw(forms=(E4M3, E5M2, E4M3))
    scales = scales_of(arrays, axes)
    expected = cuflash.attention(*arrays, causal=True, **scale_options(scales))
    out = cuflash.attention(*map(jax.numpy.asarray, arrays), causal=True, **scale_options(scales, jax.numpy.asarray))
    assert isinstance(out, jax.Array) and (np.asarray(out) == expected).all()
    explained = cuflash.explain(
        *map(jax.numpy.asarray, arrays), **scale_options(scales, jax.numpy.asarray), arch="sm_90"
    )
    assert [kernel.family for kernel in explained.kernels] == ["prepare", "forward_fp8_sm90"]


def test_jax_does_not_trace() -> None:
    jax = pytest.importorskip("jax")
    from cuflash.jax import attention

    q, k, v = map(jax.numpy.asarray, draw())
    message = "attention of 8-bit floats is not for JAX tracers: make the call outside of jax.jit"
    for call in (
        lambda x: cuflash.attention(x, x, x),
        lambda x: cuflash.attention(x, x, x, q_scale=2.0),
        lambda x: cuflash.attention(q, k, v, v_scale=x[0, 0, 0, 0].astype(np.float32)),
    ):
        with pytest.raises(cuflash.UnsupportedError, match=message):
            jax.jit(call)(q)
    with pytest.raises(cuflash.UnsupportedError, match=r"q has dtype .*; 8-bit floats are for cuflash.attention alone"):
        attention(q, k, v)


def test_the_differentiable_attention_of_torch_names_the_other() -> None:
    pytest.importorskip("torch")
    from cuflash.torch import attention

    with pytest.raises(cuflash.UnsupportedError, match=r"q has dtype .*; 8-bit floats are for cuflash.attention alone"):
        attention(*map(as_torch, draw()))


class Producer:
    """Nothing but DLPack."""

    def __init__(self, x: Any) -> None:
        self.x = x

    def __dlpack__(self, **options: Any) -> Any:
        return self.x.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self.x.__dlpack_device__()


def test_other_producers() -> None:
    pytest.importorskip("torch")
    arrays = draw(forms=(E4M3, E5M2, E4M3))
    scales = scales_of(arrays, (3, "number", 0))
    expected = cuflash.attention(*arrays, causal=True, **scale_options(scales))
    wrap = lambda x: Producer(as_torch(x))  # noqa: E731
    with pytest.raises(TypeError, match="q has dtype float16; accepted are q, k and v of float8_e4m3fn"):
        cuflash.attention(*(wrap(x.astype(np.float16)) for x in arrays), q_scale=0.5)
    out = cuflash.attention(*map(wrap, arrays), causal=True, **scale_options(scales, wrap))
    assert type(out) is np.ndarray and (out == expected).all()
    plain = cuflash.attention(*map(wrap, arrays), causal=True)
    assert (plain == cuflash.attention(*arrays, causal=True)).all()


def options_of(function: Any) -> Mapping[str, Any]:
    import inspect

    return {name: p.default for name, p in inspect.signature(function).parameters.items() if name.endswith("_scale")}


def test_the_calls_have_the_same_options() -> None:
    for function in (cuflash.attention, cuflash.explain, cuflash.warmup):
        assert options_of(function) == dict.fromkeys(("q_scale", "k_scale", "v_scale"))
