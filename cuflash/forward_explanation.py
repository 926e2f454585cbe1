"""The kernel of a call of `cuflash.attention`, for `cuflash.explain`."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from . import cost, jit, kernels
from .arch import Arch
from .arrays import CPU
from .checks import check_apart
from .config import KernelConfig
from .cost import DeviceModel, Schedule
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
from .sm80_config import Sm80Config
from .sm90_config import Sm90Config


@dataclass(frozen=True)
class ForwardCall:
    """A call that would not be refused.

    Attributes
    ----------
    target : Arch or None
        What names the device; None on the CPU.
    problem : AttentionProblem or None
        None if nothing is launched.
    planned : bool
        For ``arch=``, not for the device that the arrays are on.
    """

    request: Request
    target: Arch | None
    problem: AttentionProblem | None
    planned: bool

    @classmethod
    def of(cls, request: Request, arch: str | None) -> ForwardCall:
        """Check what only a call with all of its arguments shows.

        Raises
        ------
        ValueError, UnsupportedError
        """
        if request.out is not None:
            check_apart(request)
        if request.device == CPU:
            return cls(request, None, None, False)
        target = target_of(request, arch)
        launches = request.rows > 0 and request.seqlen_k > 0
        return cls(request, target, kernels.problem_for(request, target.name) if launches else None, arch is not None)

    def explain(self, *, compile: bool) -> Explanation:
        """The kernel, where its code is, and what the call costs; ``compile`` what is in no cache."""
        request, shape = self.request, shape_of(self.request)
        if self.target is None:
            return explain_cpu(request)
        device = device_of(request, self.target, planned=self.planned)
        base = Explanation(
            call=call_text(request),
            backend="cuda",
            device=device,
            flops=shape.flops,
            standard_bytes=shape.standard_bytes,
            notes=(NOTHING,),
        )
        if self.problem is None:
            return base
        config = kernels.select_config(self.problem)
        grid, schedule = grid_and_schedule(jit.sizes_of(request), self.problem, config, device)
        hbm_bytes = cost.fused_bytes(shape, schedule, request.return_lse)
        ordinal = None if self.planned else request.device
        kernel = describe_kernel(self.problem, config, grid, schedule, hbm_bytes, ordinal, compile=compile)
        notes = notes_on(request, kernel) + common_notes(request, kernel, device, planned=self.planned)
        return dataclasses.replace(base, kernels=(kernel,), hbm_bytes=hbm_bytes, notes=tuple(notes))


def explain_cpu(request: Request) -> Explanation:
    """The NumPy backend: no kernel, no roofline, the same counts."""
    from .cpu import TILE_ROWS

    shape = shape_of(request)
    group = max(1, request.heads // max(1, request.heads_k))
    by_blocks = Schedule(TILE_ROWS, group, group, 0)  # every block of a group's queries reads K and V again
    return Explanation(
        call=call_text(request),
        backend="numpy",
        flops=shape.flops,
        hbm_bytes=cost.fused_bytes(shape, by_blocks, request.return_lse),
        standard_bytes=shape.standard_bytes,
        notes=("NumPy backend: blocked online softmax, matrix products by NumPy's BLAS",),
    )


def grid_and_schedule(
    sizes: tuple[int, int, int, int], problem: AttentionProblem, config: KernelConfig, device: DeviceModel
) -> tuple[tuple[tuple[int, int, int], ...], Schedule]:
    """Thread blocks of each launch, and the order of the work that they do; sizes as of `cuflash.jit.sizes_of`."""
    launches: tuple[tuple[int, int, int], ...]
    if isinstance(config, Sm90Config):
        grid = kernels.persistent_grid(problem, config, *sizes, device.multiprocessors)
        launches, section = ((grid.blocks, 1, 1),), grid.section
    else:
        assert isinstance(config, Sm80Config)
        launches = tuple(blocks for _, blocks in kernels.forward_grid(problem, config, *sizes).launches)
        section = launches[0][0]
    # Under a causal mask tiles begin at their diagonal: one that starts later starts at a lower key, and so meets the
    # others. Without one, the blocks that share a multiprocessor run apart: the scheduler favours the older one.
    in_step = device.multiprocessors * (config.ctas if problem.mask == "causal" else 1)
    return launches, Schedule(config.block_m, section, in_step, device.l2_bytes, cost.L2_COPIES.get(device.arch, 1))


def notes_on(request: Request, kernel: Kernel) -> list[str]:
    """What is unusual about a call of the forward pass."""
    problem, found = kernel.problem, []
    if problem.arch in kernels.TMA_TARGETS and kernels.family_in_use() != kernel.family:
        found.append(f"TMA cannot take {request.tma_refusal}: Ampere-style kernel, slower")
    if problem.scale_first:
        found.append("scale-first variant: the scale is 0, negative, tiny or huge, so scores are scaled before softmax")
    if problem.short:
        found.append("variant for few queries, of smaller tiles")
    return found
