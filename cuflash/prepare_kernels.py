"""The kernel that prepares 8-bit arrays of the caller: as `cuflash.kernels`, with its config and parameter block."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from .config import StreamConfig
from .fp8_layout import ROLES, TILE, padded
from .kernels import SHIPPED_HEAD_DIMS, KernelFamily
from .params import F32, FAST_DIV, I32, POINTER, ROW_AXES, Field, ParameterBlock, stride_fields
from .problem import AttentionProblem, Dtype

__all__ = ["FAMILIES", "PREPARE", "PrepareConfig", "prepare_problem", "shipped_problems"]

SCALE_AXES = ("batch", "head", "tile")
DTYPE: Dtype = "bfloat16"
"""A problem has one; this kernel moves codes and asks for none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrepareConfig(StreamConfig):
    """A thread block takes a tile of Q, of K or of V."""

    family: ClassVar[str] = "prepare"
    tile: ClassVar[int] = TILE

    threads: int = field(default=256)

    @property
    def summary(self) -> str:
        return f"{TILE} tokens, {self.threads} threads"

    def smem_sizes(self, problem: AttentionProblem) -> Sequence[tuple[str, int]]:
        """The image of a tile of V."""
        return [("image", padded(problem.head_dim_v) * TILE)]


def prepare_config(problem: AttentionProblem) -> PrepareConfig:
    """One for all problems."""
    return PrepareConfig(reason="at head dim 128, 64 bytes of V for each thread")


PREPARE = ParameterBlock(
    (
        *(Field(role, POINTER, "the caller's codes") for role in ROLES),
        *(Field(f"{role}_scale", POINTER, "the caller's, float32; null: one number") for role in ROLES),
        Field("q_payload", POINTER, "codes in rows"),
        Field("k_payload", POINTER, "codes in rows"),
        Field("v_payload", POINTER, "images of V^T (cuflash/fp8_layout.py)"),
        *(Field(f"{role}_scales", POINTER, "float32 (batch, heads, tiles)") for role in ROLES),
        *(Field(f"{role}_number", F32, "the scale where there is no array of them") for role in ROLES),
        Field("k_begin", I32, "tiles of Q that are copied: those of K come behind them"),
        Field("v_begin", I32, "tiles of Q and K that are copied"),
        Field("q_count", I32, "scales of Q"),
        Field("k_count", I32, "scales of K, and of V"),
        Field("seqlen_q", I32, ""),
        Field("seqlen_k", I32, ""),
        Field("q_heads", FAST_DIV, ""),
        Field("q_tiles", FAST_DIV, "of a head"),
        Field("k_heads", FAST_DIV, "of K and V"),
        Field("k_tiles", FAST_DIV, "of a head of K and V"),
        *(each for role in ROLES for each in stride_fields(role)),
        *(each for role in ROLES for each in stride_fields(f"{role}_scale", SCALE_AXES)),
        *(each for role in ("q", "k") for each in stride_fields(f"{role}_payload", ROW_AXES, "bytes")),
    ),
    per_launch=15,
)

FAMILIES = {"prepare": KernelFamily("prepare", "prepare.cu.j2", "cuflash_prepare", PREPARE, prepare_config)}


def prepare_problem(head_dim: int, head_dim_v: int, access_bytes: int, arch: str) -> AttentionProblem:
    """The kernel for head dims of what it reads, by accesses of 16, 8, 4 or 1 bytes."""
    return AttentionProblem(head_dim, head_dim_v, DTYPE, "full", access_bytes, False, arch, "prepare")


def shipped_problems(arch: str) -> Iterator[AttentionProblem]:
    """What ``cuflash compile --all`` builds for a target that names devices: V alone, by wide accesses."""
    for dim in dict.fromkeys(dim_v for _, dim_v in SHIPPED_HEAD_DIMS):
        yield prepare_problem(dim, dim, 16, arch)
