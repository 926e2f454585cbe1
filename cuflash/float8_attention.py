"""Attention on 8-bit arrays of the caller, with scales of the caller: checks, the CPU's computation, the GPU's door."""

from __future__ import annotations

import numbers
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from .arrays import CPU, kind_of
from .checks import check_factor, check_layout, check_placed, refuse_shared
from .dequantized import Dequantized
from .errors import UnsupportedError
from .float8_arrays import Float8Arrays, check_arrays
from .fp8 import Float8, format_of
from .fp8_layout import IMAGE, ROLES, ROWS, Role, by_head, tiles
from .jit import QUANTIZING_PLANS
from .quantized import QuantizedTensor
from .quantized_attention import attend_on_cpu
from .quantized_call import Foreseen, Options, QuantizedCall, Scales, checked_call
from .request import TMA_BYTES

if TYPE_CHECKING:
    from .arrays import Operand

__all__ = ["attention_float8", "foresee_float8", "view_foreign"]

SOURCE_DTYPE = "bfloat16"
"""What the codes are taken for having been: the dtype of the result unless ``out_dtype`` names one."""


def attention_float8(q: Any, k: Any, v: Any, scales: Scales, options: Options, out: Any = None) -> Any:
    """`cuflash.attention` of 8-bit arrays; ``scales`` of each, or None, by ``"q"``, ``"k"`` and ``"v"``."""
    kind = kind_of(q)
    if kind is None:
        return _of_foreign(q, k, v, scales, options, out)
    out_key, out_at, at = None, 0, cast("dict[str, int | float]", {})
    key: Any
    try:
        geometry = kind.geometry
        (q_key, q_at), (k_key, k_at), (v_key, v_at) = geometry(q), geometry(k), geometry(v)
        at["q"], at["k"], at["v"] = q_at, k_at, v_at
        scale_keys = [_key_of(role, scales[role], geometry, at) for role in ROLES]
        if out is not None:
            out_key, out_at = geometry(out)
        places = q_at & 15, k_at & 15, v_at & 15, out_at & 15
        key = (q_key, k_key, v_key, *scale_keys, out_key, places, options)
        plan = QUANTIZING_PLANS.get(key)
    except (AttributeError, TypeError, RuntimeError):  # on the CPU, followed, or not what it should be: checked below
        key = plan = None
    if plan is None:
        foreseen = foresee_float8(q, k, v, scales, options, out)
        call, arrays = foreseen.call, cast(Float8Arrays, foreseen.sources)
        if arrays.device == CPU:
            return _attend_on_cpu(call, arrays)
        from . import prepare_plan
        from .quantizing_plan import plan_for

        plan = plan_for(foreseen, key)
        at = prepare_plan.addresses(arrays)
        out_at = 0 if out is None else call.kind.operand("out", out).address
    return plan.run(q, at, out, out_at)


def _key_of(role: str, value: Any, geometry: Any, at: dict[str, int | float]) -> Any:
    """What a plan may depend on of a scale: all but a number, or an address, which goes to ``at``."""
    if value is None:
        at[f"{role}_number"] = 1.0
        return None
    if isinstance(value, numbers.Real):
        at[f"{role}_number"] = check_factor(f"{role}_scale", value)
        return None
    found, at[f"{role}_scale"] = geometry(value)
    return found


def view_foreign(arrays: Mapping[str, Any], scales: Scales) -> tuple[dict[str, Any], dict[str, Any]]:
    """Views of arrays that cuflash does not address itself, and of the scales among them; of others, themselves."""
    from .arrays import bridge

    if kind_of(arrays["q"]) is not None:
        return dict(arrays), dict(scales)
    names = {f"{role}_scale": x for role, x in scales.items() if not _is_number(x)}
    views = bridge.views({**arrays, **names}, {})
    return {name: views[name] for name in arrays}, {role: views.get(f"{role}_scale", x) for role, x in scales.items()}


def _of_foreign(q: Any, k: Any, v: Any, scales: Scales, options: Options, out: Any) -> Any:
    """The call by views of its arrays, and the result in their kind."""
    from .arrays import bridge

    if bridge.is_traced(q, k, v, *scales.values()):
        raise UnsupportedError(
            "attention of 8-bit floats is not for JAX tracers: make the call outside of jax.jit, jax.grad, jax.vmap "
            "and the like"
        )
    arrays = {f"{role}_scale": x for role, x in scales.items() if not _is_number(x)}

    def attend(views: dict[str, Any]) -> Any:
        viewed = {role: views.get(f"{role}_scale", x) for role, x in scales.items()}
        return attention_float8(views["q"], views["k"], views["v"], viewed, options, views.get("out"))

    outputs = {} if out is None else {"out": out}
    return bridge.call(attend, {"q": q, "k": k, "v": v, **arrays}, outputs)


def _is_number(x: Any) -> bool:
    return x is None or isinstance(x, numbers.Real)


def foresee_float8(q: Any, k: Any, v: Any, scales: Scales, options: Options, out: Any = None) -> Foreseen:
    """Check a call whole, before anything is allocated or launched."""
    layout = check_layout(options.layout)
    if kind := kind_of(q):
        given = {"q": q, "k": k, "v": v} | {f"{role}_scale": x for role, x in scales.items()}
        if refusal := kind.refusal(given, "attention of 8-bit floats"):
            raise UnsupportedError(refusal)
    arrays = check_arrays({"q": q, "k": k, "v": v}, scales, layout)
    q8, k8, v8 = (_as_if_quantized(arrays, role) for role in ROLES)
    call = checked_call(q8, k8, v8, options, out, (_strides(arrays, "q"), _strides(arrays, "k")))
    if arrays.device != CPU:
        check_placed(scale.array for scale in arrays.scales.values() if scale.array is not None)
    return Foreseen(call, arrays)


def _as_if_quantized(arrays: Float8Arrays, role: str) -> QuantizedTensor:
    """What the kernels are given, as far as sizes go."""
    x = arrays.operands[role]
    shape = cast("tuple[int, int, int, int]", tuple(x.shape))
    dtype, storage = cast(Float8, x.dtype), IMAGE if role == "v" else ROWS
    return QuantizedTensor(x.array, x.array, None, dtype, cast(Role, role), arrays.layout, storage, shape, SOURCE_DTYPE)


def _strides(arrays: Float8Arrays, role: str) -> tuple[int, int, int] | None:
    """Of codes that stay where they are; of an axis of one element any that is legal."""
    if role in arrays.copied:
        return None
    batch, seq, heads, _ = (stride or TMA_BYTES for stride in arrays.strides(role))
    return batch, seq, heads


# --- on the CPU --------------------------------------------------------------------------------------------------


def _attend_on_cpu(call: QuantizedCall, arrays: Float8Arrays) -> Any:
    operands: dict[str, Operand] = dict(arrays.operands)
    if call.out is not None:
        refuse_shared(call.kind.operand("out", call.out), operands.values())
    return attend_on_cpu(call, [_dequantized(arrays, role) for role in ROLES])


def _dequantized(arrays: Float8Arrays, role: str) -> Dequantized:
    x, scale = arrays.operands[role], arrays.scales[role]
    batch, seq, heads, dim = arrays.sizes(role)
    codes = x.kind.numpy(x.array).view(np.uint8).transpose(by_head(arrays.layout))
    factors: Any = np.float32(scale.number)
    if scale.array is not None:
        factors = scale.array.kind.numpy(scale.array.array)
        factors = factors.reshape(factors.shape + (1,) * (3 - factors.ndim))
    factors = np.broadcast_to(factors, (batch, heads, tiles(seq)))
    return Dequantized(codes, factors, None, format_of(x.dtype).values(), (batch, heads, seq, dim), in_rows=True)
