"""What the mean of K adds to the LSE: the rendered text, executed on the CPU by instruction, against float64."""

from __future__ import annotations

from unittest import mock

import numpy as np
import pytest

import cuflash
from cuflash import kernels
from cuflash.dequantized import Dequantized
from cuflash.fp8_layout import padded
from cuflash.quantize_kernels import lse_problem
from cuflash.quantized_call import Options, check_quantized
from cuflash.quantized_plan import shift_launch
from tests.emulation.build import compiler
from tests.emulation.launch import Report, emulator_for
from tests.emulation.tensors import Tensor, allocate, dense_strides, place
from tests.mutation import Mutation

pytestmark = pytest.mark.skipif(compiler() is None, reason="the CPU emulation needs g++")


def run(
    lengths: tuple[int, int],
    dim: int,
    heads: tuple[int, int],
    *,
    layout: str = "bshd",
    hadamard: bool = False,
    form: str = "float8_e4m3fn",
    nan_at: int | None = None,
    mutation: Mutation | None = None,
) -> tuple[Report, np.ndarray, np.ndarray]:
    """Faults, the kernel's result, and what it must be."""
    rng = np.random.default_rng(dim)
    q, k = (rng.standard_normal((2, n, h, dim)) + rng.standard_normal(dim) for n, h in zip(lengths, heads, strict=True))
    if nan_at is not None:
        q[:, nan_at] = np.nan
    arrays = [x.astype(np.float32).swapaxes(1, 2) if layout == "bhsd" else x.astype(np.float32) for x in (q, k, k)]
    options = {"layout": layout, "hadamard": hadamard, "dtype": form}
    q8, k8, v8 = cuflash.quantize_qkv(*map(np.ascontiguousarray, arrays), **options)  # type: ignore[arg-type]
    call = check_quantized(q8, k8, v8, Options(scale=0.3, return_lse=True))
    problem = lse_problem(padded(dim), "sm_90")
    config = kernels.select_config(problem)
    launch = shift_launch(call, mock.Mock(problem=problem, config=config))
    shape = call.lse_shape
    tensors = {name: _input(x) for name, x in (("q", q8.payload), ("q_scales", q8.scales), ("k_mean", k8.mean))}
    tensors["shift"] = allocate(shape, dense_strides(shape, range(3)), "float32", align=16, output=True)
    emulator = emulator_for(problem, config, mutation)
    block = bytearray(launch.params.size)
    launch.pack_into(block, {name: x.address for name, x in tensors.items()})
    report = Report()
    emulator.launch(bytes(block), (launch.blocks, 1, 1), config.threads, 0, tensors, report)
    every = slice(None)
    real = Dequantized.of(q8)[every, every, slice(0, lengths[0])].astype(np.float64)
    means = np.repeat(k8.mean[..., :dim].astype(np.float64), heads[0] // heads[1], axis=1)
    expected = 0.3 * np.einsum("bhnd,bhd->bhn", real, means)
    return report, tensors["shift"].view, np.where(np.isnan(expected), 0, expected)


def _input(x: np.ndarray) -> Tensor:
    return place(x, x.dtype.name, strides=dense_strides(x.shape, range(x.ndim)))


@pytest.mark.parametrize("dim", [1, 16, 40, 64, 128, 192, 250])
@pytest.mark.parametrize("length", [1, 127, 128, 300])
def test_shapes(dim: int, length: int) -> None:
    layout = "bhsd" if length == 127 else "bshd"
    form = "float8_e5m2" if dim in (40, 192) else "float8_e4m3fn"
    report, found, expected = run((length, 70), dim, (4, 2), layout=layout, hadamard=dim == 64, form=form)
    assert not report.faults
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("form", ["float8_e4m3fn", "float8_e5m2"])
def test_a_row_of_nan_adds_nothing(form: str) -> None:
    report, found, expected = run((140, 70), 64, (2, 2), nan_at=130, form=form)
    assert not report.faults and (found[:, :, 130] == 0).all()
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("p.group.divide(head)", "head"),
        ("row < p.seqlen", "true"),
        ("lane < kUnits", "true"),
        ("distance < kLanes", "distance < kLanes / 2"),
        ("sum == sum ? sum : 0.f", "sum"),
        ("batch * p.q_batch_stride", "head * p.q_batch_stride"),
        ("p.e5m2 ?", "!p.e5m2 ?"),
    ],
)
def test_wrong_kernels_are_seen(old: str, new: str) -> None:
    report, found, expected = run((140, 70), 48, (4, 2), nan_at=3, mutation=Mutation("", old, new))
    assert report.faults or not np.allclose(found, expected, rtol=1e-5, atol=2e-5)
