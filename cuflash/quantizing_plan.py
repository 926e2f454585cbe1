"""Attention of arrays that are quantized or prepared on the way, on a GPU: the plan, and its workspace."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import TYPE_CHECKING, Any

from . import jit, quantize_plan
from .arrays import Operand
from .config import round_up
from .fp8_layout import TILE, padded, tiles
from .jit import span
from .quantize_plan import QuantizePlan
from .quantized_plan import QuantizedPlan, check_foreseen_gpu, make_plan

if TYPE_CHECKING:
    from .float8_arrays import Float8Arrays
    from .quantize_plan import Sources
    from .quantized import QuantizedTensor
    from .quantized_call import Foreseen

__all__ = ["QuantizingPlan", "make_plan_of_sources", "plan_for", "workspace_of"]

ALIGNMENT = 256
"""Of the parts of a workspace."""


class QuantizingPlan:
    """Everything about a GPU call that quantizes or prepares on the way, into one workspace, but its addresses.

    Parameters
    ----------
    quantize : QuantizePlan
        Its launches make ``parts``.
    attend : QuantizedPlan
    parts : mapping of str to int
        Of the workspace, by the names of the kernels' parameters, and the bytes of each.
    inputs : mapping of str to Operand
        What attention still reads of a call's arrays, or may: ``out`` must lie elsewhere.
    """

    __slots__ = ("_attend", "_offsets", "_quantize", "_size", "_spans", "device")

    def __init__(
        self,
        quantize: QuantizePlan,
        attend: QuantizedPlan,
        parts: Mapping[str, int],
        inputs: Mapping[str, Operand],
    ) -> None:
        self.device = attend.device
        self._quantize = quantize
        self._attend = attend
        self._spans = {name: span(x) for name, x in inputs.items()}
        self._offsets: dict[str, int] = {}
        self._size = 0
        for name, size in parts.items():
            self._offsets[name] = self._size
            self._size += round_up(size, ALIGNMENT)

    def run(self, q: Any, at: dict[str, Any], out: Any, out_at: int) -> Any:
        """Make a call on the current stream; ``at`` has the addresses of q, k and v (and more), and is added to."""
        kind = self._attend.kind
        if out is not None:
            self._refuse_shared(at, out_at)
        if kind.current_device() != self.device:
            with kind.on_device(self.device):
                return self.run(q, at, out, out_at)
        # Kept until the end: what a framework's allocator gets back, it gives away in the order of the stream.
        _workspace, base = kind.empty(q, (max(self._size, 1),), "uint8")
        for name, offset in self._offsets.items():
            at[name] = base + offset
        self._quantize.launch(at, kind.stream(self.device))
        # What is not made is taken from where it is; 8-bit arrays have no means.
        q_parts = at.get("q_payload", at["q"]), at["q_scales"], 0
        k_parts = at.get("k_payload", at["k"]), at["k_scales"], at.get("k_mean", 0)
        v_parts = at["v_payload"], at["v_scales"], at.get("v_mean", 0)
        return self._attend.run_at(q, q_parts, k_parts, v_parts, out, out_at)

    def _refuse_shared(self, at: Mapping[str, Any], out_at: int) -> None:
        out_low, out_high = self._attend.out_span
        for name, (low, high) in self._spans.items():
            if out_at + out_low < at[name] + high and at[name] + low < out_at + out_high:
                raise ValueError(f"out shares memory with {name}, or lies around it; pass an array of its own")


def plan_for(foreseen: Foreseen, key: Hashable | None) -> QuantizingPlan:
    """Plan a checked call of arrays, and enter the plan into the table under its key."""
    call, sources = foreseen
    assert sources is not None
    check_foreseen_gpu(foreseen)
    inputs = {} if isinstance(sources, quantize_plan.Sources) else sources.operands
    plan = QuantizingPlan(make_plan_of_sources(sources), make_plan(call), workspace_of(foreseen), inputs)
    if key is not None:
        jit.keep(jit.QUANTIZING_PLANS, key, plan, jit.MAX_PLANS)
    return plan


def make_plan_of_sources(sources: Sources | Float8Arrays) -> QuantizePlan:
    """What comes before attention where a call's arrays are not yet what the kernels read."""
    if isinstance(sources, quantize_plan.Sources):
        return quantize_plan.make_plan(sources)
    from . import prepare_plan

    return prepare_plan.make_plan(sources)


def workspace_of(foreseen: Foreseen) -> dict[str, int]:
    """What is made of a call's arrays before attention, by the kernels' names for it, and the bytes of each."""
    call, sources = foreseen
    if sources is None:
        return {}
    if isinstance(sources, quantize_plan.Sources):
        tensors = {"q": call.q, "k": call.k, "v": call.v}
        return {f"{role}_{part}": size for role, x in tensors.items() for part, size in workspace_parts(x).items()}
    from . import prepare_plan

    return prepare_plan.parts(sources)


def workspace_parts(x: QuantizedTensor) -> dict[str, int]:
    """The arrays of a tensor that `cuflash.quantize` would make, and their bytes."""
    batch, seq, heads, dim = x.sizes
    parts = {
        "payload": batch * heads * padded(dim) * (TILE * tiles(seq) if x.role == "v" else seq),
        "scales": 4 * batch * heads * tiles(seq),
    }
    return parts if x.role == "q" else parts | {"mean": 4 * batch * heads * padded(dim)}
