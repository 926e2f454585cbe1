"""`attention_backward`: the gradients of attention."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import TYPE_CHECKING, Any

from . import jit
from .arrays import CPU, KINDS, Kind, Operand, kind_of
from .backward_request import BackwardRequest
from .checks import check_call, check_fellow, check_flag, check_gpu, check_written, refuse_shared
from .jit import BACKWARD_PLANS
from .request import AXES, Request

if TYPE_CHECKING:
    from .backward_plan import BackwardPlan

__all__ = ["attention_backward"]

INPUTS = ("q", "k", "v", "dout", "out", "lse", "dlse")
OPTIONS = ("causal", "scale", "layout", "deterministic")
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
        the sums of dq come in any order otherwise. On Hopper GPUs, without a mask, thread blocks on up to a quarter of
        the multiprocessors then wait for each other: other kernels, green contexts and MPS must leave them that many.
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
    the probabilities and the gradients of the scores are, to the inputs' dtype, as operands of the last products; on
    Hopper GPUs, above head dim 128, probabilities below 2**-40 are 0. It takes `lse` at its word: probabilities are
    exp(score - lse), at most 1, which the rounding of a float32 LSE changes by 6e-8 * abs(lse) at most, and the LSE of
    more keys than `k` holds gives the gradients of this part of the keys; an LSE of fewer keys is no input. Where
    scores are so large that the LSE is +inf in its dtype, gradients of the row and of the keys at its maximum are NaN;
    scores that round to -inf count as not seen.

    NaN and infinity in `q`, `dout` or `dlse` reach the gradients of their row and of the keys that it sees; in `k` or
    `v`, those of the rows that see the key, and of all keys that these rows see. On a GPU they may also reach what a
    causal mask hides from them in the same tile of rows and keys; a row that saw no key stays 0. An exception in the
    midst, such as a lack of memory, may leave `grads` partly written.

    On a GPU, work is queued on the current stream, as by `attention`. It needs a workspace, from the pool that the
    gradients come from: one float32 array like dq, its rows rounded up to tiles, 8 bytes for each row of each head and,
    where query heads share keys and there are few, also float32 arrays like dk and dv. The first call of a kind
    compiles up to three kernels.

    For torch and JAX, `attention` calls this function when gradients are asked for; it is not differentiable itself.

    The method is that of Dao, FlashAttention-2: Faster Attention with Better Parallelism and Work Partitioning, 2023,
    section 3.1.2 on the backward pass.

    Examples
    --------
    >>> out, lse = cuflash.attention(q, k, v, causal=True, return_lse=True)  # doctest: +SKIP
    >>> dq, dk, dv = cuflash.attention_backward(dout, q, k, v, out, lse, causal=True)  # doctest: +SKIP
    """
    options = causal, scale, layout, deterministic
    return gradients(dout, q, k, v, out, lse, dlse, options, grads)  # type: ignore[no-any-return]


def gradients(
    dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, dlse: Any, options: tuple[Any, ...], grads: Any = None,
    told: list[Any] | None = None,
) -> Any:  # fmt: skip
    """`attention_backward`, by position; the options are causal, scale, layout and deterministic.

    ``told`` receives the plan if there is one that makes the gradients itself.
    """
    if grads is not None:
        _check_triple(grads)
    kind = KINDS.get(type(q)) or kind_of(q)
    if kind is None:
        return _gradients_of_foreign(_named(dout, q, k, v, out, lse, dlse, grads), options)
    places: list[int] = []
    key: Any
    try:
        geometry = kind.geometry
        qkv_key, q_at, k_at, v_at = kind.geometries(q, k, v)
        dout_key, dout_at = geometry(dout)
        out_key, out_at = geometry(out)
        lse_key, lse_at = geometry(lse)
        dlse_key, dlse_at = (None, 0) if dlse is None else geometry(dlse)
        places = [q_at, k_at, v_at, dout_at, out_at, lse_at, dlse_at]
        # What TMA moves apart from what it does not: these decide between kernels.
        moved, others, grads_key = q_at | k_at | v_at | dout_at, out_at, None
        if grads is not None:
            grads_key, grads_at = zip(*map(geometry, grads), strict=True)
            places += grads_at
            moved |= grads_at[1] | grads_at[2]
            others |= grads_at[0]
        # LSEs are accessed by other rules: how they lie says nothing about the rest.
        bits = moved & 15, others & 15, (lse_at | dlse_at) & 3
        key = qkv_key, dout_key, out_key, lse_key, dlse_key, grads_key, bits, options
        plan = BACKWARD_PLANS.get(key)
    except (AttributeError, TypeError, RuntimeError):  # followed, not of this kind, or not hashable: checked below
        key = plan = None
    if plan is None or (grads is not None and not plan.apart(places)):
        request = _check(_named(dout, q, k, v, out, lse, dlse, grads), **dict(zip(OPTIONS, options, strict=True)))
        if request.device == CPU:
            return _run_on_cpu(request)
        plan = plan or _plan(request, key)
        places = request.addresses
        plan.prove_apart(places)
    if kind.current_device() != plan.device:
        with kind.on_device(plan.device):
            return gradients(dout, q, k, v, out, lse, dlse, options, grads, told)
    if told is not None:
        told.append(plan)
    return launch(kind, plan, places, (dout, q, k, v, out, lse, dlse), options, grads)


def launch(
    kind: Kind, plan: BackwardPlan, places: list[int], arrays: tuple[Any, ...], options: tuple[Any, ...],
    grads: Any = None,
) -> Any:  # fmt: skip
    """Carry a plan out on the current stream; its device is current.

    ``places`` are the addresses of q, k, v, dout, out, lse and dlse, and of gradients that are given; ``arrays`` and
    ``options`` are those of `gradients`.
    """
    dout, q, k, v, out, lse, dlse = arrays
    if grads is None:
        grads = dq, dk, dv = plan.new_dq(), plan.new_dk(), plan.new_dv()
        dq_at, dk_at, dv_at = kind.address(dq), kind.address(dk), kind.address(dv)
        if (dq_at | dk_at | dv_at) % plan.alignment:  # a rare allocator: plan for what it gave
            return gradients(dout, q, k, v, out, lse, dlse, options, grads)
        places += dq_at, dk_at, dv_at
    else:
        for grad in grads:
            kind.written(grad)
    if plan.workspace is None:
        for grad in grads:
            kind.fill_dead(grad, None)
        return tuple(grads)
    # Freed as soon as the call returns, to a pool that gives it to later work of the same stream.
    workspace = plan.new_workspace()
    plan.launch(places, kind.address(workspace), kind.stream(plan.device))
    return tuple(grads)


def _plan(request: BackwardRequest, key: Hashable) -> BackwardPlan:
    from .backward_plan import make_plan

    plan = make_plan(request)
    if key is not None:
        jit.remember_backward(key, plan)
    return plan


def _named(dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, dlse: Any, grads: Any) -> dict[str, Any]:
    """The arrays that a call has, by name."""
    arrays = dict(zip(INPUTS, (q, k, v, dout, out, lse, dlse), strict=True))
    if dlse is None:
        del arrays["dlse"]
    return arrays if grads is None else arrays | dict(zip(GRADS, grads, strict=True))


def _gradients_of_foreign(arrays: Mapping[str, Any], options: tuple[Any, ...]) -> Any:
    """`gradients` of arrays that cuflash does not address itself."""
    from .arrays import bridge

    def call(views: dict[str, Any]) -> Any:
        q, k, v, dout, out, lse, dlse = (views.get(name) for name in INPUTS)
        grads = tuple(views[name] for name in GRADS) if GRADS[0] in views else None
        return gradients(dout, q, k, v, out, lse, dlse, options, grads)

    outputs = {name: arrays[name] for name in GRADS if name in arrays}
    return bridge.call(call, {name: arrays[name] for name in INPUTS if name in arrays}, outputs)


def _check_triple(grads: Any) -> None:
    if not isinstance(grads, tuple | list):
        raise TypeError(f"grads is a {type(grads).__qualname__}; accepted are None and a triple of arrays (dq, dk, dv)")
    if len(grads) != 3:
        raise ValueError(f"grads has {len(grads)} elements; accepted are three, the arrays (dq, dk, dv)")


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
