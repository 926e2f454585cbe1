"""`attention_backward`: the gradients of attention."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import TYPE_CHECKING, Any

from . import jit
from .arrays import CPU, Kind, Operand, kind_of
from .backward_request import BackwardRequest
from .checks import check_call, check_fellow, check_flag, check_gpu, check_written, refuse_shared
from .request import AXES, Request

if TYPE_CHECKING:
    from .backward_plan import BackwardPlan

__all__ = ["attention_backward"]

INPUTS = ("q", "k", "v", "dout", "out", "lse", "dlse")
ROW_INPUTS = ("lse", "dlse")
"""Of float32 (float64 for float64)."""
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
        What `attention` was given: CuPy or NumPy arrays, torch tensors (CUDA or CPU), JAX arrays or other arrays with
        ``__dlpack__``. float16 or bfloat16, on the CPU also float32 and float64; any strides.
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
        Whether results must repeat bit for bit. On the CPU they always do, and those of k and v do everywhere; on a GPU
        the sums of dq come in any order otherwise.
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
        A legal request that cuflash does not serve; the message says what to do.
    CompileError, MissingKernelError, DriverError
        A kernel could not be made, found or run.

    Notes
    -----
    A row whose LSE is -inf saw no key: its gradient is 0 and it adds nothing to others, whatever `dout` and `dlse` hold
    there. The computation is in float32, for float64 in float64, and on the CPU nothing is rounded in between; on a GPU
    the probabilities and the gradients of the scores are, to the inputs' dtype, as operands of the last products. It
    takes `lse` at its word: probabilities are exp(score - lse), at most 1, which the rounding of a float32 LSE changes
    by 6e-8 * abs(lse) at most, and the LSE of more keys than `k` holds gives the gradients of this part of the keys; an
    LSE of fewer keys is no input. Where scores are so large that the LSE is +inf in its dtype, gradients of the row
    and of the keys at its maximum are NaN; scores that round to -inf count as not seen.

    NaN and infinity in `q`, `dout` or `dlse` reach the gradients of their row and of the keys that it sees; in `k` or
    `v`, those of the rows that see the key, and of all keys that these rows see. On a GPU they may also reach what a
    causal mask hides from them in the same tile of rows and keys; a row that saw no key stays 0. An exception in the
    midst, such as a lack of memory, may leave `grads` partly written.

    On a GPU, work is queued on the current stream, as by `attention`. It needs a workspace, from the pool that the
    gradients come from: one float32 array like dq, its rows rounded up to tiles, and 8 bytes for each row of each head.
    The first call of a kind compiles up to three kernels.

    For torch and JAX, `attention` calls this function when gradients are asked for; it is not differentiable itself.

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


def _backward(arrays: Mapping[str, Any], options: Mapping[str, Any]) -> Any:
    """The call on arrays that cuflash addresses itself, by name."""
    kind = kind_of(arrays["q"])
    assert kind is not None
    key = _plan_key(kind, arrays, options)
    plan = None if key is None else jit.BACKWARD_PLANS.get(key)
    if plan is None:
        request = _check(arrays, **options)
        if request.device == CPU:
            return _run_on_cpu(request)
        from .backward_plan import make_plan

        plan = make_plan(request)
        if key is not None:
            jit.remember_backward(key, plan)
    if kind.current_device() != plan.device:
        with kind.on_device(plan.device):
            return _launch(kind, plan, arrays, options)
    return _launch(kind, plan, arrays, options)


def _plan_key(kind: Kind, arrays: Mapping[str, Any], options: Mapping[str, Any]) -> Hashable:
    """All that a plan depends on; None for a call to be checked whole, as one whose ``grads`` may overlap inputs is."""
    if GRADS[0] in arrays:
        return None
    try:
        forms = []
        bits = row_bits = 0  # LSEs are accessed by other rules: how they lie says nothing about the rest
        for name in INPUTS:
            if name in arrays:
                form, address = kind.geometry(arrays[name])
                forms.append(form)
                if name in ROW_INPUTS:
                    row_bits |= address
                else:
                    bits |= address
        key = (*forms, bits & 15, row_bits & 3, *options.values())
        hash(key)
    except (AttributeError, TypeError, RuntimeError):  # not arrays of this kind, or not hashable: to be refused
        return None
    return key


def _launch(kind: Kind, plan: BackwardPlan, arrays: Mapping[str, Any], options: Mapping[str, Any]) -> Any:
    """Allocate, and launch on the current stream; the plan's device is current."""
    given = GRADS[0] in arrays
    if given:
        grads = tuple(arrays[name] for name in GRADS)
        places = tuple(kind.geometry(grad)[1] for grad in grads)
        for grad in grads:
            kind.written(grad)
    else:
        made = [kind.empty(arrays[name], tuple(arrays[name].shape)) for name in ("q", "k", "v")]
        grads, places = (tuple(each) for each in zip(*made, strict=True))
    if plan.workspace is None:
        for grad in grads:
            kind.fill_dead(grad, None)
        return grads
    if not given and any(place % plan.alignment for place in places):  # a rare allocator: plan for what it gave
        return _backward({**arrays, **dict(zip(GRADS, grads, strict=True))}, options)
    inputs = tuple(kind.geometry(arrays[name])[1] if name in arrays else 0 for name in INPUTS)
    # Freed as soon as the call returns, to a pool that gives it to later work of the same stream.
    _workspace, workspace_at = kind.empty(arrays["q"], (plan.workspace.floats,), "float32")
    plan.launch(inputs, places, workspace_at, kind.stream(plan.device))
    return grads


def _run_on_cpu(request: BackwardRequest) -> tuple[Any, ...]:
    from .cpu_backward import attention_backward_cpu

    kind, forward = request.forward.q.kind, request.forward
    grads = tuple(x.array for x in request.grads)
    for grad in grads:
        kind.written(grad)
    if not grads:
        grads = tuple(kind.empty(x.array, x.shape)[0] for x in (forward.q, forward.k, forward.v))
    batch, seq, heads, dim = AXES[forward.layout]
    inputs = (x.array for x in (request.dout, forward.q, forward.k, forward.v, request.out))
    dout, q, k, v, out, *views = (kind.numpy(x).transpose(batch, heads, seq, dim) for x in (*inputs, *grads))
    kind.untraced(attention_backward_cpu)(
        dout,
        q,
        k,
        v,
        out,
        kind.numpy(request.lse.array),
        dlse=None if request.dlse is None else kind.numpy(request.dlse.array),
        causal=forward.causal,
        scale=forward.scale,
        grads=views,
    )
    return grads


# --- checks ----------------------------------------------------------------------------------------------------


def _check(arrays: Mapping[str, Any], *, causal: Any, scale: Any, layout: Any, deterministic: Any) -> BackwardRequest:
    """Check the call whole, before anything is allocated or written."""
    inputs = [arrays[name] for name in ("q", "k", "v")]
    forward = check_call(inputs, None, causal=causal, scale=scale, layout=layout)
    q, fixed = forward.q, check_flag("deterministic", deterministic)
    out_shape = forward.out_shape
    dout, out = (_adopt(q, arrays, name, out_shape, q.dtype, "this call's output") for name in ("dout", "out"))
    lse, dlse = (
        _adopt(q, arrays, name, forward.lse_shape, forward.lse_dtype, "the LSE, (batch, query heads, query length),")
        if name in arrays
        else None
        for name in ("lse", "dlse")
    )
    assert lse is not None
    request = BackwardRequest(forward, dout, out, lse, dlse, _check_grads(forward, arrays), fixed)
    for i, grad in enumerate(request.grads):
        refuse_shared(grad, (*request.inputs, *request.grads[:i]))
    if q.device != CPU:
        check_gpu(forward, (*request.inputs[3:], *request.grads))
    return request


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
