"""The buffers that XLA hands to a Python callback (`jax.experimental.buffer_callback`), as CuPy's or NumPy's arrays.

XLA owns the memory and keeps it until its stream has passed. Buffers are C-contiguous; their element types are NumPy's
and ml_dtypes'. `jax.vmap` puts the axes that it maps in front of a buffer's own.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np

from ..errors import UnsupportedError
from . import CPU
from .bridge import CUDA_DEVICES, HOST_DEVICES, require_cupy
from .capsule import address_of


def device_of(buffer: Any) -> int:
    """A buffer's CUDA ordinal, or `CPU`."""
    kind, ordinal = buffer.__dlpack_device__()
    if kind in HOST_DEVICES:
        return CPU
    if kind in CUDA_DEVICES:
        return int(ordinal)
    raise UnsupportedError(f"q is on a device of DLPack type {kind}; cuflash takes CUDA devices and CPUs")


def view(buffer: Any, ndim: int) -> Any:
    """A buffer as an array of ``ndim`` axes: those in front of them are folded into the first.

    It may be written although NumPy and CuPy cannot know which of a callback's buffers are its results.
    """
    first = len(buffer.shape) - ndim + 1
    shape = (math.prod(buffer.shape[:first]), *buffer.shape[first:])
    device = device_of(buffer)
    if device == CPU:
        return np.asarray(buffer).reshape(shape)
    from . import cupy_arrays

    return cupy_arrays.view(address_of(buffer), shape, buffer.dtype, device)


def on_stream_of(context: Any, buffer: Any) -> AbstractContextManager[Any]:
    """Make the buffer's device and the stream of XLA's computation current for CuPy; nothing in host memory.

    Parameters
    ----------
    context : jax.experimental.buffer_callback.ExecutionContext
    buffer : jax.experimental.buffer_callback.Buffer
    """
    device = device_of(buffer)
    if device == CPU:
        return nullcontext()
    require_cupy("q")
    from . import cupy_arrays

    stream = context.stream
    return cupy_arrays.on_stream(stream() if callable(stream) else stream, device)  # a method in some releases of JAX
