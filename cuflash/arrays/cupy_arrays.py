"""CuPy arrays: CuPy's current device, stream and allocator."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from operator import attrgetter
from typing import Any

import cupy
import numpy as np
from cupy.cuda import get_current_stream
from cupy.cuda.runtime import getDevice as current_device

from . import Operand, dtype_name

__all__ = [
    "LABEL",
    "PLAIN_TYPES",
    "address",
    "copy",
    "current_device",
    "empty",
    "fill_dead",
    "follower",
    "geometries",
    "geometry",
    "maker",
    "numpy",
    "on_device",
    "on_stream",
    "operand",
    "plain",
    "refusal",
    "stream",
    "untraced",
    "view",
    "written",
]

LABEL = "CuPy array"
PLAIN_TYPES = (cupy.ndarray,)
MINUS_INFINITY_BITS = 0xFF800000


def geometry(x: Any, /) -> tuple[tuple[Any, ...], int]:
    memory = x.data
    return (type(x), x.shape, x.strides, x.dtype, memory.device_id), memory.ptr


def geometries(q: Any, k: Any, v: Any, /) -> tuple[tuple[Any, ...], int, int, int]:
    (q_key, q_at), (k_key, k_at), (v_key, v_at) = geometry(q), geometry(k), geometry(v)
    return (q_key, k_key, v_key), q_at, k_at, v_at


def operand(name: str, x: Any, /) -> Operand:
    if type(x) is not cupy.ndarray:
        raise TypeError(
            f"{name} is a {type(x).__qualname__}, a subclass of cupy.ndarray whose rules cuflash does not know; "
            f"pass it as a plain array: {name}.view(cupy.ndarray)"
        )
    if not x.dtype.isnative:
        raise TypeError(f"{name} has dtype {x.dtype.str}, which is not in the byte order of this machine")
    return Operand(
        name=name,
        array=x,
        kind=sys.modules[__name__],
        address=x.data.ptr,
        shape=x.shape,
        strides=x.strides,
        dtype=dtype_name(name, x.dtype),
        device=x.data.device_id,
    )


def empty(like: Any, shape: tuple[int, ...], dtype: str | None = None, /) -> tuple[Any, int]:
    x = cupy.ndarray(shape, like.dtype if dtype is None else np.dtype(dtype))
    return x, x.data.ptr


def maker(shape: tuple[int, ...], dtype: str, /) -> Callable[[], Any]:
    return partial(cupy.ndarray, shape, np.dtype(dtype))


address: Callable[[Any], int] = attrgetter("data.ptr")


def fill_dead(out: Any, lse: Any, /) -> None:
    # As integers: CuPy compiles kernels of its own for this, and those for bfloat16 need CUDA's headers.
    out.view(np.uint16).fill(0)
    if lse is not None:
        lse.view(np.uint32).fill(MINUS_INFINITY_BITS)


def copy(to: Any, source: Any, /) -> None:
    to.view(np.uint16)[...] = source.view(np.uint16)  # as integers: see above


def written(x: Any, /) -> None:
    """CuPy keeps no books on writes."""


def numpy(x: Any, /) -> Any:
    raise AssertionError("CuPy arrays are never on the CPU")


def untraced(function: Callable[..., Any], /) -> Callable[..., Any]:
    return function


def follower(q: Any, k: Any, v: Any, /) -> Callable[..., Any] | None:
    return None


def refusal(arrays: Mapping[str, Any], what: str, /) -> str | None:
    return None


def plain(x: Any, /) -> Any:
    return x


def on_device(ordinal: int, /) -> AbstractContextManager[Any]:
    return cupy.cuda.Device(ordinal)  # type: ignore[no-any-return]


def stream(ordinal: int, /) -> int:
    return get_current_stream().ptr  # type: ignore[no-any-return]


def view(address: int, shape: tuple[int, ...], dtype: Any, ordinal: int) -> Any:
    """A C-contiguous array over device memory that somebody else owns and keeps."""
    size = math.prod(shape) * dtype.itemsize
    memory = cupy.cuda.UnownedMemory(address, size, None, ordinal)
    return cupy.ndarray(shape, dtype, cupy.cuda.MemoryPointer(memory, 0))


@contextmanager
def on_stream(handle: int, ordinal: int) -> Iterator[None]:
    """Make a device, and somebody else's stream on it, CuPy's current ones."""
    with cupy.cuda.Device(ordinal), _foreign_stream(handle, ordinal):
        yield


class _ForeignStream:
    """A bare handle as CUDA's stream protocol has it."""

    def __init__(self, handle: int) -> None:
        self.handle = handle

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.handle


def _foreign_stream(handle: int, ordinal: int) -> Any:
    if hasattr(cupy.cuda.Stream, "from_external"):
        return cupy.cuda.Stream.from_external(_ForeignStream(handle))
    return cupy.cuda.ExternalStream(handle, ordinal)  # CuPy before 14.2, which warns of it
