"""The kernels of a call of `cuflash.attention_backward`, for `cuflash.explain`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

from . import driver, jit, kernels
from .arch import Arch
from .arrays import CPU
from .backward_config import MainConfig
from .backward_cost import BackwardSchedule, backward_bytes, backward_flops, backward_standard_bytes
from .backward_kernels import backward_grid, problems_for
from .backward_plan import ROW_TILE, BackwardPlan, plan_with
from .backward_request import BackwardRequest
from .checks import check_flag
from .cost import DeviceModel
from .explanation import (
    NOTHING,
    Explanation,
    Kernel,
    call_text,
    common_notes,
    describe_kernel,
    device_of,
    shape_of,
    target_of,
)
from .problem import AttentionProblem
from .request import Request


@dataclass(frozen=True)
class BackwardCall:
    """A call that would not be refused.

    Attributes
    ----------
    target : Arch or None
        What names the device; None on the CPU.
    plan : BackwardPlan or None
        None if nothing is launched.
    planned : bool
        For ``arch=``, not for the device that the arrays are on.
    """

    request: BackwardRequest
    target: Arch | None
    plan: BackwardPlan | None
    planned: bool

    @classmethod
    def of(cls, forward: Request, arch: str | None, deterministic: Any) -> BackwardCall:
        """The gradients of a call, planned with kernels that need not be there.

        Raises
        ------
        TypeError, UnsupportedError
        """
        request = BackwardRequest.of_call(forward, check_flag("deterministic", deterministic))
        if request.device == CPU:
            return cls(request, None, None, False)
        target = target_of(forward, arch)
        launches = forward.rows > 0 and forward.seqlen_k > 0
        plan = None
        if launches:
            device = device_of(forward, target, planned=arch is not None)
            plan = unloaded_plan(request, problems_for(request, target.name), device.multiprocessors)
        return cls(request, target, plan, arch is not None)

    def explain(self, *, compile: bool) -> Explanation:
        """The kernels, where their code is, and what the call costs; ``compile`` what is in no cache."""
        forward, shape = self.request.forward, shape_of(self.request.forward)
        base = Explanation(
            function="attention_backward",
            call=call_text(forward) + (", deterministic" if self.request.deterministic else ""),
            backend="numpy",
            flops=backward_flops(shape),
            standard_bytes=backward_standard_bytes(shape),
            notes=("NumPy backend: probabilities computed again by blocks, matrix products by NumPy's BLAS",),
        )
        if self.target is None:
            return base
        device = device_of(forward, self.target, planned=self.planned)
        base = dataclasses.replace(base, backend="cuda", device=device, notes=(NOTHING,))
        if self.plan is None:
            return base
        assert self.plan.workspace is not None
        found = self.kernels(self.plan, device, compile=compile)
        return dataclasses.replace(
            base,
            kernels=found,
            hbm_bytes=sum(kernel.hbm_bytes for kernel in found),
            workspace_bytes=self.plan.workspace.size,
            notes=tuple(common_notes(forward, found[1], device, planned=self.planned)),
        )

    def kernels(self, plan: BackwardPlan, device: DeviceModel, *, compile: bool) -> tuple[Kernel, ...]:
        """The two or three kernels, in the order of their launches."""
        schedule = self.schedule(plan, device)
        rows, main, dq = backward_bytes(shape_of(self.request.forward), schedule)
        traffic = (rows, main, dq) if len(plan.launches) == 3 else (rows, main + dq)
        ordinal = None if self.planned else self.request.device
        return tuple(
            describe_kernel(
                launch.loaded.problem,
                launch.loaded.config,
                ((launch.blocks, 1, 1),),
                schedule if launch.loaded.problem.task == "backward" else None,
                hbm_bytes,
                ordinal,
                compile=compile,
            )
            for launch, hbm_bytes in zip(plan.launches, traffic, strict=True)
        )

    def schedule(self, plan: BackwardPlan, device: DeviceModel) -> BackwardSchedule:
        """The order of the main kernel's work, for the cost model."""
        first, main, *_ = plan.launches
        config, padded_rows = cast(MainConfig, main.loaded.config), first.blocks * ROW_TILE
        assert plan.workspace is not None
        sizes = jit.sizes_of(self.request.forward)
        grid = backward_grid(main.loaded.problem, config, sizes, device.multiprocessors, self.request.deterministic)
        return BackwardSchedule(
            block_n=config.block_n,
            section=-(-grid.section // grid.shares),
            resident=device.multiprocessors * config.ctas // config.cluster,
            l2_bytes=device.l2_bytes,
            padded_rows=padded_rows,
            row_sums_bytes=plan.workspace.rows // padded_rows,
            cleared_rows=padded_rows * grid.cleared_heads // (grid.work_tiles // grid.n_tiles),
        )


def unloaded_plan(request: BackwardRequest, problems: Sequence[AttentionProblem], multiprocessors: int) -> BackwardPlan:
    """The plan of a call by kernels without code: it has grids and workspace, and can launch nothing.

    Raises
    ------
    UnsupportedError
        There are more tiles than a launch takes.
    """
    no_code: Any = None
    stand_ins = []
    for problem in problems:
        config = kernels.select_config(problem)
        kernel = driver.Kernel(0, kernels.symbol(problem, config), request.device, no_code)
        stand_ins.append(jit.LoadedKernel(kernel, problem, config, no_code, "memory"))
    return plan_with(request, multiprocessors, *stand_ins)
