"""The quantizer of arrays on a GPU, up to the launch: plans, parameters, results of the caller's kind."""

from __future__ import annotations

import dataclasses
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cuflash
from cuflash import jit, quantize_plan
from tests.operands import draw_qkv
from tests.oracle import strided_copy
from tests.unit.fake_gpu import FakeGpu


def draw(lengths: tuple[int, int] = (130, 300), dims: tuple[int, int] = (64, 40), dtype: str = "float16") -> list[Any]:
    drawn = draw_qkv(np.random.default_rng(0), lengths, (4, 2), dims, dtype, batch=2)
    return [x + np.ones((), np.float16).astype(dtype) for x in drawn]


def assert_same(gpu: FakeGpu, found: cuflash.QuantizedTensor, expected: cuflash.QuantizedTensor) -> None:
    for name in ("payload", "scales", "mean"):
        mine, other = getattr(found, name), getattr(expected, name)
        assert (mine is None) == (other is None)
        if mine is not None:
            assert type(mine) is gpu.cupy.ndarray
            np.testing.assert_array_equal(gpu.host(mine), other)
    for name in ("dtype", "role", "layout", "storage", "shape", "source_dtype", "seed"):
        assert getattr(found, name) == getattr(expected, name)


@pytest.mark.parametrize("options", [{}, {"hadamard": True, "seed": 9}, {"center": False}, {"dtype": "float8_e5m2"}])
@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_as_numpy(gpu: FakeGpu, options: dict[str, Any], layout: str) -> None:
    arrays = draw()
    if layout == "bhsd":
        arrays = [np.ascontiguousarray(x.swapaxes(1, 2)) for x in arrays]
    expected = cuflash.quantize_qkv(*arrays, layout=layout, **options)
    found = cuflash.quantize_qkv(*(gpu.array(x) for x in arrays), layout=layout, **options)
    for mine, other in zip(found, expected, strict=True):
        assert_same(gpu, mine, other)
    tasks = [launch.loaded.problem.task for launch in gpu.launches]
    assert tasks == (["quantize"] if options.get("center") is False else ["quantize_means", "quantize"])
    assert [launch.early for launch in gpu.launches] == [False, True][: len(tasks)]
    assert gpu.launches[-1].grid == (12, 1, 1)  # 3 multiprocessors, 4 blocks on each; there are 40 tiles
    assert "CuPy arrays" in repr(found[0]) and found[0].device == 0


def test_older_devices_do_not_overlap_launches(gpu: FakeGpu) -> None:
    gpu.capability = (8, 6)
    cuflash.quantize_qkv(*(gpu.array(x) for x in draw()))
    assert [launch.early for launch in gpu.launches] == [False, False]


@pytest.mark.parametrize("role", ["q", "k", "v"])
def test_one_tensor(gpu: FakeGpu, role: str) -> None:
    for x in draw():
        expected = cuflash.quantize(x, role=role, hadamard=True)  # type: ignore[arg-type]
        assert_same(gpu, cuflash.quantize(gpu.array(x), role=role, hadamard=True), expected)  # type: ignore[arg-type]
    assert len({launch.loaded.problem.task for launch in gpu.launches}) == (1 if role == "q" else 2)


def test_strides(gpu: FakeGpu) -> None:
    for gaps in ((1, 1, 1, 1), (1, 2, 3, 1), (1, 1, 1, 2)):
        arrays = [strided_copy(x, (1, 0, 2, 3), gaps, (False,) * 4) for x in draw()]
        expected = cuflash.quantize_qkv(*arrays)
        for mine, other in zip(cuflash.quantize_qkv(*(gpu.array(x) for x in arrays)), expected, strict=True):
            assert_same(gpu, mine, other)
    assert {launch.loaded.problem.access_bytes for launch in gpu.launches} == {16, 2}


def test_plans_are_kept(gpu: FakeGpu) -> None:
    arrays = [gpu.array(x) for x in draw()]
    for _ in range(2):
        cuflash.quantize_qkv(*arrays)
    assert len(jit.QUANTIZE_PLANS) == 1 and len(gpu.launches) == 4 and len(gpu.compiled) == 2
    cuflash.quantize_qkv(*arrays, hadamard=True)
    assert len(jit.QUANTIZE_PLANS) == 2 and len(gpu.compiled) == 2


def test_plans_are_of_an_alignment(gpu: FakeGpu) -> None:
    """Rows that begin elsewhere with the same strides: narrower accesses."""
    wide = [np.pad(x, ((0, 0),) * 3 + ((0, 8),)) for x in draw(dims=(64, 64))]
    for first in (0, 1, 4, 0):
        arrays = [gpu.array(x[..., first : first + 64]) for x in wide]
        found = cuflash.quantize_qkv(*arrays)
        for mine, other in zip(found, cuflash.quantize_qkv(*(x[..., first : first + 64] for x in wide)), strict=True):
            assert_same(gpu, mine, other)
    assert [launch.loaded.problem.access_bytes for launch in gpu.launches[1::2]] == [16, 2, 8, 16]


def test_devices_and_streams(gpu: FakeGpu) -> None:
    gpu.streams[1] = 77
    arrays = [gpu.array(x, device=1) for x in draw()]
    q8, _, _ = cuflash.quantize_qkv(*arrays)
    assert gpu.device == 0 and gpu.switches == 1 and q8.device == 1
    assert {(launch.stream, launch.loaded.device) for launch in gpu.launches} == {(77, 1)}


def test_nothing_to_do(gpu: FakeGpu) -> None:
    empty = cuflash.quantize(gpu.array(np.ones((2, 0, 3, 16), np.float16)), role="v")
    assert [launch.loaded.problem.task for launch in gpu.launches] == ["quantize_means"]
    np.testing.assert_array_equal(gpu.host(empty.mean), 0)
    assert cuflash.quantize(gpu.array(np.ones((0, 5, 3, 16), np.float16)), role="v").scales.shape == (0, 3, 1)
    assert len(gpu.launches) == 1


def test_refused(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = draw()
    with pytest.raises(cuflash.UnsupportedError, match="x has dtype float32; accepted are float16, bfloat16: cast it"):
        cuflash.quantize(gpu.array(q.astype(np.float32)), role="q")
    with pytest.raises(TypeError, match="q is a CuPy array and k a NumPy array"):
        cuflash.quantize_qkv(gpu.array(q), k, gpu.array(v))
    with pytest.raises(ValueError, match="multiples of the element size, 2"):
        cuflash.quantize(gpu.at(3, (1, 4, 1, 16)), role="q")
    monkeypatch.setattr(quantize_plan, "MAX_WORK", 39)
    with pytest.raises(cuflash.UnsupportedError, match="the call has 40 tiles"):
        cuflash.quantize_qkv(gpu.array(q), gpu.array(k), gpu.array(v))
    assert not gpu.launches


def test_what_is_done_on_the_host_says_so(gpu: FakeGpu) -> None:
    v8 = cuflash.quantize(gpu.array(draw()[2]), role="v")
    with pytest.raises(cuflash.UnsupportedError, match=r"on cuda:0; this is done on the host: take to_host\(\)"):
        v8.dequantize()


def test_conversions_are_made_where_the_tensor_is(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which need not be the current device."""
    from cuflash.arrays import cupy_arrays

    codes = gpu.array(np.zeros((2, 130, 4, 64), ml_dtypes.float8_e4m3fn), device=1)
    image = cuflash.quantize(gpu.array(draw()[2], device=1), role="v")
    rows = dataclasses.replace(image, storage="rows")

    class Allocates(Exception):
        pass

    def empty(*_: Any) -> Any:
        raise Allocates(gpu.device)

    monkeypatch.setattr(cupy_arrays, "empty", empty)
    for convert in (lambda: cuflash.QuantizedTensor.from_float8(codes, 1.0, role="v"), image.to_rows, rows.to_image):
        with pytest.raises(Allocates, match="1"):
            convert()
    assert gpu.device == 0
