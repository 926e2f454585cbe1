"""Inputs of the benchmark: normal random numbers made once per dtype and cut into every shape."""

from __future__ import annotations

import math
from collections.abc import Iterable
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
    head_dim_v: int
    heads_k: int

    @classmethod
    def of(
        cls,
        head_dim: int,
        causal: bool,
        seqlen: int,
        dtype: Dtype,
        *,
        head_dim_v: int | None = None,
        batch: int | None = None,
        heads: int | None = None,
        heads_k: int | None = None,
    ) -> Case:
        """By default ``TOKENS`` tokens and ``WIDTH // head_dim`` heads, as many of K and V, of one head dim."""
        batch = batch or max(1, TOKENS // seqlen)
        heads = heads or max(1, WIDTH // head_dim)
        return cls(head_dim, causal, seqlen, dtype, batch, heads, head_dim_v or head_dim, heads_k or heads)

    @property
    def shapes(self) -> tuple[tuple[int, int, int, int], ...]:
        """Of q, k, v and the output."""
        sizes = (self.heads, self.head_dim), (self.heads_k, self.head_dim), (self.heads_k, self.head_dim_v)
        return tuple((self.batch, self.seqlen, *size) for size in (*sizes, (self.heads, self.head_dim_v)))

    @property
    def flops(self) -> float:
        """2 B H N N (D + Dv), half of it under a causal mask: the convention of the FlashAttention papers."""
        dims = self.head_dim + self.head_dim_v
        return 2.0 * self.batch * self.heads * self.seqlen**2 * dims / (2 if self.causal else 1)

    def flops_of(self, which: str) -> float:
        """As `flops`, for ``"backward"`` 2 B H N N (3 D + 2 Dv): 2.5 times as many where D = Dv."""
        if which == "forward":
            return self.flops
        return self.flops * (3 * self.head_dim + 2 * self.head_dim_v) / (self.head_dim + self.head_dim_v)

    def tflops(self, milliseconds: float) -> float:
        return self.flops / milliseconds / 1e9

    def problem(self, arch: str) -> AttentionProblem:
        """The kernel for a target that the case needs."""
        return AttentionProblem(
            self.head_dim, self.head_dim_v, self.dtype, "causal" if self.causal else "full", 16, False, arch
        )

    def __str__(self) -> str:
        dims = f"d{self.head_dim}" + (f"/{self.head_dim_v}" if self.head_dim_v != self.head_dim else "")
        heads = f"H {self.heads}" + (f" over {self.heads_k}" if self.heads_k != self.heads else "")
        mask = "causal" if self.causal else "full"
        return f"{self.dtype} {dims} {mask} N {self.seqlen} (B {self.batch}, {heads})"


def numpy_dtype(name: str) -> np.dtype[Any]:
    """The NumPy dtype of a name; bfloat16 comes from ml_dtypes."""
    import ml_dtypes  # noqa: F401 - makes its names known to NumPy

    return np.dtype(name)


def poison(array: Any) -> None:
    """Fill with NaN: 0x7fff is one in float16 and in bfloat16."""
    array.view(np.uint16)[...] = 0x7FFF


class InputPool:
    """Q, K, V and one like the output of some cases, as CuPy views of four buffers; nothing is copied per case.

    The numbers are made on the host: CuPy's own generator would need the cuRAND library.
    """

    def __init__(self, dtype: str, cases: Iterable[Case], seed: int = 0) -> None:
        import cupy

        rng = np.random.default_rng(seed)
        sizes = (max(map(math.prod, shapes)) for shapes in zip(*(case.shapes for case in cases), strict=True))
        self._buffers = [
            cupy.asarray(rng.standard_normal(size, dtype=np.float32).astype(numpy_dtype(dtype))) for size in sizes
        ]

    def arrays(self, case: Case) -> list[Any]:
        """[q, k, v, x] of a case: the forward pass writes its output into x, the backward pass takes it as dO."""
        return [
            buffer[: math.prod(shape)].reshape(shape) for buffer, shape in zip(self._buffers, case.shapes, strict=True)
        ]
