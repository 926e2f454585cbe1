"""torch tensors on CUDA and on the CPU, without CuPy: torch's current stream, device guard and allocator.

DLPack would cost 20 us a call and refuses tensors of a device that is not current; a tensor's own accessors do neither.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import cache, lru_cache, partial
from typing import Any

import torch
from torch import is_grad_enabled
from torch.autograd import forward_ad

from ..errors import UnsupportedError
from ..jit import keep
from . import CPU, FLOAT8_DTYPES, Operand, dtype_name

__all__ = [
    "LABEL", "PLAIN_TYPES", "address", "copy", "current_device", "dispatch_modes", "empty", "fill_dead", "follower",
    "geometries", "geometry", "is_compiling", "like_these", "maker", "numpy", "on_device", "operand", "plain",
    "refusal", "stream", "transformed", "untraced", "written",
]  # fmt: skip

LABEL = "torch tensor"
PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter)
FLOAT8_TYPES = tuple(getattr(torch, name) for name in FLOAT8_DTYPES)


def _public_stream(ordinal: int, /) -> int:
    return torch.cuda.current_stream(ordinal).cuda_stream  # type: ignore[no-any-return]


stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", _public_stream)
"""The raw handle, as torch's own kernel launchers read it; the public road builds an object for each call."""

current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)
"""For arrays on a GPU, which have initialized CUDA; the public road looks whether it is."""


def _public_empty(shape: tuple[int, ...], strides: tuple[int, ...], dtype: Any, /) -> Any:
    return torch.empty_strided(shape, strides, dtype=dtype, device="cuda")


empty_on_gpu: Callable[..., Any] = getattr(torch._C._dynamo.guards, "_empty_strided_cuda", _public_empty)
"""A tensor on the current device, allocated as in what torch.compile makes: through torch's dispatcher it takes twice
as long, and a forward and a backward pass need six. It takes no subclass of tuple."""


# Who follows torch's operators, and has to meet operators of cuflash: torch.compile, the transformations of torch.func,
# dispatch modes (make_fx, torch.export and others). torch.jit.trace cannot.
is_compiling: Callable[[], bool] = torch.compiler.is_dynamo_compiling
transformed: Callable[[], bool] = torch._C._are_functorch_transforms_active
is_tracing: Callable[[], bool] = torch._C._is_tracing
dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack


# The condition stands twice: of a function for it, torch.compile would make the constant True where it runs on its own.


def geometry(x: Any, /) -> tuple[tuple[Any, ...], int]:
    if (
        (x.requires_grad and is_grad_enabled())
        or is_compiling()
        or dispatch_modes()
        or is_tracing()
        or forward_ad._current_level >= 0
    ):
        raise TypeError("followed by torch, or perhaps, which a plan is not")
    return (type(x), x.shape, x.stride(), x.dtype, x.device, x.is_neg()), x.data_ptr()


def geometries(q: Any, k: Any, v: Any, /) -> tuple[tuple[Any, ...], int, int, int]:
    # What was seen before is known by a check in C, which takes a quarter of the time that the key takes.
    if (
        (is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad))
        or is_compiling()
        or dispatch_modes()
        or is_tracing()
        or forward_ad._current_level >= 0
    ):
        raise TypeError("followed by torch, or perhaps, which a plan is not")
    shapes = q.shape, k.shape
    for fits, key in _seen.get(shapes, ()):
        if fits(q, k, v):
            return key, q.data_ptr(), k.data_ptr(), v.data_ptr()
    key = (
        type(q), shapes[0], q.stride(), q.dtype, q.device, q.is_neg(),
        type(k), shapes[1], k.stride(), k.dtype, k.device, k.is_neg(),
        type(v), v.shape, v.stride(), v.dtype, v.device, v.is_neg(),
    )  # fmt: skip
    if alike := untraced(like_these)(q, k, v):
        keep(_seen, shapes, (*_seen.get(shapes, ())[1 - MAX_SEEN :], (alike, key)), MAX_SHAPES)
    return key, q.data_ptr(), k.data_ptr(), v.data_ptr()


_seen: dict[Any, tuple[tuple[Callable[..., bool], tuple[Any, ...]], ...]] = {}
"""By the shapes of q and k: checks whether three tensors are laid out as some of late were, and the keys of these."""

MAX_SHAPES, MAX_SEEN = 1024, 16


def like_these(*tensors: Any) -> Callable[..., bool] | None:
    """A check whether other tensors agree with these, at the same place each, in all but the address.

    That is all that `geometry` has, and how torch follows tensors, in one call that does not raise. None where torch
    has no such check.
    """
    make = _maker_of_checks()
    if make is None:
        return None
    objects = [*map(id, tensors)]
    firsts = [objects.index(x) for x in objects]
    distinct = sorted(set(firsts))
    fits = make(*(tensors[i] for i in distinct), dynamic_dims_sizes=None, dynamic_dims_strides=None).check
    if len(distinct) == len(tensors):
        return fits  # type: ignore[no-any-return]

    def fits_repeated(*others: Any) -> bool:
        """Torch's check refuses one tensor at two places."""
        same = all(others[first] is other for first, other in zip(firsts, others, strict=True))
        return same and fits(*(others[i] for i in distinct))

    return fits_repeated


@cache
def _maker_of_checks() -> Any:
    """What torch.compile guards its code with, if it sees every difference that counts."""
    make = getattr(torch._C._dynamo.guards, "TensorGuards", None)
    if make is None:
        return None
    x = torch.empty((2, 3), dtype=torch.float32, device="cpu")
    others = [x[:1], x[:, :2], x.mT.contiguous().mT, x.double(), x.to("meta"), torch._neg_view(x)]
    others.append(torch.nn.Parameter(x, requires_grad=False))
    try:
        fits = make(x, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
        return make if fits(x) and not any(map(fits, others)) else None
    except (AttributeError, TypeError, ValueError, RuntimeError):  # one that is called in another way
        return None


def follower(q: Any, k: Any, v: Any, /) -> Callable[..., Any] | None:
    differentiated = is_grad_enabled() and (q.requires_grad or _requires_grad(k) or _requires_grad(v))
    if not (differentiated or is_compiling() or transformed() or dispatch_modes()) or q.dtype in FLOAT8_TYPES:
        return None
    if is_compiling() or attend is None:  # a compiler guards what it reads, and the import would change it
        from ..torch import attend as loaded

        return loaded
    return attend


attend: Callable[..., Any] | None = None
"""`cuflash.torch.attend`, which puts itself here: an import statement in each call takes longer than the rest."""


def _requires_grad(x: Any) -> bool:
    return getattr(x, "requires_grad", False)  # it may be no tensor


def refusal(arrays: Mapping[str, Any], what: str, /) -> str | None:
    if is_compiling():
        return (
            f"torch.compile follows the call, and {what} is not for that: make the call outside of what is compiled, "
            "or by torch.compiler.disable(cuflash.attention)"
        )
    if transformed() or dispatch_modes():
        tracer = "a transformation of torch.func" if transformed() else "a dispatch mode, such as that of make_fx,"
        return f"{tracer} follows the call, and {what} is not for that: make the call outside of it"
    for name, x in arrays.items():
        if getattr(x, "requires_grad", False) and is_grad_enabled():
            return (
                f"{name} requires grad, and {what} has no gradients: call it under torch.no_grad(), or pass "
                f"{name}.detach()"
            )
    return None


def _watcher(x: Any) -> str | None:
    """What follows a tensor through torch's own operations, and would take what cuflash makes of it for a constant."""
    if torch.compiler.is_compiling():
        return None  # torch.compile leaves the call alone
    if torch._C._functorch.is_functorch_wrapped_tensor(x):
        return "a transformation of torch.func"
    if is_tracing():
        return "torch.jit.trace"
    if forward_ad._current_level >= 0 and forward_ad.unpack_dual(x).tangent is not None:
        return "forward-mode differentiation"
    proxies = sys.modules.get("torch.fx.experimental.proxy_tensor")
    if proxies is not None and proxies.get_proxy_mode() is not None:
        return "make_fx"
    return None


def operand(name: str, x: Any, /) -> Operand:
    if type(x) not in PLAIN_TYPES:
        raise TypeError(
            f"{name} is a {type(x).__qualname__}, a subclass of torch.Tensor whose rules cuflash does not know; "
            f"pass a plain tensor"
        )
    if x.layout is not torch.strided or x.is_nested:
        raise TypeError(f"{name} is a sparse or nested tensor; pass a dense one")
    if x.device.type not in ("cpu", "cuda") or torch.version.hip is not None:
        raise UnsupportedError(f"{name} is on device {x.device}; cuflash takes CUDA and CPU tensors")
    if x.requires_grad and is_grad_enabled():
        raise UnsupportedError(
            f"{name} requires grad, and autograd does not follow this call: make it under torch.no_grad(), or pass "
            f"{name}.detach(); cuflash.attention, without out=, is differentiable"
        )
    if watcher := _watcher(x):
        raise UnsupportedError(
            f"{name} is watched by {watcher}, which does not see what cuflash computes: "
            "call cuflash.attention outside of it"
        )
    if x.is_neg():
        raise UnsupportedError(f"{name} is a lazily negated view; pass {name}.resolve_neg()")
    dtype = dtype_name(name, x.dtype)
    size = x.element_size()
    return Operand(
        name=name,
        array=x,
        kind=sys.modules[__name__],
        address=x.data_ptr(),
        shape=tuple(x.shape),
        strides=tuple(size * stride for stride in x.stride()),
        dtype=dtype,
        device=x.get_device() if x.is_cuda else CPU,
    )


def empty(like: Any, shape: tuple[int, ...], dtype: str | None = None, /) -> tuple[Any, int]:
    torch_dtype = like.dtype if dtype is None else getattr(torch, dtype)
    if like.is_cuda:
        x = empty_on_gpu(shape, contiguous_strides(shape), torch_dtype)
    else:
        x = like.new_empty(shape, dtype=torch_dtype)
    return x, x.data_ptr()


def maker(shape: tuple[int, ...], dtype: str, /) -> Callable[[], Any]:
    shape = tuple(shape)
    return partial(empty_on_gpu, shape, _contiguous_strides(shape), getattr(torch, dtype))


address: Callable[[Any], int] = torch.Tensor.data_ptr


def _contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(max(extent, 1) for extent in shape[axis:]) for axis in range(1, len(shape) + 1))


contiguous_strides = lru_cache(1024)(_contiguous_strides)


def fill_dead(out: Any, lse: Any, /) -> None:
    out.zero_()
    if lse is not None:
        lse.fill_(float("-inf"))


def copy(to: Any, source: Any, /) -> None:
    to.copy_(source)


def written(x: Any, /) -> None:
    """Let autograd notice when a tensor that it saved was overwritten."""
    if not x.is_inference():
        torch.autograd.graph.increment_version(x)


def numpy(x: Any, /) -> Any:
    x = x.detach()
    if x.dtype is torch.bfloat16:
        from ml_dtypes import bfloat16

        return x.view(torch.int16).numpy().view(bfloat16)
    if x.dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        import ml_dtypes

        return x.view(torch.uint8).numpy().view(getattr(ml_dtypes, str(x.dtype).removeprefix("torch.")))
    return x.numpy()


def untraced(function: Callable[..., Any], /) -> Callable[..., Any]:
    dynamo = sys.modules.get("torch._dynamo")  # loaded by the first torch.compile
    return function if dynamo is None else dynamo.disable(function)


def plain(x: Any, /) -> Any:
    return x.detach() if type(x) in PLAIN_TYPES and x.requires_grad else x


def on_device(ordinal: int, /) -> AbstractContextManager[Any]:
    return torch.cuda.device(ordinal)  # type: ignore[no-any-return]
