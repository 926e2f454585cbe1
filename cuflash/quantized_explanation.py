"""The kernels of a call of `cuflash.attention` on 8-bit operands, for `cuflash.explain`."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, cast

from . import cost, driver, jit, kernels, prepare_plan
from .arch import ARCHES, Arch, arch_for
from .arrays import CPU, GPU_DTYPES, Operand
from .cost import DeviceModel, Schedule, Shape
from .cpu_quantize import sample
from .errors import UnsupportedError
from .explanation import (
    NOTHING,
    Explanation,
    Kernel,
    call_text,
    common_notes,
    describe_kernel,
    device_model,
)
from .float8_arrays import Float8Arrays
from .forward_explanation import grid_and_schedule
from .fp8 import E4M3
from .fp8_layout import ROLES, padded, tiles
from .fp8_plan import Fp8Call
from .fp8_sm80_config import Fp8Sm80Config
from .fp8_sm90_config import MOST_TWO_LEVEL, Fp8Sm90Config
from .jit import LoadedKernel
from .problem import AttentionProblem
from .quantize_kernels import lse_problem
from .quantize_plan import Sources, plan_with
from .quantized_call import FAST, OUT_DTYPES, Foreseen, Options, QuantizedCall, Scales, foresee, refuse_backward
from .quantized_plan import check_foreseen_gpu, fp8_call, is_staged
from .quantizing_plan import workspace_of
from .request import Request

__all__ = ["explain_quantized"]

EXACT = (
    "exact up to rounding in fp32: scores of the codes, softmax, row sums, LSE; approximate: Q, K and V as 8-bit codes "
    "of 3 bits of mantissa (e5m2: 2), and probabilities, rounded to {} on the way to the second product"
)
ACCURACY = "expect RMSE near 1.4e-3 at 4096 keys, of inputs like N(0, 1) that cuflash has quantized"
SAME = f"precision={FAST!r} makes no difference here: precision='fp8' takes the same computation"
ONE_LEVEL = (
    "the tensor cores alone sum the output over the keys, and truncate. Right where V has no mean, as after centring; "
    "of a mean that is left, such as one that drifts along the sequence, or that of codes from elsewhere, 5 % are lost "
    "at 4096 keys and 18 % at 16384"
)
CONVERTED = "tiles become fp16 on chip: memory traffic is that of 8 bits, tensor operations are those of 16"
EMULATED = (
    "mma.sync of 8-bit floats is no instruction of {}: ptxas converts its operands to fp16, so that memory traffic is "
    "that of 8 bits and tensor operations are those of 16"
)


def explain_quantized(
    q: Any,
    k: Any,
    v: Any,
    options: Options,
    out: Any,
    scales: Scales,
    *,
    backward: bool,
    compile: bool,
    arch: str | None,
) -> Explanation:
    """`cuflash.explain` of quantized tensors, or of arrays that are quantized on the way."""
    try:
        if backward:
            refuse_backward(q, options.precision)
        explained = _Explained.of(foresee(q, k, v, options, out, scales), arch, scales)
    except (ValueError, TypeError, UnsupportedError) as error:
        return Explanation(
            refused=str(error),
            rule=type(error).__name__,
            function="attention_backward" if backward else "attention",
        )
    return explained.explain(compile=compile)


@dataclass(frozen=True)
class _Explained:
    """A call that would not be refused.

    Attributes
    ----------
    target : Arch or None
        What names the device; None on the CPU.
    device : int or None
        CUDA ordinal; None on the CPU, and where the call is planned for ``arch=``.
    unscaled : tuple of str
        The scales of 8-bit arrays that are not given.
    """

    foreseen: Foreseen
    target: Arch | None
    device: int | None
    unscaled: tuple[str, ...]

    @classmethod
    def of(cls, foreseen: Foreseen, arch: str | None, scales: Scales) -> _Explained:
        """Check what only holds on a GPU.

        Raises
        ------
        ValueError, UnsupportedError
        """
        call, ordinal = foreseen.call, foreseen.call.q.device
        codes = isinstance(foreseen.sources, Float8Arrays)
        unscaled = tuple(f"{role}_scale" for role in ROLES if codes and scales[role] is None)
        if arch is None and ordinal == CPU:
            return cls(foreseen, None, None, unscaled)
        if arch is not None:
            if isinstance(foreseen.sources, Sources) and call.q.source_dtype not in GPU_DTYPES:
                raise UnsupportedError(
                    f"q, k and v have dtype {call.q.source_dtype}; the GPU kernels take float16 and bfloat16: cast them"
                )
            if call.out_dtype not in OUT_DTYPES[:2]:
                raise ValueError(f"out_dtype is {call.out_dtype!r}; accepted on a GPU are {', '.join(OUT_DTYPES[:2])}")
        check_foreseen_gpu(foreseen)
        target = jit.device_arch(ordinal) if arch is None else arch_for(ARCHES[arch].compute_capability)
        return cls(foreseen, target, ordinal if arch is None else None, unscaled)

    @property
    def call(self) -> QuantizedCall:
        return self.foreseen.call

    def explain(self, *, compile: bool) -> Explanation:
        """The kernels, where their code is, and what the call costs; ``compile`` what is in no cache."""
        request, shape = _request(self.call), _shape(self.call, itemsize=2)
        base = Explanation(
            call=self.call_text(request),
            backend="numpy",
            flops=shape.flops,
            standard_bytes=shape.standard_bytes,
            notes=(
                "NumPy backend: attention of the dequantized operands, tile by tile, without further rounding",
                *self.notes_on_options(),
            ),
        )
        if self.target is None:
            return base
        if self.device is None:
            device = cost.NOMINAL_DEVICES[self.target.name]
        else:
            device = device_model(self.device, self.target)
        device = dataclasses.replace(device, float8=self.target.converts_float8)
        base = dataclasses.replace(base, backend="cuda", device=device, notes=(NOTHING,))
        found = [*self.quantizing(device, compile=compile), *self.attending(device, compile=compile)]
        if not found:
            return base
        notes = list(self.notes())
        if found[-1].problem.task == "forward":
            notes += common_notes(request, found[-1], device, planned=self.device is None)
        return dataclasses.replace(
            base,
            kernels=tuple(found),
            hbm_bytes=sum(kernel.hbm_bytes for kernel in found),
            workspace_bytes=self.workspace_bytes(),
            notes=tuple(notes),
        )

    # --- kernels

    def describe(
        self,
        problem: AttentionProblem,
        grid: tuple[tuple[int, int, int], ...],
        schedule: Schedule | None,
        hbm_bytes: int,
        *,
        compile: bool,
    ) -> Kernel:
        config = kernels.select_config(problem)
        return describe_kernel(problem, config, grid, schedule, hbm_bytes, self.device, compile=compile)

    def quantizing(self, device: DeviceModel, *, compile: bool) -> list[Kernel]:
        """The kernels that make the codes, or what attention reads of the caller's, if the call does."""
        if (sources := self.foreseen.sources) is None:
            return []
        arch = cast(Arch, self.target).name
        if isinstance(sources, Sources):
            launches, traffic = plan_with(sources, arch, device.multiprocessors, _unloaded).launches, self.traffic()
        else:
            launches = prepare_plan.plan_with(sources, arch, _unloaded).launches
            traffic = {"prepare": prepare_plan.traffic(sources)}
        return [
            self.describe(
                launch.loaded.problem,
                ((launch.blocks, 1, 1),),
                None,
                traffic[launch.loaded.problem.task],
                compile=compile,
            )
            for launch in launches
        ]

    def traffic(self) -> dict[str, int]:
        """Of the quantizer's kernels."""
        traffic = {"quantize_means": 0, "quantize": 0}
        for x in (self.call.q, self.call.k, self.call.v):
            batch, seq, heads, dim = x.sizes
            traffic["quantize"] += batch * heads * (seq * (2 * dim + padded(dim)) + 4 * tiles(seq))
            if x.role != "q":
                traffic["quantize_means"] += batch * heads * 2 * dim * len(sample(seq))
        return traffic

    def attending(self, device: DeviceModel, *, compile: bool) -> list[Kernel]:
        """The kernels that take the codes."""
        call, shape = self.call, _shape(self.call, itemsize=1)
        rows = shape.batch * shape.heads * shape.seqlen_q
        if not rows or not shape.seqlen_k:
            return []
        found = []
        if self.has_shift:
            problem = lse_problem(shape.head_dim, cast(Arch, self.target).name)
            blocks = shape.batch * shape.heads * tiles(shape.seqlen_q)
            found.append(self.describe(problem, ((blocks, 1, 1),), None, rows * (shape.head_dim + 4), compile=compile))
        problem = self.problem
        launches, schedule = grid_and_schedule(self.fp8_call.sizes, problem, kernels.select_config(problem), device)
        hbm_bytes = cost.fused_bytes(shape, schedule, call.return_lse) + rows * shape.head_dim_v  # O has two bytes
        hbm_bytes += 4 * rows if self.has_shift else 0
        return [*found, self.describe(problem, launches, schedule, hbm_bytes, compile=compile)]

    @property
    def fp8_call(self) -> Fp8Call:
        """The call as the kernel that attends takes it."""
        return fp8_call(self.call, cast(Arch, self.target).name)

    @property
    def problem(self) -> AttentionProblem:
        """The kernel that attends."""
        return self.fp8_call.problem

    @property
    def has_shift(self) -> bool:
        return self.call.return_lse and self.call.k.mean is not None

    # --- what else there is to say

    def call_text(self, request: Request) -> str:
        """The call in a line, with what its operands and its result are."""
        call, sources = self.call, self.foreseen.sources
        formats = {x.role: x.dtype.removeprefix("float8_").removesuffix("fn") for x in (call.q, call.k, call.v)}
        text = ", ".join(f"{role} {form}" for role, form in formats.items())
        if len(set(formats.values())) == 1:
            text = formats["q"]
        if isinstance(sources, Sources):
            text = f"{call.q.source_dtype} quantized to {text}"
        precision = FAST if call.fast else "fp8"
        return f"{call_text(request, text)}, result {call.out_dtype}, precision {precision}"

    def notes_on_options(self) -> list[str]:
        """What is left away, and what makes no difference."""
        found = []
        if self.unscaled:
            found.append(f"not given, so 1: {', '.join(self.unscaled)}")
        if self.call.fast and (self.target is None or not self.problem.one_level):
            found.append(SAME)
        return found

    def workspace_bytes(self) -> int:
        """Codes, scales and means that the call makes; the mean's share of the LSE; the padded result."""
        call, total = self.call, sum(workspace_of(self.foreseen).values())
        batch, seq, heads, _ = call.q.sizes
        total += 4 * batch * heads * seq if self.has_shift else 0
        if is_staged(call):
            total += 2 * batch * heads * seq * padded(call.v.head_dim)
        return total

    def notes(self) -> list[str]:
        """What quantizing costs in accuracy, and anything unusual."""
        call, found, sources = self.call, [], self.foreseen.sources
        if isinstance(sources, Sources):
            found.append(
                "q, k and v are quantized on the way, with a scale for every 128 tokens of a head, K and V centred"
            )
        elif sources is not None:
            why = "its address, head dim or strides are no positive multiples of 16 bytes"
            copied = [f"; {role} is copied: {why}" for role in sources.copied]
            found.append("v is transposed on the way, once for all query tiles" + "".join(copied))
        found += self.notes_on_options()
        found += self.notes_on_products()
        if call.v.mean is None:
            found.append("v is not centred: a constant in its channels costs accuracy that centring would save")
        if call.v.head_dim % 16:
            found.append(
                f"head dim {call.v.head_dim} of V is no multiple of 16: the result is computed padded, and copied"
            )
        elif is_staged(call):
            found.append("out is copied: its address or strides are no positive multiples of 16 bytes")
        problem = self.problem
        if problem.scale_first:
            found.append("scale-first variant: the scale is 0, negative, tiny or huge")
        if problem.short:
            found.append("variant for few queries, of smaller tiles")
        return found

    def notes_on_products(self) -> list[str]:
        """What the kernel's products leave of the operands."""
        call, config = self.call, kernels.select_config(self.problem)
        converted = isinstance(config, Fp8Sm80Config) and config.converted
        found = [EXACT.format("fp16" if converted else "such codes of 3 bits")]
        ours = not isinstance(self.foreseen.sources, Float8Arrays)
        if ours and {x.dtype for x in (call.q, call.k, call.v)} == {E4M3.name}:
            found.append(ACCURACY)
        if converted:
            return [*found, CONVERTED]
        if not cast("Fp8Sm80Config | Fp8Sm90Config", config).two_level:
            if self.problem.one_level:
                found.append(f"precision={FAST!r}: {ONE_LEVEL}; precision='fp8' sums in fp32")
            else:
                found.append(f"head dim of V beyond {MOST_TWO_LEVEL}: {ONE_LEVEL}")
        if isinstance(config, Fp8Sm80Config) and not ARCHES[self.problem.arch].multiplies_float8:
            found.append(EMULATED.format(self.problem.arch))
        return found


def _unloaded(problem: AttentionProblem) -> LoadedKernel:
    """A kernel without code, which has a grid and can launch nothing."""
    no_code: Any = None
    config = kernels.select_config(problem)
    return LoadedKernel(
        driver.Kernel(0, kernels.symbol(problem, config), 0, no_code), problem, config, no_code, "memory"
    )


def _shape(call: QuantizedCall, *, itemsize: int) -> Shape:
    """The sizes of a call; of its codes (one byte) as they are padded."""
    (batch, seq_q, heads, dim), (_, seq_k, heads_k, _) = call.q.sizes, call.k.sizes
    dims = [dim, call.v.head_dim]
    dim, dim_v = map(padded, dims) if itemsize == 1 else dims
    offset = seq_k - seq_q if call.causal == "bottom_right" else 0
    return Shape(batch, heads, heads_k, seq_q, seq_k, dim, dim_v, offset if call.causal else None, itemsize)


def _request(call: QuantizedCall) -> Request:
    """The call as one of arrays, for what is said of every call."""
    q, k, v = (
        Operand(x.role, x.payload, x.kind, 0, x.shape, (0, 0, 0, 0), x.source_dtype, CPU)
        for x in (call.q, call.k, call.v)
    )
    return Request(q, k, v, None, call.layout, call.causal, call.scale, call.return_lse)
