"""`attention_backward`: the gradients of attention, on the CPU so far."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .arrays import CPU, Operand, kind_of
from .checks import check_call, check_fellow, check_flag, check_written, refuse_shared
from .errors import UnsupportedError
from .request import AXES, Request

__all__ = ["attention_backward"]

GRADS = ("grads[0]", "grads[1]", "grads[2]")


def attention_backward(
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    *,
    dlse: Any = None,
    causal: bool | str = False,
    scale: float | None = None,
    layout: str = "bshd",
    deterministic: bool = False,
    grads: tuple[Any, Any, Any] | None = None,
) -> tuple[Any, Any, Any]:
    """Gradients of Q, K and V, from that of the output of `attention`; without the matrix of scores in memory.

    Parameters
    ----------
    dout : array (B, Nq, Hq, Dv)
        The gradient that arrives at the output.
    q : array (B, Nq, Hq, D)
    k : array (B, Nk, Hk, D)
    v : array (B, Nk, Hk, Dv)
        What `attention` was given: NumPy arrays, and on the CPU torch tensors, JAX arrays and others with
        ``__dlpack__``. float16, bfloat16, float32 or float64; any strides.
    out : array (B, Nq, Hq, Dv)
    lse : array (B, Hq, Nq)
        What ``attention(q, k, v, ..., return_lse=True)`` gave with the same `causal`, `scale` and `layout`. The LSE is
        float32, for float64 inputs float64.
    dlse : array (B, Hq, Nq), optional
        The gradient that arrives at the LSE, of its dtype; none by default.
    causal : False, True, "bottom_right" or "top_left"
    scale : float, optional
    layout : {"bshd", "bhsd"}
        As for `attention`.
    deterministic : bool
        Whether results must repeat bit for bit. On the CPU they always do.
    grads : (dq, dk, dv), optional
        Arrays that receive the gradients: of the inputs' kind, dtype and device, with the shapes of q, k and v, any
        strides, sharing no memory with the inputs or each other.

    Returns
    -------
    dq, dk, dv : arrays of the shapes of q, k and v
        Of the inputs' kind and dtype; contiguous unless given. Those of k and v are summed over the query heads that
        share a key/value head.

    Raises
    ------
    ValueError
        Shapes or options that do not fit, arrays on different devices, an array of `grads` that is read-only or
        overlaps.
    TypeError
        Element types or kinds of arrays that are not accepted, or mixed.
    UnsupportedError
        Arrays on a GPU, and other legal requests that cuflash does not serve; the message says what to do.

    Notes
    -----
    A row whose LSE is -inf saw no key: its gradient is 0 and it adds nothing to others, whatever `dout` and `dlse` hold
    there. The computation is in float32, for float64 in float64, and nothing is rounded in between. It takes `lse` at
    its word: probabilities are exp(score - lse), at most 1, which the rounding of a float32 LSE changes by
    6e-8 * abs(lse) at most, and the LSE of more keys than `k` holds gives the gradients of this part of the keys; an
    LSE of fewer keys is no input. Where scores are so large that the LSE is +inf in its dtype, gradients of the row
    and of the keys at its maximum are NaN; scores that round to -inf count as not seen.

    NaN and infinity in `q`, `dout` or `dlse` reach the gradients of their row and of the keys that it sees; in `k` or
    `v`, those of the rows that see the key, and of all keys that these rows see. An exception in the midst, such as a
    lack of memory, may leave `grads` partly written.

    For torch, `attention` calls this function when autograd asks; it is not differentiable itself.

    The method is that of Dao, FlashAttention-2: Faster Attention with Better Parallelism and Work Partitioning, 2023,
    section 3.1.2 on the backward pass.

    Examples
    --------
    >>> out, lse = cuflash.attention(q, k, v, causal=True, return_lse=True)  # doctest: +SKIP
    >>> dq, dk, dv = cuflash.attention_backward(dout, q, k, v, out, lse, causal=True)  # doctest: +SKIP
    """
    outputs = _named_grads(grads)
    inputs = {"q": q, "k": k, "v": v, "dout": dout, "out": out, "lse": lse}
    if dlse is not None:
        inputs["dlse"] = dlse
    options = {"causal": causal, "scale": scale, "layout": layout, "deterministic": deterministic}
    if kind_of(q) is None:
        from .arrays import bridge

        results = bridge.call(lambda views: _backward(views, options), inputs, outputs)
    else:
        results = _backward(inputs | outputs, options)
    return results  # type: ignore[no-any-return]


def _named_grads(grads: Any) -> dict[str, Any]:
    if grads is None:
        return {}
    if not isinstance(grads, tuple | list):
        raise TypeError(f"grads is a {type(grads).__qualname__}; accepted are None and a triple of arrays (dq, dk, dv)")
    if len(grads) != 3:
        raise ValueError(f"grads has {len(grads)} elements; accepted are three, the arrays (dq, dk, dv)")
    return dict(zip(GRADS, grads, strict=True))


@dataclass(frozen=True)
class _Checked:
    """A checked call: that of the forward pass, and what comes with the gradients."""

    forward: Request
    dout: Operand
    out: Operand
    lse: Operand
    dlse: Operand | None
    grads: tuple[Operand, ...]


def _backward(arrays: Mapping[str, Any], options: Mapping[str, Any]) -> Any:
    """The call on arrays that cuflash addresses itself, by name."""
    call = _check(arrays, **options)
    kind, forward = call.forward.q.kind, call.forward
    grads = tuple(x.array for x in call.grads)
    for grad in grads:
        kind.written(grad)
    if not grads:
        grads = tuple(kind.empty(x.array, x.shape)[0] for x in (forward.q, forward.k, forward.v))
    _run_on_cpu(call, grads)
    return grads


def _run_on_cpu(call: _Checked, grads: tuple[Any, ...]) -> None:
    from .cpu_backward import attention_backward_cpu

    kind, forward = call.forward.q.kind, call.forward
    batch, seq, heads, dim = AXES[forward.layout]
    inputs = (x.array for x in (call.dout, forward.q, forward.k, forward.v, call.out))
    dout, q, k, v, out, *views = (kind.numpy(x).transpose(batch, heads, seq, dim) for x in (*inputs, *grads))
    kind.untraced(attention_backward_cpu)(
        dout,
        q,
        k,
        v,
        out,
        kind.numpy(call.lse.array),
        dlse=None if call.dlse is None else kind.numpy(call.dlse.array),
        causal=forward.causal,
        scale=forward.scale,
        grads=views,
    )


# --- checks ----------------------------------------------------------------------------------------------------


def _check(arrays: Mapping[str, Any], *, causal: Any, scale: Any, layout: Any, deterministic: Any) -> _Checked:
    """Check the call whole, before anything is allocated or written."""
    inputs = [arrays[name] for name in ("q", "k", "v")]
    forward = check_call(inputs, None, causal=causal, scale=scale, layout=layout)
    check_flag("deterministic", deterministic)
    q = forward.q
    if q.device != CPU:
        raise UnsupportedError(
            f"q is on {q.place}, and cuflash.attention_backward runs on the CPU only so far: gradients on the GPU come "
            "with a later release; pass NumPy arrays, such as cupy.asnumpy(q), or CPU tensors, such as q.cpu()"
        )
    out_shape = forward.out_shape
    dout, out = (_adopt(q, arrays, name, out_shape, q.dtype, "this call's output") for name in ("dout", "out"))
    lse, dlse = (
        _adopt(q, arrays, name, forward.lse_shape, forward.lse_dtype, "the LSE, (batch, query heads, query length),")
        if name in arrays
        else None
        for name in ("lse", "dlse")
    )
    assert lse is not None
    call = _Checked(forward, dout, out, lse, dlse, _check_grads(forward, arrays))
    for i, grad in enumerate(call.grads):
        others = (q, forward.k, forward.v, dout, out, lse, dlse, *call.grads[:i])
        refuse_shared(grad, (x for x in others if x is not None))
    return call


def _adopt(q: Operand, arrays: Mapping[str, Any], name: str, shape: tuple[int, ...], dtype: str, whose: str) -> Operand:
    """An array that has to have a shape and a dtype."""
    kind = kind_of(arrays[name])
    if kind is None:
        from .arrays import bridge

        raise TypeError(bridge.mixed(q.kind.LABEL, name, bridge.label(name, arrays[name])))
    x = kind.operand(name, arrays[name])
    check_fellow(q, x)
    if x.shape != shape:
        raise ValueError(f"{name} has shape {x.shape}; {whose} has {shape}")
    if x.dtype != dtype:
        raise TypeError(f"{name} has dtype {x.dtype}; for q of dtype {q.dtype} it must be {dtype}")
    return x


def _check_grads(forward: Request, arrays: Mapping[str, Any]) -> tuple[Operand, ...]:
    if GRADS[0] not in arrays:
        return ()
    grads = []
    for name, x in zip(GRADS, (forward.q, forward.k, forward.v), strict=True):
        grad = _adopt(forward.q, arrays, name, x.shape, x.dtype, f"the gradient of {x.name}")
        check_written(grad, x.shape, f"the gradient of {x.name} has")
        grads.append(grad)
    return tuple(grads)
