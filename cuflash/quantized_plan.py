"""Attention of quantized tensors on a GPU: what a call takes, its plan, its launches."""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING, Any, TypeAlias, cast

from . import jit, kernels
from .arch import ARCHES
from .arrays import CPU, Operand
from .checks import MAX_LENGTH, check_placed
from .errors import UnsupportedError
from .fp8 import E5M2
from .fp8_layout import IMAGE, padded, row_strides, tiles
from .fp8_plan import OUT_BYTES, Fp8Addresses, Fp8Call, Fp8Plan, Fp8Sm80Plan
from .fp8_plan import make_plan as plan_attention
from .fp8_sm90_config import MOST_TWO_LEVEL
from .jit import span
from .params import fast_div, stride_values
from .problem import Dtype
from .quantize_kernels import LSE_SHIFT, lse_problem
from .quantize_plan import Launch, QuantizePlan
from .request import AXES, MAX_WORK_TILES, TMA_BYTES, TMA_STRIDES_END, TMA_TILE_ROWS, contiguous_strides

if TYPE_CHECKING:
    from .jit import LoadedKernel
    from .quantized import QuantizedTensor
    from .quantized_call import Foreseen, QuantizedCall

__all__ = [
    "QuantizedPlan",
    "check_foreseen_gpu",
    "check_quantized_gpu",
    "fp8_call",
    "is_staged",
    "make_plan",
    "plan_for",
    "shift_launch",
]

Addresses: TypeAlias = tuple[int, int, int]
"""Of payload, scales and mean of a quantized tensor; 0: none."""


# --- checks ----------------------------------------------------------------------------------------------------


def check_quantized_gpu(call: QuantizedCall) -> None:
    """Refuse quantized tensors that no GPU kernel takes; of those in host memory, wherever they lie there.

    Raises
    ------
    ValueError, UnsupportedError
    """
    for name, x in (("q", call.q), ("k", call.k), ("v", call.v)):
        if x.device != CPU and any(address % TMA_BYTES for address in x.addresses):
            raise ValueError(
                f"{name} has arrays at {', '.join(map(hex, x.addresses))}; on the GPU these must be multiples of "
                f"{TMA_BYTES}: copy them"
            )
        _check_mean(name, x)
    if call.v.storage != IMAGE:
        raise UnsupportedError(
            f"v is stored as {call.v.storage!r}; the GPU kernels take {IMAGE!r}, which cuflash.quantize(v, role='v') "
            "makes; v.to_image() makes it of rows, once"
        )
    check_sizes(call)


def check_foreseen_gpu(foreseen: Foreseen) -> None:
    """Refuse what no GPU kernel takes, of the tensors of a call or of the arrays that it would begin with."""
    call, sources = foreseen
    if sources is None:
        check_quantized_gpu(call)
    else:
        check_placed(sources.operands.values())
        check_sizes(call)


def check_sizes(call: QuantizedCall) -> None:
    """Refuse what is too large for the GPU kernels, and an ``out`` that they cannot address."""
    for name, x in (("q", call.q), ("k and v", call.k)):
        if x.sizes[1] >= MAX_LENGTH:
            raise UnsupportedError(
                f"{name} has sequence length {x.sizes[1]}; the GPU kernels take less than {MAX_LENGTH}"
            )
    (batch, seq_q, heads, _), (_, seq_k, heads_k, _) = call.q.sizes, call.k.sizes
    if max(batch * heads * -(-seq_q // TMA_TILE_ROWS), batch * heads_k * tiles(seq_k)) > MAX_WORK_TILES:
        raise UnsupportedError("there are 2^31 tiles of queries or keys and more; accepted are fewer: split the batch")
    if call.out is not None:
        check_placed([call.kind.operand("out", call.out)])


def _check_mean(name: str, x: QuantizedTensor) -> None:
    """A mean that came with codes from elsewhere."""
    if x.mean is None:
        return
    batch, _, heads, dim = x.sizes
    shape = batch, heads, padded(dim)
    mean = x.kind.operand(f"{name}.mean", x.mean)
    dense = 0 in shape or mean.strides == contiguous_strides(shape, 4)
    if (mean.shape, mean.dtype, dense) != (shape, "float32", True):
        raise ValueError(
            f"{name} has a mean of shape {mean.shape}, dtype {mean.dtype} and strides {mean.strides}; accepted is a "
            f"C-contiguous float32 array of shape {shape}"
        )
    if name == "q":
        raise ValueError("q has a mean; accepted is None: only those of K and V can be added to the result")


# --- plans -----------------------------------------------------------------------------------------------------


class QuantizedPlan:
    """Everything about a GPU call but its addresses.

    Attributes
    ----------
    attend : Fp8Plan, Fp8Sm80Plan or None
        None if nothing is launched: there are no rows, or no keys.
    shift : QuantizePlan or None
        The kernel before, where the LSE is wanted and K has a mean.
    kind : Kind
    out_span : tuple of int
        Where an ``out`` that was given begins and ends, relative to its address.
    """

    __slots__ = (
        "_dim",
        "_lse_shape",
        "_out_dtype",
        "_out_shape",
        "_staged_shape",
        "attend",
        "dead",
        "device",
        "kind",
        "out_span",
        "shift",
    )  # fmt: skip

    def __init__(self, call: QuantizedCall, attend: Fp8Plan | Fp8Sm80Plan | None, shift: QuantizePlan | None) -> None:
        self.device = call.q.device
        self.attend = attend
        self.shift = shift
        self.dead = call.k.sizes[1] == 0 and 0 not in call.lse_shape
        self.kind = call.kind
        self._out_dtype = call.out_dtype
        self._out_shape = call.out_shape
        self._lse_shape = call.lse_shape if call.return_lse else None
        self._dim = call.v.head_dim
        self._staged_shape = _padded_shape(call) if attend is not None and is_staged(call) else None
        self.out_span = (0, 0) if call.out is None else span(call.kind.operand("out", call.out))

    def run(self, q: QuantizedTensor, k: QuantizedTensor, v: QuantizedTensor, out: Any, out_at: int) -> Any:
        """Make a call of the plan on the current stream; ``out_at`` is the address of an ``out`` that was given."""
        kind = self.kind
        if out is not None:
            self._refuse_shared(out_at, q, k, v)
        if kind.current_device() == self.device:
            return self.run_at(q.payload, q.addresses, k.addresses, v.addresses, out, out_at)
        with kind.on_device(self.device):
            return self.run_at(q.payload, q.addresses, k.addresses, v.addresses, out, out_at)

    def run_at(self, like: Any, q: Addresses, k: Addresses, v: Addresses, out: Any, out_at: int) -> Any:
        """The same on the current device, by the addresses of the operands; new arrays are of the kind of ``like``."""
        kind = self.kind
        if out is None:
            out, out_at = kind.empty(like, self._out_shape, self._out_dtype)
        else:
            kind.written(out)
        lse, lse_at = kind.empty(like, self._lse_shape, "float32") if self._lse_shape else (None, 0)
        if self.attend is not None:
            self._launch(like, q, k, v, out, out_at, lse_at)
        elif self.dead:
            kind.fill_dead(out, lse)
        return out if lse is None else (out, lse)

    def _launch(self, like: Any, q: Addresses, k: Addresses, v: Addresses, out: Any, out_at: int, lse_at: int) -> None:
        kind = self.kind
        (q_at, q_scales, _), (k_at, k_scales, k_mean), (v_at, v_scales, v_mean) = q, k, v
        stream, shift_at, staged = kind.stream(self.device), 0, None
        if self.shift is not None:
            # Kept until the end: what a framework's allocator gets back, it gives away in the order of the stream.
            _shift, shift_at = kind.empty(like, cast("tuple[int, ...]", self._lse_shape), "float32")
            self.shift.launch({"q": q_at, "q_scales": q_scales, "k_mean": k_mean, "shift": shift_at}, stream)
        if self._staged_shape is not None:
            staged, out_at = kind.empty(like, self._staged_shape, self._out_dtype)
        addresses = Fp8Addresses(v_at, q_scales, k_scales, v_scales, v_mean, shift_at, out_at, lse_at)
        cast("Fp8Plan | Fp8Sm80Plan", self.attend).launch(q_at, k_at, addresses, stream)
        if staged is not None:
            kind.copy(out, staged[..., : self._dim])

    def _refuse_shared(self, out_at: int, *operands: QuantizedTensor) -> None:
        """Refuse an ``out`` whose span meets that of an operand, all of which are contiguous."""
        low, high = self.out_span
        for name, x in zip("qkv", operands, strict=True):
            arrays = (x.payload, x.scales) if x.mean is None else (x.payload, x.scales, x.mean)
            for array, at in zip(arrays, x.addresses, strict=False):
                if out_at + low < at + array.nbytes and at < out_at + high:
                    raise ValueError(f"out shares memory with {name}, or lies around it; pass an array of its own")


def plan_for(call: QuantizedCall, key: Hashable | None) -> QuantizedPlan:
    """Plan a checked call, and enter the plan into the table under its key."""
    check_quantized_gpu(call)
    plan = make_plan(call)
    if key is not None:
        jit.keep(jit.QUANTIZED_PLANS, key, plan, jit.MAX_PLANS)
    return plan


def make_plan(call: QuantizedCall) -> QuantizedPlan:
    """Plan a GPU call; compiles and loads its kernels if that was not done before."""
    if 0 in call.lse_shape or call.k.sizes[1] == 0:
        return QuantizedPlan(call, None, None)
    device = call.q.device
    arch = jit.device_arch(device).name
    attend = plan_attention(fp8_call(call, arch), device)
    shift = None
    if call.return_lse and call.k.mean is not None:
        loaded = jit.kernel_for(lse_problem(padded(call.q.head_dim), arch), device)
        shift = QuantizePlan(device, (shift_launch(call, loaded),))
    return QuantizedPlan(call, attend, shift)


def fp8_call(call: QuantizedCall, arch: str) -> Fp8Call:
    """The call as the kernel's plan takes it, on a device that ``arch`` names."""
    (batch, seq_q, heads, dim), (_, seq_k, heads_k, _) = call.q.sizes, call.k.sizes
    bottom_right = seq_k - seq_q if call.causal == "bottom_right" else 0
    target = kernels.fp8_target(arch)
    return Fp8Call(
        batch=batch,
        heads=heads,
        heads_k=heads_k,
        seqlen_q=seq_q,
        seqlen_k=seq_k,
        head_dim=padded(dim),
        head_dim_v=padded(call.v.head_dim),
        out_dtype=cast(Dtype, call.out_dtype),
        causal_offset=bottom_right if call.causal else None,
        scale=call.scale,
        q_strides=call.strides[0] or row_strides(call.q.shape, call.layout),
        k_strides=call.strides[1] or row_strides(call.k.shape, call.layout),
        out_strides=_written_strides(call),
        arch=target,
        one_level=call.fast and _has_two_ways(target, padded(call.v.head_dim)),
        dtypes=(call.q.dtype, call.k.dtype, call.v.dtype),
    )


def _has_two_ways(target: str, head_dim_v: int) -> bool:
    """Whether a target has a kernel for either way to sum the output; else one serves both precisions."""
    multiplies_codes = target in kernels.TMA_TARGETS.values() or ARCHES[target].multiplies_float8
    return multiplies_codes and head_dim_v <= MOST_TWO_LEVEL


def shift_launch(call: QuantizedCall, loaded: LoadedKernel) -> Launch:
    """The launch that finds what the mean of K adds to the LSE."""
    (batch, seq, heads, _), (_, _, heads_k, _) = call.q.sizes, call.k.sizes
    tail = LSE_SHIFT.pack_tail(
        {
            **stride_values("q", row_strides(call.q.shape, call.layout)),
            "tiles": fast_div(tiles(seq)),
            "heads": fast_div(heads),
            "group": fast_div(heads // heads_k),
            "kv_heads": heads_k,
            "seqlen": seq,
            "e5m2": int(call.q.dtype == E5M2.name),
            "scale": call.scale,
        }
    )
    return Launch(loaded, LSE_SHIFT, batch * heads * tiles(seq), tail)


# --- strides ---------------------------------------------------------------------------------------------------


def _padded_shape(call: QuantizedCall) -> tuple[int, ...]:
    return (*call.out_shape[:3], padded(call.v.head_dim))


def is_staged(call: QuantizedCall) -> bool:
    """Whether the kernel cannot write where the result shall be: into rows of whole 16 columns, by TMA."""
    if call.v.head_dim != padded(call.v.head_dim):
        return True
    if call.out is None:
        return False
    out: Operand = call.kind.operand("out", call.out)
    used = [stride for stride, extent in zip(out.strides[:3], out.shape[:3], strict=True) if extent > 1]
    aligned = out.address % TMA_BYTES == 0 and (out.strides[3] == OUT_BYTES or out.shape[3] == 1)
    return not (aligned and all(0 < stride < TMA_STRIDES_END and stride % TMA_BYTES == 0 for stride in used))


def _written_strides(call: QuantizedCall) -> tuple[int, int, int]:
    """Of what the kernel writes, in bytes along (batch, seq, heads); of an axis of one element any that is legal."""
    shape = _padded_shape(call)
    strides = contiguous_strides(shape, OUT_BYTES)
    if call.out is not None and not is_staged(call):
        given = call.kind.operand("out", call.out).strides
        strides = tuple(own if extent > 1 else new for own, new, extent in zip(given, strides, shape, strict=True))
    batch, seq, heads, _ = AXES[call.layout]
    return strides[batch], strides[seq], strides[heads]
