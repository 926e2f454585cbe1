"""Runs the kernels of the quantizer on the CPU as the product runs them on a GPU, and holds them against NumPy's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from unittest import mock

import numpy as np

import cuflash
from cuflash import driver, jit, kernels
from cuflash.arch import ARCHES
from cuflash.arrays import numpy_arrays
from cuflash.fp8_layout import image_shape, padded, tiles
from cuflash.problem import AttentionProblem
from cuflash.quantize_kernels import QuantizeConfig
from cuflash.quantize_plan import QuantizePlan, Sources, make_plan
from tests.emulation.launch import EARLY, Report, Timing, emulator_for
from tests.emulation.tensors import Tensor, allocate, dense_strides, place
from tests.mutation import Mutation


@dataclass(frozen=True)
class QuantizeCase:
    """A call of the quantizer.

    `lengths` and `heads` are those of Q and of K and V, `dims` D and Dv; `roles`: the tensors that the call has;
    `pad`: elements between rows and so on, in the order of the layout. `blocks`: of a GPU that runs so many at a time.
    """

    lengths: tuple[int, int]
    dims: tuple[int, int] = (64, 64)
    heads: tuple[int, int] = (1, 1)
    batch: int = 1
    dtype: str = "bfloat16"
    layout: str = "bshd"
    form: str = "float8_e4m3fn"
    seed: int | None = None
    center: bool = True
    roles: str = "qkv"
    pad: tuple[int, int, int, int] = (0, 0, 0, 0)
    align: int = 16
    blocks: int = 3
    arch: str = "sm_90"
    config: QuantizeConfig | None = None

    def shape(self, role: str) -> tuple[int, int, int, int]:
        seq, heads = (x[role != "q"] for x in (self.lengths, self.heads))
        dim = self.dims[role == "v"]
        return (self.batch, seq, heads, dim) if self.layout == "bshd" else (self.batch, heads, seq, dim)

    def values(self, random: int = 0) -> dict[str, np.ndarray]:
        """Normal ones about means that differ by channel."""
        rng = np.random.default_rng(random)
        shapes = {role: self.shape(role) for role in self.roles}
        return {role: rng.standard_normal(s) * 2 + 3 * rng.standard_normal(s[3]) for role, s in shapes.items()}

    def tensors(self, values: Mapping[str, np.ndarray]) -> dict[str, Tensor]:
        """Inputs, and outputs full of NaN; by the names of the kernels' parameters."""
        found = {}
        for role, x in values.items():
            strides = dense_strides(x.shape, (0, 1, 2, 3), self.pad)
            found[role] = place(x, self.dtype, strides=strides, align=self.align)
            batch, seq, heads, dim = (x.shape[i] for i in ((0, 1, 2, 3) if self.layout == "bshd" else (0, 2, 1, 3)))
            payload = image_shape(batch, heads, seq, dim) if role == "v" else (*x.shape[:3], padded(dim))
            outputs = {"payload": (payload, "uint8"), "scales": ((batch, heads, tiles(seq)), "float32")}
            if self.center and role != "q":
                outputs["mean"] = ((batch, heads, padded(dim)), "float32")
            for name, (shape, dtype) in outputs.items():
                strides = dense_strides(shape, range(len(shape)))
                found[f"{role}_{name}"] = allocate(shape, strides, dtype, align=16, output=True)
        return found


def _plan(case: QuantizeCase, tensors: Mapping[str, Tensor]) -> QuantizePlan:
    """The product's own plan, of a small device that has ``case.arch`` and kernels that need no loading."""
    operands = {role: numpy_arrays.operand(role, tensors[role].view) for role in case.roles}
    sources = Sources(operands, case.layout, case.form == "float8_e5m2", case.seed, case.center)

    def load(problem: AttentionProblem, device: int) -> mock.Mock:
        chosen = case.config if case.config and problem.task == "quantize" else kernels.select_config(problem)
        return mock.Mock(problem=problem, config=chosen)

    with (
        mock.patch.object(jit, "kernel_for", side_effect=load),
        mock.patch.object(jit, "device_arch", return_value=ARCHES[case.arch]),
        mock.patch.object(driver, "multiprocessors", return_value=1),
    ):
        return make_plan(sources)


def run(
    case: QuantizeCase,
    tensors: dict[str, Tensor],
    *,
    timing: Timing = EARLY,
    mutation: Mutation | None = None,
    mutated: str = "quantize",
) -> Report:
    """One call in the emulator; ``mutation`` is for the kernel ``mutated``."""
    report = Report()
    for launch in _plan(case, tensors).launches:
        problem, config = launch.loaded.problem, launch.loaded.config
        emulator = emulator_for(problem, config, mutation if problem.task == mutated else None)
        block = bytearray(launch.params.size)
        launch.pack_into(block, {name: x.address for name, x in tensors.items()})
        blocks = min(launch.blocks, case.blocks) if problem.task == "quantize" else launch.blocks
        emulator.launch(
            bytes(block),
            (blocks, 1, 1),
            config.threads,
            config.smem_bytes(problem),
            tensors,
            report,
            timing=timing,
            early=launch.early,
        )
    return report


def assert_as_numpy(case: QuantizeCase, tensors: Mapping[str, Tensor]) -> None:
    """Every bit of every output."""
    for role in case.roles:
        x8 = cuflash.quantize(
            tensors[role].view,
            role=role,  # type: ignore[arg-type]
            dtype=case.form,  # type: ignore[arg-type]
            layout=case.layout,
            hadamard=case.seed is not None,
            seed=case.seed or 0,
            center=case.center,
        )
        expected = {"mean": x8.mean, "scales": x8.scales, "payload": x8.payload}
        for name, array in expected.items():
            if array is not None:
                output = tensors[f"{role}_{name}"]
                found = np.ascontiguousarray(output.view).view(np.uint8).reshape(-1)
                np.testing.assert_array_equal(found, array.view(np.uint8).reshape(-1), err_msg=f"{role}_{name}")
                assert output.unwritten() == 0, f"{role}_{name}"


def check(case: QuantizeCase, values: Mapping[str, np.ndarray] | None = None) -> Report:
    """Run a case with copies landing early and late, in two warp orders, and check all of it."""
    report = Report()
    for timing in (Timing(late=False, seed=1), Timing(late=True, seed=2)):
        tensors = case.tensors(case.values() if values is None else values)
        report = run(case, tensors, timing=timing)
        assert not report.faults, str(report)
        assert_as_numpy(case, tensors)
    return report
