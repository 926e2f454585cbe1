"""Inputs of the benchmark: normal random numbers made once per dtype and cut into every shape."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..problem import AttentionProblem, Dtype

TOKENS = 16384
"""Batch times length of the forward table, as in the FlashAttention papers."""
WIDTH = 2048
"""Heads times head dim of the forward table, as in the FlashAttention papers."""


@dataclass(frozen=True, slots=True)
class Case:
    """One cell of a table: self-attention of equal lengths in the (batch, seq, heads, dim) layout."""

    head_dim: int
    causal: bool
    seqlen: int
    dtype: Dtype
    batch: int
    heads: int

    @classmethod
    def of(cls, head_dim: int, causal: bool, seqlen: int, dtype: Dtype) -> Case:
        """The case with ``TOKENS`` tokens and ``WIDTH // head_dim`` heads."""
        return cls(head_dim, causal, seqlen, dtype, max(1, TOKENS // seqlen), max(1, WIDTH // head_dim))

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return (self.batch, self.seqlen, self.heads, self.head_dim)

    @property
    def flops(self) -> float:
        """4 B H N N D, half of it under a causal mask: the convention of the FlashAttention papers."""
        return 4.0 * self.batch * self.heads * self.seqlen**2 * self.head_dim / (2 if self.causal else 1)

    def tflops(self, milliseconds: float) -> float:
        return self.flops / milliseconds / 1e9

    def problem(self, arch: str) -> AttentionProblem:
        """The kernel that the case needs."""
        return AttentionProblem(
            self.head_dim, self.head_dim, self.dtype, "causal" if self.causal else "full", 16, False, arch
        )

    def __str__(self) -> str:
        mask = "causal" if self.causal else "full"
        return f"{self.dtype} d{self.head_dim} {mask} N {self.seqlen} (B {self.batch}, H {self.heads})"


def numpy_dtype(name: str) -> np.dtype[Any]:
    """The NumPy dtype of a name; bfloat16 comes from ml_dtypes."""
    import ml_dtypes  # noqa: F401 - makes its names known to NumPy

    return np.dtype(name)


def poison(array: Any) -> None:
    """Fill with NaN: 0x7fff is one in float16 and in bfloat16."""
    array.view(np.uint16)[...] = 0x7FFF


class InputPool:
    """Q, K, V and the output of any case, as CuPy views of four buffers; nothing is copied per case.

    The numbers are made on the host: CuPy's own generator would need the cuRAND library.
    """

    def __init__(self, dtype: str, elements: int = TOKENS * WIDTH, seed: int = 0) -> None:
        import cupy

        rng = np.random.default_rng(seed)
        self._buffers = [
            cupy.asarray(rng.standard_normal(elements, dtype=np.float32).astype(numpy_dtype(dtype))) for _ in range(3)
        ]
        self._buffers.append(cupy.empty_like(self._buffers[0]))

    def arrays(self, shape: tuple[int, ...]) -> list[Any]:
        """[q, k, v, out] of this shape; what the output holds is arbitrary."""
        count = math.prod(shape)
        return [buffer[:count].reshape(shape) for buffer in self._buffers]
