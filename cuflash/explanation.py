"""Which kernel a call takes and why, what it costs, and the rule that refused it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from . import cost, driver, jit, kernels
from .arch import ARCHES, Arch, arch_for, needs_ptx
from .arrays import CPU, ITEM_BYTES
from .checks import check_apart, check_gpu, request_for
from .config import KernelConfig, SmemRegion
from .cost import DeviceModel, Schedule, Shape
from .errors import UnsupportedError
from .problem import AttentionProblem
from .request import Request
from .settings import read_settings
from .sm80_config import Sm80Config
from .sm90_config import Sm90Config

if TYPE_CHECKING:
    from .compiled import Compiled

__all__ = ["Explanation", "explain"]

Cached = Literal["memory", "disk", "prebuilt", "compiled", "no"]


@dataclass(frozen=True)
class Kernel:
    """The kernel of an explained call.

    Attributes
    ----------
    symbol, family : str
    problem : AttentionProblem
    config : KernelConfig
        ``config.reason`` says why the tuning table has it.
    smem : tuple of SmemRegion
        The map of the dynamic shared memory.
    grid : tuple of tuple of int
        Thread blocks of each launch of the call.
    schedule : Schedule
        The order of the work, for the cost model.
    ptx : bool
        The device is newer than any target: the driver translates PTX.
    cached : {"memory", "disk", "prebuilt", "compiled", "no"}
        Where its code is: loaded already, in the disk cache, in the prebuilt directory, made for this explanation
        (``compile=True``), or nowhere yet.
    compiled : Compiled or None
        Registers, spills, seconds, log; None when the code is nowhere yet.
    """

    symbol: str
    family: str
    problem: AttentionProblem
    config: KernelConfig
    smem: tuple[SmemRegion, ...]
    grid: tuple[tuple[int, int, int], ...]
    schedule: Schedule
    ptx: bool
    cached: Cached
    compiled: Compiled | None

    @property
    def smem_bytes(self) -> int:
        return sum(region.size for region in self.smem)

    @property
    def registers(self) -> int | None:
        """Per thread; None while the code is nowhere, or PTX."""
        return self.compiled.registers if self.compiled and not self.ptx else None

    @property
    def spill_bytes(self) -> int | None:
        return self.compiled.spill_bytes if self.compiled and not self.ptx else None


@dataclass(frozen=True)
class Explanation:
    """What `explain` found; prints as a report.

    Attributes
    ----------
    refused : str or None
        Why the call would be refused; None if it would run. All that follows is empty then.
    rule : str or None
        The exception's name: ``"ValueError"`` (shapes), ``"TypeError"`` (types), ``"UnsupportedError"``.
    call : str
        Sizes, type and options of the call in a line.
    backend : {"cuda", "numpy"} or None
    kernel : Kernel or None
        None on the CPU, and for a call that launches nothing.
    device : DeviceModel or None
        The device, or the card that stands for ``arch=``; None on the CPU.
    flops : int
        2 (D + Dv) for every visible pair of a query and a key, over all heads.
    hbm_bytes, standard_bytes : int
        Predicted device-memory traffic of the kernel (`cuflash.cost.fused_bytes` has the formula), and that of
        attention which keeps the Nq x Nk matrix in memory. On the CPU both count host memory.
    notes : tuple of str
        Anything unusual: a variant that a stride or a scale called for, PTX, no launch at all.
    """

    refused: str | None = None
    rule: str | None = None
    call: str = ""
    backend: Literal["cuda", "numpy"] | None = None
    kernel: Kernel | None = None
    device: DeviceModel | None = None
    flops: int = 0
    hbm_bytes: int = 0
    standard_bytes: int = 0
    notes: tuple[str, ...] = ()

    @property
    def arithmetic_intensity(self) -> float:
        """Operations per byte of memory traffic."""
        return self.flops / self.hbm_bytes if self.hbm_bytes else 0.0

    @property
    def roofline_seconds(self) -> float | None:
        """The time below which the device cannot finish; None on the CPU."""
        return cost.roofline_seconds(self.flops, self.hbm_bytes, self.device) if self.device else None

    def __str__(self) -> str:
        from .text import explanation_text

        return explanation_text(self)


def explain(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool | str = False,
    scale: float | None = None,
    layout: str = "bshd",
    return_lse: bool = False,
    out: Any = None,
    compile: bool = False,
    arch: str | None = None,
) -> Explanation:
    """Say what `cuflash.attention` would do with the same arguments; nothing runs.

    Parameters
    ----------
    q, k, v, causal, scale, layout, return_lse, out
        As for `cuflash.attention`. Only shapes, strides, types and devices of the arrays matter.
    compile : bool
        Compile the kernel if it is in no cache, so that registers and spills are known.
    arch : str, optional
        Explain the kernel that a GPU of this target would run, for example ``"sm_90"`` (or ``"sm_90a"``, which is the
        same GPU); the arrays may then lie anywhere, in NumPy for instance, and no GPU is needed.

    Returns
    -------
    Explanation
        For a call that would be refused, with the rule that refuses it.

    Raises
    ------
    ValueError
        ``arch`` is no target that kernels are built for.
    CompileError, MissingKernelError
        With ``compile=True``, as from `cuflash.attention`.
    """
    if arch is not None and arch not in ARCHES:
        raise ValueError(f"arch is {arch!r}; accepted are {', '.join(ARCHES)}")
    try:
        request = request_for((q, k, v), out, causal=causal, scale=scale, layout=layout, return_lse=return_lse)
        if arch is not None and request.device == CPU:
            request = as_if_on_gpu(request)
        if request.out is not None:
            check_apart(request)
        on_cpu = request.device == CPU
        if not on_cpu:
            target = arch_for(ARCHES[arch].compute_capability) if arch else jit.device_arch(request.device)
            runs = request.rows > 0 and request.seqlen_k > 0
            problem = kernels.problem_for(request, target.name) if runs else None
    except (ValueError, TypeError, UnsupportedError) as error:
        return Explanation(refused=str(error), rule=type(error).__name__)
    if on_cpu:
        return explain_cpu(request)
    return explain_gpu(request, problem, target, planned=arch is not None, compile=compile)


def as_if_on_gpu(request: Request) -> Request:
    """The same request with its arrays on the first GPU, checked by the rules that hold there."""
    q, k, v = (x._replace(device=0) for x in (request.q, request.k, request.v))
    out = request.out and request.out._replace(device=0)
    request = dataclasses.replace(request, q=q, k=k, v=v, out=out)
    check_gpu(request)
    return request


def call_text(request: Request) -> str:
    """The call in a line."""
    heads = f"H {request.heads}" + (f" over {request.heads_k}" if request.heads_k != request.heads else "")
    dims = f"D {request.head_dim}" + (f", Dv {request.head_dim_v}" if request.head_dim_v != request.head_dim else "")
    mask = {False: "full", "bottom_right": "causal", "top_left": "causal (top left)"}[request.causal]
    sizes = f"B {request.batch}, {heads}, Nq {request.seqlen_q}, Nk {request.seqlen_k}, {dims}"
    return f"{sizes}, {request.q.dtype}, {mask}, scale {request.scale:.6g}, layout {request.layout}"


def shape_of(request: Request) -> Shape:
    return Shape(
        request.batch,
        request.heads,
        request.heads_k,
        request.seqlen_q,
        request.seqlen_k,
        request.head_dim,
        request.head_dim_v,
        request.causal_offset if request.causal else None,
        ITEM_BYTES[request.q.dtype],
    )


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


def explain_gpu(
    request: Request, problem: AttentionProblem | None, arch: Arch, *, planned: bool, compile: bool
) -> Explanation:
    """The kernel, where its code is, and what the call costs on the device or on the card that stands for ``arch``.

    No problem: the call launches nothing.
    """
    device = cost.NOMINAL_DEVICES[arch.name] if planned else device_model(request.device, arch)
    shape = shape_of(request)
    base = Explanation(
        call=call_text(request),
        backend="cuda",
        device=device,
        flops=shape.flops,
        standard_bytes=shape.standard_bytes,
        notes=("nothing is launched: the call has no rows or no keys",),
    )
    if problem is None:
        return base
    kernel = explain_kernel(request, problem, device, planned=planned, compile=compile)
    return dataclasses.replace(
        base,
        kernel=kernel,
        hbm_bytes=cost.fused_bytes(shape, kernel.schedule, request.return_lse),
        notes=notes(request, kernel, device, planned=planned),
    )


def explain_kernel(
    request: Request, problem: AttentionProblem, device: DeviceModel, *, planned: bool, compile: bool
) -> Kernel:
    """The kernel that serves a call which launches one."""
    config = kernels.select_config(problem)
    grid, schedule = grid_and_schedule(request, problem, config, device)
    ptx = not planned and needs_ptx(ARCHES[problem.arch], driver.device_compute_capability(request.device))
    cached, compiled = locate(problem, config, None if planned else request.device, compile=compile, ptx=ptx)
    return Kernel(
        symbol=kernels.symbol(problem, config),
        family=config.family,
        problem=problem,
        config=config,
        smem=config.smem(problem),
        grid=grid,
        schedule=schedule,
        ptx=ptx,
        cached=cached,
        compiled=compiled,
    )


def grid_and_schedule(
    request: Request, problem: AttentionProblem, config: KernelConfig, device: DeviceModel
) -> tuple[tuple[tuple[int, int, int], ...], Schedule]:
    """Thread blocks of each launch, and the order of the work that they do."""
    launches: tuple[tuple[int, int, int], ...]
    if isinstance(config, Sm90Config):
        grid = kernels.persistent_grid(problem, config, *jit.sizes_of(request), device.multiprocessors)
        launches, section = ((grid.blocks, 1, 1),), grid.section
    else:
        assert isinstance(config, Sm80Config)
        launches = tuple(blocks for _, blocks in kernels.forward_grid(problem, config, *jit.sizes_of(request)).launches)
        section = launches[0][0]
    # Under a causal mask tiles begin at their diagonal: one that starts later starts at a lower key, and so meets the
    # others. Without one, the blocks that share a multiprocessor run apart: the scheduler favours the older one.
    in_step = device.multiprocessors * (config.ctas if problem.mask == "causal" else 1)
    return launches, Schedule(config.block_m, section, in_step, device.l2_bytes, cost.L2_COPIES.get(device.arch, 1))


def device_model(ordinal: int, arch: Arch) -> DeviceModel:
    """The cost model's view of a device of this machine."""
    properties = driver.device_properties(ordinal)
    return DeviceModel(
        properties.name,
        arch.name,
        properties.multiprocessors,
        properties.clock_hz,
        properties.memory_bytes_per_second,
        properties.l2_bytes,
    )


def locate(
    problem: AttentionProblem, config: KernelConfig, device: int | None, *, compile: bool, ptx: bool
) -> tuple[Cached, Compiled | None]:
    """Where a kernel's code is, in the order in which a call looks; made if that is asked."""
    if device is not None and (loaded := jit._loaded.get((problem, device))):
        return "memory", loaded.compiled
    settings = read_settings()
    if found := jit.find_code(problem, config, settings, ptx=ptx):
        compiled, origin = found
        return origin, compiled
    if not compile:
        return "no", None
    compiled, origin = jit.obtain_code(problem, config, settings, ptx=ptx)
    return origin, compiled


def notes(request: Request, kernel: Kernel, device: DeviceModel, *, planned: bool) -> tuple[str, ...]:
    """What is unusual about a call."""
    problem, arch = kernel.problem, kernel.problem.arch
    found = []
    if kernels.family_in_use():
        found.append(f"{kernels.family_in_use()} is asked for in place of the family that would be taken (use_family)")
    elif arch in kernels.TMA_TARGETS:
        found.append(f"TMA cannot take {request.tma_refusal}: Ampere-style kernel, slower")
    if problem.access_bytes == 2:
        found.append("scalar-load variant: an address, a stride or a head dim allows 2-byte accesses only; slower")
    elif problem.access_bytes < 16:
        found.append(
            f"{problem.access_bytes}-byte loads: an address, a stride or a head dim is no multiple of 16 bytes; slower"
        )
    if problem.scale_first:
        found.append("scale-first variant: the scale is 0, negative, tiny or huge, so scores are scaled before softmax")
    if problem.short:
        found.append("variant for few queries, of smaller tiles")
    if kernel.ptx:
        found.append(f"the device is newer than {arch}: the driver translates PTX at the first load")
    if planned:
        found.append(f"planned for {device.arch}; the roofline is that of the {device.name}")
    if request.causal_offset < 0:
        found.append(f"the first {min(request.seqlen_q, -request.causal_offset)} queries see no key and get 0")
    return tuple(found)
