"""FlashAttention-3 in the build that the package dew-flash-attn-cu13 ships (sm_90a; `hopper/` of flash-attention).

The package's own interface is JAX's; here its handlers are called directly, on the memory and in the stream that
everybody uses. The forward pass always writes the LSE. The build has no kernels for clusters of thread blocks.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from .ffi import FfiCall, load_library
from .inputs import Case

NAME = "flash3"
PACKAGE = "dew_flash_attn"
LIBRARY = "libdew_flash_attn3.so"
COMPUTE_CAPABILITY = "90"
HEAD_DIMS = (64, 128, 192, 256)
"""Others would be padded, which is not the kernels' work."""


def available() -> bool:
    """Whether the package is installed and can be loaded, beside a GPU that its kernels are made for."""
    if importlib.util.find_spec(PACKAGE) is None:
        return False
    import cupy

    if cupy.cuda.Device().compute_capability != COMPUTE_CAPABILITY:
        return False
    try:
        _library()
    except (ImportError, OSError):
        return False
    return True


def reason_against(case: Case) -> str:
    """Why the build does not take a case; empty if it does."""
    if case.head_dim in HEAD_DIMS and case.head_dim_v == case.head_dim:
        return ""
    return f"head dims {case.head_dim} and {case.head_dim_v}: it is built for {HEAD_DIMS}, of V the same"


def forward(case: Case, arrays: Sequence[Any], lse: Any = None) -> FfiCall:
    """Of q, k and v into out; (batch, seq, heads, dim), and (batch, heads, seq) for the LSE."""
    import cupy

    q, k, v, out = arrays
    lse = _empty_lse(case) if lse is None else lse
    of_split_keys = [cupy.empty((1,) * ndim, dtype="float32") for ndim in (4, 3)]  # unused
    return _call("fwd", case, (q, k, v), (out, lse, *of_split_keys))


def backward(case: Case, inputs: Sequence[Any]) -> Callable[[Sequence[Any]], FfiCall]:
    """Of q, k, v and dout: the call for gradients (dq, dk, dv), from an output and an LSE of its own on."""
    import cupy

    q, k, v, dout = inputs
    out, lse = cupy.empty_like(dout), _empty_lse(case)
    forward(case, (q, k, v, out), lse)()
    rows = case.heads * (case.batch * case.seqlen + 128 * (case.batch + 1))  # each sequence's, rounded up
    scratch = [cupy.empty(rows, dtype="float32") for _ in range(2)]
    return lambda grads: _call("bwd", case, (dout, q, k, v, out, lse), (*grads, *scratch))


def _empty_lse(case: Case) -> Any:
    import cupy

    return cupy.empty((case.batch, case.heads, case.seqlen), dtype="float32")


@functools.cache
def _library() -> Any:
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        raise ImportError(f"{PACKAGE} is not installed")
    return load_library(str(Path(spec.origin).with_name(LIBRARY)))


def _call(name: str, case: Case, arguments: Sequence[Any], results: Sequence[Any]) -> FfiCall:
    attributes = {
        "is_causal": case.causal,
        "softmax_scale": case.head_dim**-0.5,
        "window_size_left": -1,
        "window_size_right": 0 if case.causal else -1,
    }
    return FfiCall(getattr(_library(), f"dew_flash3_mha_{name}"), arguments, results, attributes)
