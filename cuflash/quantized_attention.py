"""Attention on quantized operands: the way of a call, the CPU's computation, and the door to the GPU's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from .arrays import CPU, kind_of
from .dequantized import Dequantized
from .errors import UnsupportedError
from .fp8_layout import by_head
from .jit import QUANTIZED_PLANS, QUANTIZING_PLANS
from .quantization import quantize_qkv
from .quantized_call import (
    Options,
    QuantizedCall,
    Scales,
    check_precision,
    check_quantized,
    foresee,
    is_quantized,
    takes_scales,
)

__all__ = ["attend", "attend_on_cpu", "attention_quantized", "attention_quantizing", "warm_up"]


def attend(q: Any, k: Any, v: Any, options: Options, out: Any, scales: Scales) -> Any:
    """`cuflash.attention` of quantized tensors, of 8-bit arrays, or of arrays that shall be quantized."""
    if takes_scales(q, scales):
        from .float8_attention import attention_float8

        check_precision(options.precision)
        return attention_float8(q, k, v, scales, options, out)
    if is_quantized(q, options):
        return attention_quantized(q, k, v, options, out)
    return attention_quantizing(q, k, v, options, out)


def attention_quantizing(q: Any, k: Any, v: Any, options: Options, out: Any = None) -> Any:
    """`cuflash.attention` with a ``precision``: quantizes, then attends."""
    kind = kind_of(q)
    if kind is None:
        from .arrays import bridge

        if bridge.is_traced(q, k, v):
            raise UnsupportedError(
                "precision='fp8' is not for JAX tracers: call it outside of jax.jit, jax.grad, jax.vmap and the like, "
                "or without precision"
            )
        outputs = {} if out is None else {"out": out}
        return bridge.call(
            lambda views: attention_quantizing(**views, options=options), {"q": q, "k": k, "v": v}, outputs
        )
    out_key, out_at, at = None, 0, {}
    key: Any
    try:
        geometry = kind.geometry
        (q_key, at["q"]), (k_key, at["k"]), (v_key, at["v"]) = geometry(q), geometry(k), geometry(v)
        if out is not None:
            out_key, out_at = geometry(out)
        key = (q_key, k_key, v_key, out_key, (at["q"] | at["k"] | at["v"] | out_at) & 15, options)
        plan = QUANTIZING_PLANS.get(key)
    except (AttributeError, TypeError, RuntimeError):  # on the CPU, followed, or not what it should be: checked below
        key = plan = None
    if plan is None:
        foreseen = foresee(q, k, v, options, out)
        call = foreseen.call
        if call.q.device == CPU:
            quantized = quantize_qkv(q, k, v, layout=call.layout)
            return attention_quantized(*quantized, options._replace(out_dtype=call.out_dtype), out)
        from .quantizing_plan import plan_for

        plan = plan_for(foreseen, key)
        at = {name: call.kind.operand(name, x).address for name, x in (("q", q), ("k", k), ("v", v))}
        out_at = 0 if out is None else call.kind.operand("out", out).address
    return plan.run(q, at, out, out_at)


def attention_quantized(q: Any, k: Any, v: Any, options: Options, out: Any = None) -> Any:
    """`cuflash.attention` of quantized tensors."""
    out_key, out_at = None, 0
    key: Any
    try:
        if out is not None:
            out_key, out_at = q.kind.geometry(out)
        key = (q.traits, k.traits, v.traits, out_key, out_at & 15, options)
        plan = QUANTIZED_PLANS.get(key)
    except (AttributeError, TypeError, RuntimeError):  # on the CPU, or not what it should be: checked below
        key = plan = None
    if plan is None:
        call = check_quantized(q, k, v, options, out)
        if call.q.device == CPU:
            return attend_on_cpu(call, [Dequantized.of(x) for x in (call.q, call.k, call.v)])
        from .quantized_plan import plan_for

        plan = plan_for(call, key)
        out_at = 0 if out is None else call.kind.operand("out", out).address
    return plan.run(q, k, v, out, out_at)


def warm_up(q: Any, k: Any, v: Any, options: Options, out: Any, scales: Scales) -> tuple[str, ...]:
    """`cuflash.warmup` of such calls."""
    foreseen = foresee(q, k, v, options, out, scales)
    call, sources = foreseen
    if call.q.device == CPU:
        return ()
    from . import quantized_plan, quantizing_plan

    quantized_plan.check_foreseen_gpu(foreseen)
    launches = () if sources is None else quantizing_plan.make_plan_of_sources(sources).launches
    plan = quantized_plan.make_plan(call)
    launches += () if plan.shift is None else plan.shift.launches
    loaded = [launch.loaded for launch in launches] + ([] if plan.attend is None else [plan.attend.loaded])
    return tuple(each.kernel.symbol for each in loaded)


def attend_on_cpu(call: QuantizedCall, operands: Sequence[Dequantized]) -> Any:
    """The quantized function without further rounding: attention of the dequantized operands, which exist by tiles."""
    from .cpu import Array, attention_cpu

    kind, q = call.kind, call.q
    out = call.out
    if out is None:
        if call.out_dtype == "bfloat16":
            import ml_dtypes  # noqa: F401  # NumPy knows the name from then on
        out, _ = kind.empty(q.payload, call.out_shape, call.out_dtype)
    kind.written(out)
    lse = kind.empty(q.payload, call.lse_shape, "float32")[0] if call.return_lse else None
    attention_cpu(
        *(cast(Array, x) for x in operands),
        causal=call.causal,
        scale=call.scale,
        out=kind.numpy(out).transpose(by_head(call.layout)),
        lse=None if lse is None else kind.numpy(lse),
    )
    return out if lse is None else (out, lse)
