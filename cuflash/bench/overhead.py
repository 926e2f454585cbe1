"""What a call costs beside its kernel: host time, and device memory beyond inputs and output."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from .inputs import numpy_dtype
from .measure import HostCall, Spread, Timer, host_times
from .peers import torch_available

SMALL = (1, 128, 8, 64)
"""Batch, seq, heads, dim of the host-cost measurement: small enough that the device always waits for the host."""


def cupy_calls(dtype: str) -> dict[str, HostCall]:
    """Cuflash on CuPy arrays: allocating its output, writing into a given one, and causal, where work has a counter."""
    import cupy

    import cuflash

    q, k, v, out = (cupy.zeros(SMALL, dtype=numpy_dtype(dtype)) for _ in range(4))
    return {
        "cuflash, CuPy": HostCall(lambda: cuflash.attention(q, k, v)),
        "cuflash, CuPy, out=": HostCall(lambda: cuflash.attention(q, k, v, out=out)),
        "cuflash, CuPy, causal": HostCall(lambda: cuflash.attention(q, k, v, causal=True)),
    }


def torch_calls(dtype: str) -> dict[str, HostCall]:
    """Cuflash on torch tensors, and SDPA on tensors in its own layout, by default dispatch and pinned to flash.

    All without autograd; the backend is pinned once outside of what is timed, as a program would do it.
    """
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    import cuflash

    sdpa = torch.nn.functional.scaled_dot_product_attention
    batch, seq, heads, dim = SMALL
    q, k, v, out = (torch.zeros(SMALL, dtype=getattr(torch, dtype), device="cuda") for _ in range(4))
    qs, ks, vs = (torch.zeros((batch, heads, seq, dim), dtype=q.dtype, device="cuda") for _ in range(3))

    @contextlib.contextmanager
    def flash() -> Any:
        with torch.no_grad(), sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            yield

    def plain() -> AbstractContextManager[Any]:
        return torch.no_grad()  # type: ignore[no-any-return]

    return {
        "cuflash, torch": HostCall(lambda: cuflash.attention(q, k, v), plain),
        "cuflash, torch, out=": HostCall(lambda: cuflash.attention(q, k, v, out=out), plain),
        "torch SDPA": HostCall(lambda: sdpa(qs, ks, vs), plain),
        "torch SDPA, flash": HostCall(lambda: sdpa(qs, ks, vs), flash),
    }


def measure_host(timer: Timer, dtype: str = "float16", batches: int = 25) -> dict[str, Spread]:
    """Microseconds per call at ``SMALL``, ours and torch's in turn."""
    calls = cupy_calls(dtype)
    if torch_available():
        calls |= torch_calls(dtype)
    return host_times(calls, timer, batches=batches)


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Device memory of one warm call, in bytes, as asked of CuPy's allocator.

    Attributes
    ----------
    requested : int
        All that the call allocated, its output included.
    output : int
        Of this, the output array (and the LSE if it is returned).
    lse : int
        What an LSE of the call holds: 4 bytes per query row and head.
    driver : int
        By how much the driver's free memory fell over 100 further calls: growth outside the pool.
    """

    requested: int
    output: int
    lse: int
    driver: int

    @property
    def extra(self) -> int:
        return self.requested - self.output


def measure_memory(shape: tuple[int, int, int, int], causal: bool, dtype: str = "bfloat16") -> MemoryUse:
    """What one warm call allocates beyond its inputs."""
    import cupy

    import cuflash

    q, k, v = (cupy.zeros(shape, dtype=numpy_dtype(dtype)) for _ in range(3))
    cuflash.attention(q, k, v, causal=causal)

    class Recorder(cupy.cuda.MemoryHook):  # type: ignore[misc]
        """Adds up what is asked of the pool."""

        name = "cuflash bench"
        requested = 0

        def malloc_preprocess(self, **kwargs: Any) -> None:
            self.requested += kwargs["size"]

    with Recorder() as recorder:
        out = cuflash.attention(q, k, v, causal=causal)
    cupy.cuda.get_current_stream().synchronize()
    before = cupy.cuda.runtime.memGetInfo()[0]
    for _ in range(100):
        cuflash.attention(q, k, v, causal=causal, out=out)
    cupy.cuda.get_current_stream().synchronize()
    fallen = before - cupy.cuda.runtime.memGetInfo()[0]
    batch, seq, heads, _ = shape
    return MemoryUse(recorder.requested, out.nbytes, 4 * batch * seq * heads, max(0, fallen))
