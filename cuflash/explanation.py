"""Which kernels a call takes and why, what it costs, and the rule that refused it.

Those of the forward pass; `cuflash.backward_explanation` finds those of its gradients.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from . import cost, driver, jit, kernels
from .arch import ARCHES, Arch, arch_for, needs_ptx
from .arrays import CPU, ITEM_BYTES, bridge
from .checks import check_flag, check_gpu, request_for
from .config import KernelConfig, SmemRegion
from .cost import DeviceModel, Schedule, Shape
from .errors import UnsupportedError
from .problem import AttentionProblem
from .request import Request
from .settings import read_settings

if TYPE_CHECKING:
    from .backward_cost import BackwardSchedule
    from .compiled import Compiled

__all__ = ["Explanation", "explain"]

NOTHING = "nothing is launched: the call has no rows or no keys"

Cached = Literal["memory", "disk", "prebuilt", "compiled", "no"]
Function = Literal["attention", "attention_backward"]


@dataclass(frozen=True)
class Kernel:
    """A kernel of an explained call.

    Attributes
    ----------
    symbol, family : str
    problem : AttentionProblem
    config : KernelConfig
        ``config.reason`` says why the tuning table has it.
    smem : tuple of SmemRegion
        The map of the dynamic shared memory.
    grid : tuple of tuple of int
        Thread blocks of each of its launches.
    schedule : Schedule or BackwardSchedule or None
        The order of the work, for the cost model; None of a kernel to which it makes no difference.
    hbm_bytes : int
        Its predicted device-memory traffic.
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
    schedule: Schedule | BackwardSchedule | None
    hbm_bytes: int
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
    function : {"attention", "attention_backward"}
        Whose call it is.
    call : str
        Sizes, type and options of the call in a line.
    backend : {"cuda", "numpy"} or None
    kernels : tuple of Kernel
        In the order of their launches; none on the CPU, and for a call that launches nothing.
    device : DeviceModel or None
        The device, or the card that stands for ``arch=``; None on the CPU.
    flops : int
        2 (D + Dv) for every visible pair of a query and a key, over all heads; for gradients 2 (3 D + 2 Dv).
    hbm_bytes, standard_bytes : int
        Predicted device-memory traffic of the kernels (`cuflash.cost.fused_bytes` has the formula, for gradients
        `cuflash.backward_cost.backward_bytes`), and that of attention which keeps the Nq x Nk matrix in memory. On the
        CPU both count host memory; ``hbm_bytes`` of gradients is 0 there, for not predicted.
    workspace_bytes : int
        Device memory that the kernels share, beside inputs and results; gone when they are done.
    notes : tuple of str
        Anything unusual: a variant that a stride or a scale called for, PTX, no launch at all.
    """

    refused: str | None = None
    rule: str | None = None
    function: Function = "attention"
    call: str = ""
    backend: Literal["cuda", "numpy"] | None = None
    kernels: tuple[Kernel, ...] = ()
    device: DeviceModel | None = None
    flops: int = 0
    hbm_bytes: int = 0
    standard_bytes: int = 0
    workspace_bytes: int = 0
    notes: tuple[str, ...] = ()

    @property
    def kernel(self) -> Kernel | None:
        """The kernel that does the work: of attention the last one; of its gradients one between two others."""
        if not self.kernels:
            return None
        return self.kernels[-1 if self.function == "attention" else len(self.kernels) // 2]

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
    backward: bool = False,
    deterministic: bool = False,
    compile: bool = False,
    arch: str | None = None,
    precision: str | None = None,
    out_dtype: Any = None,
    q_scale: Any = None,
    k_scale: Any = None,
    v_scale: Any = None,
) -> Explanation:
    """Say what `cuflash.attention`, or the gradients of a call of it, would do with the same arguments; nothing runs.

    Parameters
    ----------
    q, k, v, causal, scale, layout, return_lse, out, precision, out_dtype, q_scale, k_scale, v_scale
        As for `cuflash.attention`, also of quantized tensors. Only shapes, strides, types and devices of the arrays
        matter.
    backward : bool
        Explain `cuflash.attention_backward` instead, for these q, k, v and out. The other arrays, and an `out` that is
        not given, are taken for contiguous and new, as autograd has them; `return_lse` makes no difference.
    deterministic : bool
        With `backward` only: as for `cuflash.attention_backward`.
    compile : bool
        Compile kernels that are in no cache, so that registers and spills are known.
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
        ``arch`` is no target that kernels are built for; ``deterministic`` without ``backward``.
    CompileError, MissingKernelError
        With ``compile=True``, as from `cuflash.attention`.
    """
    if arch is not None and arch not in ARCHES:
        raise ValueError(f"arch is {arch!r}; accepted are {', '.join(ARCHES)}")
    backward = check_flag("backward", backward)
    if not backward and check_flag("deterministic", deterministic):
        raise ValueError("deterministic is True, which is of gradients: accepted is that with backward=True")
    scales = {"q": q_scale, "k": k_scale, "v": v_scale}
    if bridge.concerns_float8(q, precision, out_dtype, scales):
        from .quantized_call import Options
        from .quantized_explanation import explain_quantized

        options = Options(causal, scale, layout, return_lse, precision, out_dtype)
        return explain_quantized(q, k, v, options, out, scales, backward=backward, compile=compile, arch=arch)
    try:
        request = request_for((q, k, v), out, causal=causal, scale=scale, layout=layout, return_lse=return_lse)
        if arch is not None and request.device == CPU:
            request = as_if_on_gpu(request)
        call: Any
        if backward:
            from .backward_explanation import BackwardCall

            call = BackwardCall.of(request, arch, deterministic)
        else:
            from .forward_explanation import ForwardCall

            call = ForwardCall.of(request, arch)
    except (ValueError, TypeError, UnsupportedError) as error:
        function: Function = "attention_backward" if backward else "attention"
        return Explanation(refused=str(error), rule=type(error).__name__, function=function)
    explanation: Explanation = call.explain(compile=compile)
    return explanation


def as_if_on_gpu(request: Request) -> Request:
    """The same request with its arrays on the first GPU, checked by the rules that hold there."""
    q, k, v = (x._replace(device=0) for x in (request.q, request.k, request.v))
    out = request.out and request.out._replace(device=0)
    request = dataclasses.replace(request, q=q, k=k, v=v, out=out)
    check_gpu(request)
    return request


def call_text(request: Request, dtypes: str | None = None) -> str:
    """The call in a line; ``dtypes`` of operands that are not of one dtype."""
    heads = f"H {request.heads}" + (f" over {request.heads_k}" if request.heads_k != request.heads else "")
    dims = f"D {request.head_dim}" + (f", Dv {request.head_dim_v}" if request.head_dim_v != request.head_dim else "")
    mask = {False: "full", "bottom_right": "causal", "top_left": "causal (top left)"}[request.causal]
    sizes = f"B {request.batch}, {heads}, Nq {request.seqlen_q}, Nk {request.seqlen_k}, {dims}"
    return f"{sizes}, {dtypes or request.q.dtype}, {mask}, scale {request.scale:.6g}, layout {request.layout}"


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


def target_of(request: Request, arch: str | None) -> Arch:
    """The target that names a call's GPU, or the one that it is planned for."""
    return arch_for(ARCHES[arch].compute_capability) if arch else jit.device_arch(request.device)


def device_of(request: Request, target: Arch, *, planned: bool) -> DeviceModel:
    """A call's device as the cost model sees it, or the card that stands for ``arch=``."""
    return cost.NOMINAL_DEVICES[target.name] if planned else device_model(request.device, target)


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


def describe_kernel(
    problem: AttentionProblem,
    config: KernelConfig,
    grid: tuple[tuple[int, int, int], ...],
    schedule: Schedule | BackwardSchedule | None,
    hbm_bytes: int,
    device: int | None,
    *,
    compile: bool,
) -> Kernel:
    """A kernel with its code, wherever that is; ``device`` is None where the call is planned for ``arch=``."""
    ptx = device is not None and needs_ptx(ARCHES[problem.arch], driver.device_compute_capability(device))
    cached, compiled = locate(problem, config, device, compile=compile, ptx=ptx)
    return Kernel(
        symbol=kernels.symbol(problem, config),
        family=config.family,
        problem=problem,
        config=config,
        smem=config.smem(problem),
        grid=grid,
        schedule=schedule,
        hbm_bytes=hbm_bytes,
        ptx=ptx,
        cached=cached,
        compiled=compiled,
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


def common_notes(request: Request, kernel: Kernel, device: DeviceModel, *, planned: bool) -> list[str]:
    """What is unusual about a call of either pass."""
    problem, arch = kernel.problem, kernel.problem.arch
    found = []
    if kernels.family_in_use() == kernel.family:
        found.append(f"{kernel.family} is asked for in place of the family that would be taken (use_family)")
    if problem.access_bytes == 2:
        found.append("scalar-load variant: an address, a stride or a head dim allows 2-byte accesses only; slower")
    elif problem.access_bytes < 16:
        found.append(
            f"{problem.access_bytes}-byte loads: an address, a stride or a head dim is no multiple of 16 bytes; slower"
        )
    if kernel.ptx:
        found.append(f"the device is newer than {arch}: the driver translates PTX at the first load")
    if planned:
        found.append(f"planned for {device.arch}; the roofline is that of the {device.name}")
    if request.causal_offset < 0:
        found.append(f"the first {min(request.seqlen_q, -request.causal_offset)} queries see no key and get 0")
    return found
