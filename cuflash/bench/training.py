"""What training costs beside the kernels: host time of forward and backward, and device memory over the length."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from .accuracy import Error, array_module, compare, exact_results
from .inputs import numpy_dtype
from .measure import HostCall, Spread, Timer, host_times
from .overhead import SMALL
from .peers import OURS, torch_available

LONG_LENGTHS = (16384, 32768, 65536)
LONG_HEADS, LONG_HEAD_DIM = 16, 64
JUDGED_HEADS = 2
"""Of the longest sequence, whole: every row and key."""


# --- host time -------------------------------------------------------------------------------------------------


def cupy_calls(dtype: str) -> dict[str, HostCall]:
    """Both calls on CuPy arrays, in turn."""
    import cupy

    import cuflash

    q, k, v, dout = (cupy.zeros(SMALL, dtype=numpy_dtype(dtype)) for _ in range(4))

    def forward_and_backward() -> Any:
        out, lse = cuflash.attention(q, k, v, return_lse=True)
        return cuflash.attention_backward(dout, q, k, v, out, lse)

    return {"cuflash, CuPy": HostCall(forward_and_backward)}


def torch_calls(dtype: str) -> dict[str, HostCall]:
    """Autograd of cuflash, and of SDPA on tensors in its own layout, by default dispatch and pinned to flash."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    import cuflash

    sdpa = torch.nn.functional.scaled_dot_product_attention
    batch, seq, heads, dim = SMALL

    def gradients(attention: Callable[..., Any], shape: tuple[int, ...]) -> Callable[[], Any]:
        made = (torch.zeros(shape, dtype=getattr(torch, dtype), device="cuda") for _ in range(4))
        dout, *leaves = made
        for leaf in leaves:
            leaf.requires_grad_()
        return lambda: torch.autograd.grad(attention(*leaves), leaves, dout)

    with_sdpa = gradients(sdpa, (batch, heads, seq, dim))
    return {
        "cuflash, torch": HostCall(gradients(cuflash.attention, SMALL)),
        "torch SDPA": HostCall(with_sdpa),
        "torch SDPA, flash": HostCall(with_sdpa, lambda: sdpa_kernel(SDPBackend.FLASH_ATTENTION)),
    }


def measure_host(timer: Timer, dtype: str = "float16", batches: int = 25) -> dict[str, Spread]:
    """Microseconds per forward and backward pass at ``SMALL``, ours and torch's in turn."""
    calls = cupy_calls(dtype)
    if torch_available():
        calls |= torch_calls(dtype)
    return host_times(calls, timer, batches=batches)


# --- device memory ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LongCall:
    """Forward and backward pass of one sequence, in bytes as CuPy's allocator gave them.

    Attributes
    ----------
    inputs : int
        q, k, v and dout.
    results : int
        The output, the LSE and the gradients.
    peak : int
        The most that was in use at once.
    errors : dict
        Of the results by name, where they were compared with float64.
    """

    case: str
    seqlen: int
    inputs: int
    results: int
    peak: int
    errors: dict[str, Error]


def measure_long_calls(lengths: Iterable[int] = LONG_LENGTHS, dtype: str = "bfloat16") -> Iterator[LongCall]:
    """Each length; the results of the last are judged."""
    *others, last = lengths
    for seqlen in others:
        yield measure_long_call(seqlen, dtype, judged=False)
    yield measure_long_call(last, dtype, judged=True)


def measure_long_call(seqlen: int, dtype: str, *, judged: bool) -> LongCall:
    """One sequence of ``LONG_HEADS`` heads, full."""
    import cuflash

    rng = np.random.default_rng(0)
    shape = 1, seqlen, LONG_HEADS, LONG_HEAD_DIM
    with watched_memory() as used:
        q, k, v, dout = (on_device(rng.standard_normal(shape, dtype=np.float32), dtype) for _ in range(4))
        out, lse = cuflash.attention(q, k, v, return_lse=True)
        dq, dk, dv = cuflash.attention_backward(dout, q, k, v, out, lse)
    made = {"out": out, "dq": dq, "dk": dk, "dv": dv}
    errors: dict[str, Error] = {}
    if judged and (xp := array_module()) is not np:  # NumPy takes minutes
        errors = compare({OURS: made}, exact_results((q, k, v, dout), False, xp, JUDGED_HEADS), xp)[OURS]
    return LongCall(
        "B{} N{} H{} D{}".format(*shape),
        seqlen,
        sum(x.nbytes for x in (q, k, v, dout)),
        lse.nbytes + sum(x.nbytes for x in made.values()),
        used.peak,
        errors,
    )


def on_device(values: Any, dtype: str) -> Any:
    """A CuPy array of random numbers, rounded on the host."""
    import cupy

    return cupy.asarray(values.astype(numpy_dtype(dtype)))


@dataclass(slots=True)
class Used:
    """Bytes of the pool that are in use, and the most that were."""

    now: int = 0
    peak: int = 0

    def add(self, size: int) -> None:
        self.now += size
        self.peak = max(self.peak, self.now)


@contextlib.contextmanager
def watched_memory() -> Iterator[Used]:
    """Follows CuPy's pool from here on."""
    import cupy

    used = Used()

    class Watch(cupy.cuda.MemoryHook):  # type: ignore[misc]
        """Counts blocks as the pool hands them out, rounded up, and takes them back."""

        name = "cuflash bench"

        def malloc_postprocess(self, **kwargs: Any) -> None:
            used.add(kwargs["mem_size"])

        def free_postprocess(self, **kwargs: Any) -> None:
            used.add(-kwargs["mem_size"])

    with Watch():
        yield used
