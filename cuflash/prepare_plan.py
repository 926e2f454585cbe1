"""Launch plans of the kernel that makes of the caller's 8-bit arrays what the attention kernels read.

Row-major V is transposed here, once, into the image that the quantizer would have written, and not by the attention
kernel: that would repeat it for every query tile, and each architecture would need a form of its own. Q and K are
copied where TMA cannot take them as they are, and not touched where it can. Scales of every accepted shape become one
for each tile. `cuflash.explain` counts the bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from . import jit
from .arrays import ITEM_BYTES
from .errors import UnsupportedError
from .float8_arrays import Float8Arrays
from .fp8_layout import ROLES, TILE, padded, row_strides, tiles
from .params import fast_div, stride_values
from .prepare_kernels import PREPARE, SCALE_AXES
from .problem import AttentionProblem
from .quantize_plan import MAX_WORK, Launch, QuantizePlan

if TYPE_CHECKING:
    from .jit import LoadedKernel

__all__ = ["addresses", "make_plan", "parts", "plan_with", "traffic"]


def make_plan(arrays: Float8Arrays) -> QuantizePlan:
    """Plan a GPU call; compiles and loads its kernel if that was not done before.

    Raises
    ------
    UnsupportedError
        There are more tiles than a launch takes.
    """
    device = arrays.device
    return plan_with(arrays, jit.device_arch(device).name, lambda problem: jit.kernel_for(problem, device))


def plan_with(arrays: Float8Arrays, arch: str, load: Callable[[AttentionProblem], LoadedKernel]) -> QuantizePlan:
    """The same for a target, by the kernels that ``load`` gives."""
    if 0 in (_count(arrays, "q"), _count(arrays, "v")):
        return QuantizePlan(arrays.device, ())
    blocks = _work(arrays)[-1]
    if blocks > MAX_WORK:
        raise UnsupportedError(f"the call has {blocks} tiles of 128 tokens of a head; accepted are {MAX_WORK}")
    loaded = load(arrays.problem(arch))
    return QuantizePlan(arrays.device, (Launch(loaded, PREPARE, blocks, _tail(arrays)),))


def addresses(arrays: Float8Arrays) -> dict[str, int | float]:
    """Of a call's arrays, and its scales that are numbers, by the names of the kernel's parameters."""
    found: dict[str, int | float] = {role: x.address for role, x in arrays.operands.items()}
    for role, scale in arrays.scales.items():
        if scale.array is None:
            found[f"{role}_number"] = scale.number
        else:
            found[f"{role}_scale"] = scale.array.address
    return found


def parts(arrays: Float8Arrays) -> dict[str, int]:
    """What the kernel writes, by the names of its parameters, and the bytes of each."""
    found = {}
    for role in ROLES:
        batch, seq, heads, dim = arrays.sizes(role)
        if role in (*arrays.copied, "v"):
            found[f"{role}_payload"] = batch * heads * padded(dim) * (TILE * tiles(seq) if role == "v" else seq)
        found[f"{role}_scales"] = ITEM_BYTES["float32"] * _count(arrays, role)
    return found


def traffic(arrays: Float8Arrays) -> int:
    """The bytes that the kernel reads and writes."""
    total = sum(parts(arrays).values())
    for role in (*arrays.copied, "v"):
        batch, seq, heads, dim = arrays.sizes(role)
        total += batch * seq * heads * dim
    for scale in arrays.scales.values():
        if scale.array is not None:
            elements = 1
            for extent in scale.array.shape:
                elements *= extent
            total += ITEM_BYTES["float32"] * elements
    return total


def _count(arrays: Float8Arrays, role: str) -> int:
    """Tiles of an operand, each of which has a scale."""
    batch, seq, heads, _ = arrays.sizes(role)
    return batch * heads * tiles(seq)


def _work(arrays: Float8Arrays) -> list[int]:
    """How many tiles that the kernel moves have come with Q, with K and with V."""
    ends, end = [], 0
    for role in ROLES:
        end += _count(arrays, role) if role in (*arrays.copied, "v") else 0
        ends.append(end)
    return ends


def _tail(arrays: Float8Arrays) -> bytes:
    (_, seqlen_q, heads_q, _), (_, seqlen_k, heads_k, _) = arrays.sizes("q"), arrays.sizes("k")
    k_begin, v_begin, _ = _work(arrays)
    values: dict[str, Any] = {
        "k_begin": k_begin,
        "v_begin": v_begin,
        "q_count": _count(arrays, "q"),
        "k_count": _count(arrays, "k"),
        "seqlen_q": seqlen_q,
        "seqlen_k": seqlen_k,
        "q_heads": fast_div(heads_q),
        "q_tiles": fast_div(tiles(seqlen_q)),
        "k_heads": fast_div(heads_k),
        "k_tiles": fast_div(tiles(seqlen_k)),
    }
    for role in ROLES:
        values |= stride_values(role, arrays.strides(role))
        values |= stride_values(f"{role}_scale", arrays.scales[role].strides, SCALE_AXES)
    for role in ("q", "k"):
        values |= stride_values(f"{role}_payload", row_strides(arrays.operands[role].shape, arrays.layout))
    return PREPARE.pack_tail(values)
