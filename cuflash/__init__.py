"""cuflash: exact fused attention for plain arrays, on CUDA kernels compiled at run time or on the CPU.

>>> import numpy as np, cuflash
>>> q = k = v = np.ones((1, 8, 2, 64), np.float32)  # (batch, seq, heads, dim)
>>> cuflash.attention(q, k, v, causal=True).shape
(1, 8, 2, 64)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .errors import CompileError, DriverError, MissingKernelError, UnsupportedError

if TYPE_CHECKING:
    from . import jax as jax
    from . import torch as torch
    from .api import attention, warmup
    from .backward import attention_backward
    from .explanation import Explanation, explain
    from .quantization import quantize, quantize_qkv
    from .quantized import QuantizedTensor

__version__ = "0.1.0"

__all__ = [
    "CompileError",
    "DriverError",
    "Explanation",
    "MissingKernelError",
    "QuantizedTensor",
    "UnsupportedError",
    "__version__",
    "attention",
    "attention_backward",
    "explain",
    "quantize",
    "quantize_qkv",
    "warmup",
]

_HOMES = {
    "attention": "api",
    "attention_backward": "backward",
    "warmup": "api",
    "explain": "explanation",
    "Explanation": "explanation",
    "quantize": "quantization",
    "quantize_qkv": "quantization",
    "QuantizedTensor": "quantized",
}
"""Names that load their module when they are first used: importing cuflash costs next to nothing."""


_FRAMEWORKS = ("jax", "torch")
"""Modules that need a framework: loaded by an import, or when the attribute is first used."""


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name in _FRAMEWORKS:
        return import_module(f".{name}", __name__)
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f".{_HOMES[name]}", __name__), name)
    return value


def __dir__() -> list[str]:
    return sorted(globals().keys() | _HOMES.keys())
