"""Differentiable attention for torch: autograd, ``torch.compile``, ``torch.func`` and checkpointing.

Importing this module registers the operators ``cuflash::attention`` and ``cuflash::attention_backward``. What follows
tensors through torch's operators (compilers, tracers, transformations, dispatch modes) meets these two; ordinary calls
take a `torch.autograd.Function`, which costs the host a fraction of the operators' dispatch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

try:
    import torch
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    raise ImportError(
        "cuflash.torch needs torch, which is not installed: pip install torch; "
        "cuflash.attention and cuflash.attention_backward take NumPy, CuPy and JAX arrays without it",
        name="torch",
    ) from error
from torch import are_deterministic_algorithms_enabled, is_grad_enabled
from torch.autograd import forward_ad

from .api import compute
from .arrays import bridge, torch_arrays
from .arrays.torch_arrays import LABEL, dispatch_modes, is_compiling, is_tracing, like_these, transformed, untraced
from .backward import gradients, launch
from .checks import check_causal, check_flag, check_layout, check_number, check_shapes
from .errors import UnsupportedError
from .jit import remember_with
from .request import AXES

if TYPE_CHECKING:
    from .backward_plan import BackwardPlan
    from .forward_plan import CallPlan

__all__ = ["attention"]

Tensor = Any
"""A ``torch.Tensor``."""


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool | str = False,
    scale: float | None = None,
    layout: str = "bshd",
    return_lse: bool = False,
    out: Tensor = None,
    deterministic: bool = False,
) -> Any:
    """Exact attention of torch tensors, differentiable; without the matrix of scores in memory.

    `cuflash.attention` gives the same, gradients included. This function also follows ``torch.autocast``, and has
    `deterministic`.

    Parameters
    ----------
    q : Tensor (B, Nq, Hq, D)
    k : Tensor (B, Nk, Hk, D)
    v : Tensor (B, Nk, Hk, Dv)
        As for `cuflash.attention`: of one dtype and device, any strides. Under ``torch.autocast`` for their device,
        those of float16, bfloat16 and float32 are cast to its dtype, as for ``scaled_dot_product_attention``.
    causal : False, True, "bottom_right" or "top_left"
    scale : float, optional
    layout : {"bshd", "bhsd"}
    return_lse : bool
        As for `cuflash.attention`. The LSE is differentiable, too.
    out : Tensor, optional
        As for `cuflash.attention`; not where a gradient is asked for.
    deterministic : bool
        Whether gradients must repeat bit for bit. They do so also under ``torch.use_deterministic_algorithms(True)``,
        at the time of the backward pass.

    Returns
    -------
    out : Tensor (B, Nq, Hq, Dv)
        Contiguous unless given.
    lse : Tensor (B, Hq, Nq)
        With `return_lse`: float32 (float64 for float64 inputs).

    Raises
    ------
    ValueError, TypeError, UnsupportedError, CompileError, MissingKernelError, DriverError
        As `cuflash.attention`. UnsupportedError also for `out` with gradients, forward-mode differentiation and second
        derivatives, the last when they are computed.

    Notes
    -----
    For the backward pass, q, k, v, the output and the LSE are kept, and nothing else. A row that sees no key has zero
    gradients. ``torch.func.vmap`` runs as one call with a larger batch; an argument that it does not map is copied for
    each of its elements then.

    Examples
    --------
    >>> q, k, v = (torch.randn(1, 8, 2, 16, requires_grad=True) for _ in range(3))
    >>> cuflash.torch.attention(q, k, v, causal=True).sum().backward()
    >>> q.grad.shape
    torch.Size([1, 8, 2, 16])
    """
    if not isinstance(q, torch.Tensor):
        raise TypeError(
            f"q is a {type(q).__module__}.{type(q).__qualname__}; cuflash.torch.attention takes torch tensors, and "
            "cuflash.attention other arrays"
        )
    if torch.is_autocast_enabled("cuda" if q.is_cuda else "cpu"):
        q, k, v = (_autocast(x) for x in (q, k, v))
    return attend(q, k, v, causal, scale, layout, return_lse, out, deterministic)


def _autocast(x: Tensor) -> Tensor:
    """What torch does before its own attention: float64 is left alone."""
    eligible = isinstance(x, torch.Tensor) and x.is_floating_point() and x.dtype is not torch.float64
    return x.to(torch.get_autocast_dtype("cuda" if x.is_cuda else "cpu")) if eligible else x


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: Any,
    scale: Any,
    layout: Any,
    return_lse: Any,
    out: Tensor,
    deterministic: Any = False,
) -> Any:
    """`attention` of the dtypes as they are: by the operator, by autograd, or as a plain call."""
    if deterministic is not False:
        check_flag("deterministic", deterministic)
    if return_lse is not False:
        check_flag("return_lse", return_lse)
    if not (isinstance(k, torch.Tensor) and isinstance(v, torch.Tensor)):
        name, x = ("v", v) if isinstance(k, torch.Tensor) else ("k", k)
        raise TypeError(bridge.mixed(LABEL, name, bridge.label(name, x)))
    compiling = is_compiling()
    operators = compiling or transformed() or dispatch_modes() > 0
    if not operators and not (is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)):
        return compute(q, k, v, causal, scale, layout, return_lse, out)
    if out is not None:
        raise UnsupportedError(
            "out is given, and torch follows the call, to differentiate it, to compile or to transform: a result that "
            "is written into a tensor cannot be followed; leave out= away, or call under torch.no_grad() and uncompiled"
        )
    if not operators:
        return _differentiable(q, k, v, (causal, scale, layout, deterministic), return_lse)
    if transformed() and not compiling:
        results = _Attention.apply(q, k, v, causal, scale, layout, deterministic)
    else:
        results = _operator(q, k, v, *_operator_options(causal, scale, layout, deterministic))
    return results if return_lse else results[0]


# --- autograd --------------------------------------------------------------------------------------------------


class _Attention(torch.autograd.Function):  # type: ignore[misc]
    """The output and the LSE, for the transformations of ``torch.func``."""

    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor, causal: Any, scale: Any, layout: Any, deterministic: Any) -> Any:
        return compute(q, k, v, causal, scale, layout, True)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        q, k, v, *ctx.options = inputs
        ctx.save_for_backward(q, k, v, *output)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, dout: Tensor, dlse: Tensor) -> Any:
        grads = _gradients_of(dout, dlse, ctx.saved_tensors, ctx.options)
        return *grads, None, None, None, None  # torch drops those of inputs that need none

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor) -> Any:
        raise UnsupportedError(FORWARD_MODE)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> Any:
        return _map(_Attention.apply, info, in_dims, *arguments)


class _Ordinary(torch.autograd.Function):  # type: ignore[misc]
    """The output, and the LSE if it is asked for, of ordinary calls, which no transformation follows.

    On a GPU the backward pass runs in a thread of torch's, where Python takes twice its time: it uses what the forward
    call has found out about its arrays.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, options: tuple[Any, ...], return_lse: Any) -> Any:
        causal, scale, layout, _ = options
        told: list[CallPlan] = []
        ctx.told, ctx.options = told, options
        out, lse = compute(q, k, v, causal, scale, layout, True, None, None, False, told)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.set_materialize_grads(False)
        return (out, lse) if return_lse else out

    @staticmethod
    def backward(ctx: Any, dout: Tensor, dlse: Tensor = None) -> Any:
        saved, grads = ctx.saved_tensors, None  # once: checkpointing makes them anew, and once only
        if ctx.told and dlse is None and not (is_compiling() or transformed() or is_grad_enabled()):
            grads = _gradients_after(ctx.told[0], dout, saved, ctx.options)
        dq, dk, dv = grads or _gradients_of(dout, dlse, saved, ctx.options)
        return dq, dk, dv, None, None

    jvp = _Attention.jvp


class _Gradients(torch.autograd.Function):  # type: ignore[misc]
    """The gradients where they may be differentiated, which is an error of its own."""

    @staticmethod
    def forward(*arguments: Any) -> Any:
        return _gradients(*arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise UnsupportedError(SECOND_DERIVATIVES)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> Any:
        return _map(_Gradients.apply, info, in_dims, *arguments)


MATH = "torch.nn.functional.scaled_dot_product_attention under torch.nn.attention.sdpa_kernel(SDPBackend.MATH)"
SECOND_DERIVATIVES = (
    f"second derivatives of cuflash attention are asked for, and it has first ones only: use {MATH} there"
)
FORWARD_MODE = (
    "forward-mode differentiation of cuflash attention is asked for, and it has reverse mode only: use "
    f"torch.func.vjp or grad, or {MATH} there"
)

_differentiable: Callable[..., Any] = super(torch.autograd.Function, _Ordinary).apply
"""The half of ``_Ordinary.apply`` that is in C++. The half in Python serves the transformations of ``torch.func``, and
inspects signatures in each call, for longer than all the rest takes."""

_in_memory: Callable[[Tensor], bool] = torch._C._has_storage
"""False for what ``torch.autograd.grad(..., is_grads_batched=True)`` passes, by another vmap than torch.func's."""


def _gradients_of(dout: Tensor, dlse: Tensor, saved: tuple[Tensor, ...], options: Sequence[Any]) -> Any:
    """By the operator, by autograd, or as a plain call, as torch follows the backward pass."""
    arguments = (*_arriving(dout, dlse, saved), *options)
    compiling = is_compiling()
    operators = compiling or transformed() or dispatch_modes() > 0
    if operators and transformed() and not compiling:
        return _Gradients.apply(*arguments)
    if operators or not (_in_memory(arguments[0]) and (dlse is None or _in_memory(dlse))):
        return _backward_operator(*arguments[:7], *_operator_options(*options))
    if is_grad_enabled():
        return _Gradients.apply(*arguments)
    return _gradients(*arguments)


def _arriving(dout: Tensor, dlse: Tensor, saved: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """What arrives at the output and the LSE, and what was saved; no `dout` where the loss uses the LSE alone."""
    q, k, v, out, lse = saved
    dout = torch.zeros_like(out) if dout is None else dout.resolve_neg()
    return dout, dlse if dlse is None else dlse.resolve_neg(), q, k, v, out, lse


def _gradients(
    dout: Tensor, dlse: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    causal: Any, scale: Any, layout: Any, deterministic: Any,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    options = causal, scale, layout, deterministic or torch.are_deterministic_algorithms_enabled()
    return gradients(dout, q, k, v, out, lse, dlse, options)  # type: ignore[no-any-return]


def _gradients_after(forward: CallPlan, dout: Tensor, saved: tuple[Tensor, ...], options: tuple[Any, ...]) -> Any:
    """The gradients, by what earlier backward passes have left with the plan of the forward call.

    All tensors are looked at again: hooks may have moved them, or somebody may have assigned to a tensor's ``.data``,
    which torch does not notice. None where plans are of no use.
    """
    q, k, v, out, lse = saved
    deterministic = options[3] or are_deterministic_algorithms_enabled()
    try:
        places = [q.data_ptr(), k.data_ptr(), v.data_ptr(), dout.data_ptr(), out.data_ptr(), lse.data_ptr(), 0]
    except (AttributeError, RuntimeError):  # nothing arrives, or what is not in memory
        return None
    if dispatch_modes() or is_tracing() or forward_ad._current_level >= 0:
        return None
    q_at, k_at, v_at, dout_at, out_at, lse_at, _ = places
    how = (q_at | k_at | v_at | dout_at) & 15, out_at & 15, lse_at & 3, deterministic  # as in `backward.gradients`
    arrays = dout, q, k, v, out, lse, None
    options = *options[:3], deterministic
    for known, fits, plan in forward.backward:
        if known == how and fits(dout, q, k, v, out, lse):
            if torch_arrays.current_device() != plan.device:
                return gradients(*arrays, options)
            return launch(torch_arrays, plan, places, arrays, options)
    if dout.is_neg():
        return None
    told: list[BackwardPlan] = []
    grads = gradients(*arrays, options, told=told)
    if told and (alike := untraced(like_these)(dout, q, k, v, out, lse)):
        remember_with(forward, (how, alike, told[0]))
    return grads


# --- operators -------------------------------------------------------------------------------------------------


def _operator_options(causal: Any, scale: Any, layout: Any, deterministic: Any) -> tuple[str, Any, Any, bool]:
    """The options as the operators take them, each of one type: no mask is ""."""
    if scale is not None and type(scale) is not float:
        scale = check_number(scale)
    return check_causal(causal) or "", scale, check_layout(layout), bool(deterministic)


def _refuse_forward_mode() -> None:
    """Torch calls an operator that has no forward mode as if its inputs were constants."""
    if forward_ad._current_level >= 0:
        raise UnsupportedError(FORWARD_MODE)


def _attention(
    q: Tensor, k: Tensor, v: Tensor, causal: str, scale: float | None, layout: str, deterministic: bool
) -> tuple[Tensor, Tensor]:
    _refuse_forward_mode()
    return compute(q, k, v, causal or False, scale, layout, True)  # type: ignore[no-any-return]


def _attention_backward(
    dout: Tensor, dlse: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    causal: str, scale: float | None, layout: str, deterministic: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return _gradients(dout, dlse, q, k, v, out, lse, causal or False, scale, layout, deterministic)


class _Shaped(NamedTuple):
    name: str
    shape: tuple[int, ...]


def _attention_fake(
    q: Tensor, k: Tensor, v: Tensor, causal: str, scale: float | None, layout: str, deterministic: bool
) -> tuple[Tensor, Tensor]:
    """Shapes and dtypes of the results."""
    _refuse_forward_mode()
    check_layout(layout)
    check_shapes(_Shaped("q", q.shape), _Shaped("k", k.shape), _Shaped("v", v.shape), layout)
    batch, seq, heads, dim = AXES[layout]
    lse_dtype = torch.float64 if q.dtype is torch.float64 else torch.float32
    lse = q.new_empty((q.shape[batch], q.shape[heads], q.shape[seq]), dtype=lse_dtype)
    return q.new_empty((*q.shape[:dim], v.shape[dim])), lse


def _attention_backward_fake(
    dout: Tensor, dlse: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _operator_backward(ctx: Any, dout: Tensor, dlse: Tensor) -> Any:
    grads = _backward_operator(*_arriving(dout, dlse, ctx.saved_tensors), *ctx.options)
    return *grads, None, None, None, None


def _map(function: Callable[..., Any], info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> Any:
    """One call for a batch of calls: their batches, the first axis of every tensor, laid end to end."""
    size = info.batch_size

    def unfolded(x: Tensor, dim: int | None) -> Tensor:
        return x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)

    def fold(x: Any, dim: int | None) -> Any:
        return unfolded(x, dim).flatten(0, 1) if isinstance(x, torch.Tensor) else x

    batch = unfolded(arguments[0], in_dims[0]).shape[1]
    results = function(*map(fold, arguments, in_dims))
    return tuple(x.unflatten(0, (size, batch)) for x in results), (0,) * len(results)


OPTIONS = "str causal, float? scale, str layout, bool deterministic"

_operator = torch.library.custom_op(
    "cuflash::attention",
    _attention,
    mutates_args=(),
    schema=f"(Tensor q, Tensor k, Tensor v, {OPTIONS}) -> (Tensor, Tensor)",
)
_operator.register_fake(_attention_fake)
_operator.register_autograd(_operator_backward, setup_context=_Attention.setup_context)
_operator.register_vmap(partial(_map, _operator))

_backward_operator = torch.library.custom_op(
    "cuflash::attention_backward",
    _attention_backward,
    mutates_args=(),
    schema="(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
    f"{OPTIONS}) -> (Tensor, Tensor, Tensor)",
)
_backward_operator.register_fake(_attention_backward_fake)
_backward_operator.register_autograd(_Gradients.backward)
_backward_operator.register_vmap(partial(_map, _backward_operator))


# Last: another thread takes it from there as soon as it is there, without waiting for this import.
torch_arrays.attend = attend
