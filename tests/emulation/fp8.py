"""Runs the Ampere-style forward kernel for 8-bit inputs on the CPU as the product runs it on a GPU."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import numpy as np

import cuflash
from cuflash import kernels
from cuflash.fp8 import Float8
from cuflash.fp8_layout import ROLES, padded
from cuflash.fp8_plan import Fp8Call, Fp8Sm80Plan
from cuflash.fp8_sm80_config import Fp8Sm80Config
from cuflash.quantized_call import Options, check_quantized
from cuflash.quantized_plan import fp8_call
from cuflash.request import Causal
from tests.emulation.launch import EARLY, Report, Timing, emulator_for
from tests.emulation.tensors import Tensor, allocate, dense_strides, place
from tests.fp8 import Real, rounding_probabilities
from tests.mutation import Mutation
from tests.oracle import judge, oracle

LSE_TOLERANCE = 2.0**-11
"""Of the sum of the magnitudes of a score's products: what truncating tensor cores may cost."""


@dataclass(frozen=True)
class Fp8Case:
    """A call. `lengths` are (Nq, Nk), `heads` (Hq, Hk), `dims` (D, Dv); `mean` is added to all of K and V.

    `forms` are the formats of Q, K and V.
    """

    lengths: tuple[int, int]
    dims: tuple[int, int] = (64, 64)
    heads: tuple[int, int] = (2, 1)
    batch: int = 1
    out_dtype: str = "bfloat16"
    causal: Causal = False
    scale: float | None = None
    arch: str = "sm_89"
    layout: str = "bshd"
    mean: float = 1.0
    options: dict[str, Any] = field(default_factory=dict)
    config: Fp8Sm80Config | None = None
    forms: tuple[Float8, Float8, Float8] = ("float8_e4m3fn",) * 3

    def values(self) -> list[np.ndarray]:
        """Normal ones, float32, in the layout."""
        rng = np.random.default_rng(self.dims[0])
        rows = zip(
            self.lengths + self.lengths[1:], self.heads + self.heads[1:], (*self.dims[:1], *self.dims), strict=True
        )
        arrays = [rng.standard_normal((self.batch, n, h, d), np.float32) for n, h, d in rows]
        arrays = [arrays[0], arrays[1] + np.float32(self.mean), arrays[2] + np.float32(self.mean)]
        return [np.ascontiguousarray(x.swapaxes(1, 2)) if self.layout == "bhsd" else x for x in arrays]

    def quantized(self, arrays: list[np.ndarray] | None = None) -> tuple[cuflash.QuantizedTensor, ...]:
        operands = zip(arrays or self.values(), ROLES, self.forms, strict=True)
        return tuple(
            cuflash.quantize(x, role=role, dtype=form, layout=self.layout, **self.options) for x, role, form in operands
        )


@dataclass(frozen=True)
class Run:
    """What a call gave: arrays in (batch, heads, seq, dim) order."""

    report: Report
    plan: Fp8Sm80Plan
    config: Fp8Sm80Config
    out: Tensor
    lse: Tensor


def _input(x: np.ndarray) -> Tensor:
    return place(x, x.dtype.name, strides=dense_strides(x.shape, range(x.ndim)))


def _planned(case: Fp8Case, quantized: tuple[cuflash.QuantizedTensor, ...]) -> Fp8Call:
    q8, k8, v8 = quantized
    options = Options(causal=case.causal, scale=case.scale, return_lse=True, out_dtype=case.out_dtype)
    call = check_quantized(q8, k8, v8, options)
    with kernels.use_family(Fp8Sm80Config.family):
        return fp8_call(call, case.arch)


def run(
    case: Fp8Case,
    quantized: tuple[cuflash.QuantizedTensor, ...],
    timing: Timing = EARLY,
    mutation: Mutation | None = None,
) -> Run:
    """One call in the emulator."""
    q8, k8, v8 = quantized
    planned = _planned(case, quantized)
    problem = planned.problem
    config = case.config or kernels.select_config(problem)
    assert isinstance(config, Fp8Sm80Config)
    plan = Fp8Sm80Plan(planned, mock.Mock(problem=problem, config=config))
    batch, seq, heads, _ = q8.sizes
    shape = (batch, seq, heads, padded(v8.head_dim))
    if case.layout == "bhsd":
        shape = (batch, heads, seq, shape[3])
    tensors = {"q": _input(q8.payload), "k": _input(k8.payload), "v": _input(v8.payload)}
    tensors |= {f"{name}_scale": _input(x.scales) for name, x in (("q", q8), ("k", k8), ("v", v8))}
    if v8.mean is not None:
        tensors["v_mean"] = _input(v8.mean)
    if k8.mean is not None:
        tensors["lse_shift"] = _input(_shift(case, q8, k8))
    tensors["out"] = allocate(shape, dense_strides(shape, range(4)), case.out_dtype, align=16, output=True)
    tensors["lse"] = allocate((batch, heads, seq), (heads * seq, seq, 1), "float32", align=4, output=True)
    names = ("q", "k", "v", "q_scale", "k_scale", "v_scale", "v_mean", "lse_shift", "out", "lse")
    pointers = [tensors[name].address if name in tensors else 0 for name in names]
    report, emulator = Report(), emulator_for(problem, config, mutation)
    for grid, tail in plan.launches:
        block = struct.pack(f"<{len(pointers)}Q", *pointers) + tail
        emulator.launch(block, grid, config.threads, config.smem_bytes(problem), tensors, report, timing=timing)
    return Run(report, plan, config, tensors["out"], tensors["lse"])


def _shift(case: Fp8Case, q8: cuflash.QuantizedTensor, k8: cuflash.QuantizedTensor) -> np.ndarray:
    """What the kernel before this one gives."""
    assert k8.mean is not None
    real = Real.of(q8, k8, k8).q
    scale = q8.head_dim**-0.5 if case.scale is None else case.scale
    means = np.repeat(k8.mean[..., : q8.head_dim].astype(np.float64), case.heads[0] // case.heads[1], axis=1)
    shift = scale * np.einsum("bhnd,bhd->bhn", real, means)
    return np.where(np.isnan(shift), 0, shift).astype(np.float32)


def assert_right(case: Fp8Case, quantized: tuple[cuflash.QuantizedTensor, ...], found: Run) -> None:
    """No fault, every element written once, output and LSE as float64 on the same codes has them."""
    assert not found.report.faults, str(found.report)
    assert found.out.unwritten() == found.lse.unwritten() == 0
    q8, _, v8 = quantized
    scale = q8.head_dim**-0.5 if case.scale is None else case.scale
    real = Real.of(*quantized)
    v = real.v + real.v_mean[:, :, None]
    expected, expected_lse = oracle(real.q, real.k, v, causal=case.causal, scale=scale)
    out = found.out.view[..., : v8.head_dim]
    out = out if case.layout == "bhsd" else out.swapaxes(1, 2)
    judge(out, expected, rounding_probabilities(real, case.causal, scale, out.dtype))
    group = case.heads[0] // case.heads[1]
    products = np.abs(real.q) @ np.repeat(np.abs(real.k), group, axis=1).swapaxes(2, 3)
    allowed = LSE_TOLERANCE * abs(scale) * products.max(axis=3, initial=0) + 1e-4
    dead = np.isneginf(expected_lse)
    assert (np.isneginf(found.lse.view) == dead).all()
    error = np.abs(np.where(dead, 0, found.lse.view) - np.where(dead, 0, expected_lse))
    assert (error <= allowed).all(), f"LSE off by {error.max()}"


def check(case: Fp8Case) -> Run:
    """Run a case with copies landing early and late, in two warp orders, and check all of it; returns the last run."""
    quantized, bits = case.quantized(), set()
    for timing in (Timing(late=False, seed=1), Timing(late=True, seed=2)):
        found = run(case, quantized, timing)
        assert_right(case, quantized, found)
        bits.add((found.out.view.tobytes(), found.lse.view.tobytes()))
    assert len(bits) == 1, "the result depends on the timing"
    return found
