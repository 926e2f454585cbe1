"""`cuflash.jax.attention`: attention that JAX compiles, maps and differentiates, on the CPU and on GPUs.

XLA calls back into Python (`jax.experimental.buffer_callback`): no compiler is needed on the host, and nothing is
copied. A callback gets the buffers of inputs and results where they lie and, on a GPU, the stream of the computation;
it queues the kernels of `cuflash.attention` and `cuflash.attention_backward` there and returns.

Everything that shapes, dtypes and options can tell is checked while JAX traces; on which device a call runs, and with
it what only GPUs refuse, is known to the callback alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from .api import compute
from .arrays import bridge, xla_buffers
from .backward import gradients
from .checks import check_call, check_flag
from .errors import UnsupportedError
from .request import Causal

try:
    import jax
    from jax.experimental.buffer_callback import buffer_callback
except ImportError as error:
    raise ImportError(
        "cuflash.jax needs JAX 0.6.1 or later, which is not installed: pip install jax, on a GPU 'jax[cuda12]' or "
        "'jax[cuda13]' as with cuflash itself"
    ) from error

__all__ = ["attention"]

Array: TypeAlias = Any
"""A `jax.Array`; tracers are."""


def attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    causal: bool | str = False,
    scale: float | None = None,
    layout: str = "bshd",
    return_lse: bool = False,
    deterministic: bool = False,
) -> Any:
    """Exact attention for JAX: `cuflash.attention` under jax.jit, jax.grad, jax.vmap, jax.checkpoint, jax.shard_map.

    The contract is that of `cuflash.attention`, which hands tracers over to this function and lacks `deterministic`.

    Parameters
    ----------
    q : jax.Array (B, Nq, Hq, D)
    k : jax.Array (B, Nk, Hk, D)
    v : jax.Array (B, Nk, Hk, Dv)
        Of one dtype: float16 or bfloat16, on the CPU also float32 and float64.
    causal : False, True, "bottom_right" or "top_left"
    scale : float, optional
        A Python number, fixed when the call is traced; 1/sqrt(D) by default. For one that JAX computes, multiply `q`.
    layout : {"bshd", "bhsd"}
    return_lse : bool
        Return the log-sum-exp as well; gradients flow through it.
    deterministic : bool
        Whether gradients must repeat bit for bit on a GPU, too; a Python value.

    Returns
    -------
    out : jax.Array (B, Nq, Hq, Dv)
        Of the dtype of q.
    lse : jax.Array (B, Hq, Nq)
        With ``return_lse``: float32, for float64 inputs float64.

    Raises
    ------
    ValueError, TypeError, UnsupportedError
        As for `cuflash.attention`, while JAX traces. UnsupportedError also where a second derivative is asked for.
    jax.errors.JaxRuntimeError, ValueError
        From JAX, for what is only known when the call runs: that float32 is not for GPUs, that a kernel could not be
        compiled. The message holds cuflash's own.

    Notes
    -----
    Gradients are those of `cuflash.attention_backward`. Forward-mode and second derivatives do not exist.

    jax.vmap makes one call of a larger batch; arrays that it does not map are repeated in memory. Sharded arrays are
    computed shard by shard inside jax.shard_map; under jax.jit alone XLA gathers them on each device first.

    The first run of a kind on a GPU compiles a kernel, in about a second; `cuflash.warmup` of concrete arrays does that
    ahead.

    Examples
    --------
    >>> loss = lambda q, k, v: cuflash.jax.attention(q, k, v, causal=True).sum()  # doctest: +SKIP
    >>> dq, dk, dv = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(q, k, v)  # doctest: +SKIP
    """
    _check_arrays({"q": q, "k": k, "v": v})
    if isinstance(scale, jax.Array):
        raise TypeError(
            "scale is a JAX array; accepted are Python numbers, fixed when the call is traced: pass float(scale), or, "
            "for one that JAX computes, multiply q by it and pass scale=1.0"
        )
    stand_ins = [np.broadcast_to(np.empty((), x.dtype), x.shape) for x in (q, k, v)]
    request = check_call(stand_ins, None, causal=causal, scale=scale, layout=layout, return_lse=return_lse)
    out = jax.ShapeDtypeStruct(request.out_shape, q.dtype)
    lse = jax.ShapeDtypeStruct(request.lse_shape, request.lse_dtype)
    fixed = check_flag("deterministic", deterministic)
    call = _Call(request.causal, request.scale, request.layout, fixed, out, lse)
    axes = _varying_axes(q, k, v)
    return _attention(call, request.return_lse, *(_vary(x, axes) for x in (q, k, v)))


def _check_arrays(named: dict[str, Any]) -> None:
    for name, x in named.items():
        if isinstance(x, jax.Array):
            continue
        found = bridge.label(name, x)
        if name != "q" and isinstance(named["q"], jax.Array):
            raise TypeError(bridge.mixed("JAX array", name, found))
        raise TypeError(f"{name} is a {found}; cuflash.jax.attention takes JAX arrays: pass jax.numpy.asarray({name})")


@dataclass(frozen=True)
class _Call:
    """A checked call but for its arrays: what is fixed when JAX traces, and a key of JAX's caches."""

    causal: Causal
    scale: float
    layout: str
    deterministic: bool
    out: jax.ShapeDtypeStruct
    lse: jax.ShapeDtypeStruct


# --- what XLA calls --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Forward:
    """Writes the output and, if there are two results, the LSE."""

    call: _Call

    def __call__(self, context: Any, results: Any, *inputs: Any) -> None:
        call = self.call
        with xla_buffers.on_stream_of(context, inputs[0]):
            q, k, v, out = (xla_buffers.view(x, 4) for x in (*inputs, results[0]))
            lse = xla_buffers.view(results[1], 3) if len(results) == 2 else None
            compute(q, k, v, call.causal, call.scale, call.layout, lse is not None, out, lse)


@dataclass(frozen=True)
class _Backward:
    """Writes the gradients of q, k and v; of its inputs, the last, the gradient of the LSE, may be left out."""

    call: _Call

    def __call__(self, context: Any, results: Any, *inputs: Any) -> None:
        call = self.call
        with xla_buffers.on_stream_of(context, inputs[0]):
            dout, q, k, v, out = (xla_buffers.view(x, 4) for x in inputs[:5])
            lse, *dlse = (xla_buffers.view(x, 3) for x in inputs[5:])
            dq, dk, dv = (xla_buffers.view(x, 4) for x in results)
            options = call.causal, call.scale, call.layout, call.deterministic
            gradients(dout, q, k, v, out, lse, dlse[0] if dlse else None, options, (dq, dk, dv))


def _call_back(callback: _Forward | _Backward, results: tuple[jax.ShapeDtypeStruct, ...], *arrays: Array) -> Any:
    # Not for XLA's command buffers (CUDA graphs): the first call of a kind loads a kernel, which no capture takes.
    given = buffer_callback(callback, results, vmap_method="broadcast_all")(*arrays)
    axes = _varying_axes(*arrays)
    return tuple(_vary(x, axes) for x in given)


def _refuse_derivative(*_: Any) -> Any:
    raise UnsupportedError(
        "cuflash.jax.attention has first derivatives in reverse mode (jax.grad, jax.vjp, jax.jacrev) and no others: "
        "take jax.nn.dot_product_attention where forward-mode or second derivatives are needed"
    )


# Inside jax.shard_map an array's type has the mesh axes along which it varies; a callback's results come without.


def _varying_axes(*arrays: Array) -> frozenset[str]:
    """The mesh axes along which any of the arrays varies."""
    types = [jax.typeof(x) for x in arrays]
    if hasattr(types[0], "manual_axis_type"):
        return frozenset().union(*(t.manual_axis_type.varying for t in types))
    return frozenset().union(*(getattr(t, "vma", ()) for t in types))  # JAX before 0.10


def _vary(x: Array, axes: frozenset[str]) -> Array:
    missing = tuple(sorted(axes - _varying_axes(x)))
    if not missing:
        return x
    if hasattr(jax.lax, "pcast"):
        return jax.lax.pcast(x, missing, to="varying")
    return jax.lax.pvary(x, missing)  # JAX before 0.9


_differentiable_once: Any = jax.custom_jvp(_call_back, nondiff_argnums=(0, 1))
_differentiable_once.defjvp(_refuse_derivative)


# --- what JAX differentiates -----------------------------------------------------------------------------------


def _attend(call: _Call, return_lse: bool, q: Array, k: Array, v: Array) -> Any:
    results = (call.out, call.lse) if return_lse else (call.out,)
    results = _differentiable_once(_Forward(call), results, q, k, v)
    return results if return_lse else results[0]


def _attend_and_save(call: _Call, return_lse: bool, q: Array, k: Array, v: Array) -> Any:
    out, lse = _attend(call, True, q, k, v)
    return (out, lse) if return_lse else out, (q, k, v, out, lse)


def _differentiate(call: _Call, return_lse: bool, saved: Any, arriving: Any) -> Any:
    dout, *dlse = arriving if return_lse else (arriving,)
    grads = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in saved[:3])
    return _differentiable_once(_Backward(call), grads, dout, *saved, *dlse)


_differentiable: Any = jax.custom_vjp(_attend, nondiff_argnums=(0, 1))
_differentiable.defvjp(_attend_and_save, _differentiate)
_attention: Any = jax.jit(_differentiable, static_argnums=(0, 1))
"""Compiled also where the caller compiles nothing: JAX's dispatch takes a third of the time then."""
