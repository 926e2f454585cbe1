"""The kernel families of the quantizer: as `cuflash.kernels`, with their configs, tuning and parameter blocks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import ClassVar

from .arch import ARCHES
from .config import KernelConfig, StreamConfig, pitches, round_up
from .cpu_quantize import FEWEST, PARTIALS, SAMPLE
from .fp8_layout import TILE, padded
from .kernels import SHIPPED_HEAD_DIMS, TMA_TARGETS, KernelFamily
from .params import F32, FAST_DIV, I32, POINTER, ROW_AXES, CType, Field, ParameterBlock, stride_fields
from .problem import DTYPES, AttentionProblem, Task

__all__ = [
    "FAMILIES", "LSE_SHIFT", "MEANS", "QUANTIZE", "QuantizeConfig", "QuantizeLseConfig", "QuantizeMeansConfig",
    "lse_problem", "shipped_problems",
]  # fmt: skip

TASKS: tuple[Task, ...] = ("quantize_means", "quantize")

SMEM_OF_A_BLOCK = 1024
"""What the system takes of an SM's shared memory for each block."""

SIGN_BITS = CType("SignBits", "8I", 32, 4)


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizeConfig(KernelConfig):
    """The quantizer, whose thread blocks take tile after tile.

    Parameters
    ----------
    columns : {64, 128}
        Columns of a token of Q or K that a thread has.
    parts : {1, 2, 4}
        Threads for each of a tile's tokens, as many as it takes.
    stages : {1, 2, 3}
        Tiles in shared memory, which arrive while one is in work.
    ctas : int
        Thread blocks that share a multiprocessor.
    """

    family: ClassVar[str] = "quantize"
    tile: ClassVar[int] = TILE
    ticket_batch: ClassVar[int] = 8

    parts: int
    columns: int = 64
    stages: int = 2
    ctas: int = field(default=1)

    @property
    def threads(self) -> int:
        return TILE * self.parts

    @property
    def label(self) -> str:
        return f"p{self.parts}n{self.columns}s{self.stages}c{self.ctas}"

    @property
    def summary(self) -> str:
        return f"{self.threads} threads of {self.columns} columns, {self.stages} stages, {self.ctas} blocks on an SM"

    def stage_bytes(self, problem: AttentionProblem) -> int:
        """A tile as it comes."""
        return TILE * max(pitches(problem))

    def mean_bytes(self, problem: AttentionProblem) -> int:
        return 4 * max(padded(problem.head_dim), padded(problem.head_dim_v))

    def code_pitch(self, problem: AttentionProblem) -> int:
        """Bytes from one row's codes to those of the next one."""
        return 64 if problem.head_dim <= 64 else round_up(problem.head_dim, 128)

    def warp_columns(self, problem: AttentionProblem) -> int:
        """Columns of V that a warp has, two chunks at least."""
        return round_up(-(-problem.head_dim_v // (self.threads // 32)), 16)

    def warp_code_bytes(self, problem: AttentionProblem) -> int:
        """A warp's codes: of some rows, or of some columns."""
        return max(32 // self.parts * self.code_pitch(problem), self.warp_columns(problem) * TILE)

    def smem_sizes(self, problem: AttentionProblem) -> Sequence[tuple[str, int]]:
        """Tiles as they come and as they leave, the signs of the rotation, maxima of warps, what is known of the tiles.

        The signs lie over the elements of a row; maxima have two places, and tickets those of two batches.
        """
        warps = self.threads // 32
        return [
            ("tiles", self.stages * self.stage_bytes(problem)),
            ("codes", warps * self.warp_code_bytes(problem)),
            ("means", self.stages * self.mean_bytes(problem)),
            ("signs", 2 * self.columns * self.parts),
            ("maxima", 2 * 4 * warps),
            ("tickets", 64 * 2 * self.ticket_batch),
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizeMeansConfig(StreamConfig):
    """The kernel before the quantizer, which reads a sample of K and V."""

    family: ClassVar[str] = "quantize_means"
    sample: ClassVar[int] = SAMPLE
    fewest: ClassVar[int] = FEWEST
    partials: ClassVar[int] = PARTIALS

    threads: int

    @property
    def summary(self) -> str:
        return f"{self.threads} threads; {PARTIALS} partial sums of up to {SAMPLE // PARTIALS} tokens"

    def smem_sizes(self, problem: AttentionProblem) -> Sequence[tuple[str, int]]:
        """Of every warp and column, the sum, and of how many numbers it is."""
        columns = max(padded(problem.head_dim), padded(problem.head_dim_v))
        return [(name, self.threads // 32 * 4 * columns) for name in ("sums", "counts")]


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizeLseConfig(StreamConfig):
    """The kernel before attention whose LSE is wanted: what the mean of K adds to it."""

    family: ClassVar[str] = "quantize_lse"
    threads: int = field(default=128)

    @property
    def summary(self) -> str:
        return f"{TILE} rows, {self.threads} threads"

    def smem_sizes(self, problem: AttentionProblem) -> Sequence[tuple[str, int]]:
        return ()


def quantize_config(problem: AttentionProblem) -> QuantizeConfig:
    """As many blocks as registers and shared memory allow, and then two stages, if they fit."""
    dim = max(problem.head_dim, problem.head_dim_v)
    parts = 1 if dim <= 64 else 2 if dim <= 128 else 4
    room = ARCHES[problem.arch].smem_per_sm

    def config(stages: int) -> QuantizeConfig:
        smem_bytes = QuantizeConfig(parts=parts, stages=stages).smem_bytes(problem) + SMEM_OF_A_BLOCK
        ctas = min(4 // parts, room // smem_bytes)
        return QuantizeConfig(parts=parts, stages=stages, ctas=ctas, reason="64 values a thread, so 128 registers")

    return max(config(2), config(1), key=lambda config: config.ctas)


def quantize_means_config(problem: AttentionProblem) -> QuantizeMeansConfig:
    """As many threads as have eight tokens each, all in flight."""
    dim = max(problem.head_dim, problem.head_dim_v)
    threads = 256 if dim <= 64 else 512 if dim <= 128 else 1024
    return QuantizeMeansConfig(threads=threads, reason="a thread has 16 bytes of eight tokens, all in flight")


def quantize_lse_config(problem: AttentionProblem) -> QuantizeLseConfig:
    """One for all problems."""
    return QuantizeLseConfig(reason="one pass over Q, bound by memory")


QUANTIZE = ParameterBlock(
    (
        *(Field(name, POINTER, "") for name in ("q", "q_payload", "q_scales")),
        *(Field(name, POINTER, "") for name in ("k", "k_payload", "k_scales")),
        Field("k_mean", POINTER, "null: nothing is subtracted"),
        *(Field(name, POINTER, "") for name in ("v", "v_payload", "v_scales")),
        Field("v_mean", POINTER, "null: nothing is subtracted"),
        *(each for tensor in ("q", "k", "v") for each in stride_fields(tensor)),
        *(each for tensor in ("q", "k") for each in stride_fields(f"{tensor}_payload", ROW_AXES, "bytes")),
        Field("q_heads", FAST_DIV, ""),
        Field("q_tiles", FAST_DIV, "of a head"),
        Field("k_heads", FAST_DIV, "of K and V"),
        Field("k_tiles", FAST_DIV, "of a head of K and V"),
        Field("k_begin", I32, "tiles of Q: those of K come behind them"),
        Field("v_begin", I32, "tiles of Q and K"),
        Field("work", I32, "tiles of all three"),
        Field("seqlen_q", I32, ""),
        Field("seqlen_k", I32, ""),
        Field("e5m2", I32, "0: e4m3"),
        Field("rotated", I32, "0: Q and K are not"),
        Field("signs", SIGN_BITS, "of the rotation"),
    ),
    per_launch=11,
)

MEANS = ParameterBlock(
    (
        Field("k", POINTER, ""),
        Field("k_mean", POINTER, ""),
        Field("v", POINTER, ""),
        Field("v_mean", POINTER, ""),
        *stride_fields("k"),
        *stride_fields("v"),
        Field("heads", FAST_DIV, ""),
        Field("v_begin", I32, "thread blocks of K: those of V come behind them"),
        Field("seqlen", I32, ""),
        Field("rotated", I32, "0: K is not"),
        Field("signs", SIGN_BITS, "of the rotation"),
    ),
    per_launch=4,
)

LSE_SHIFT = ParameterBlock(
    (
        Field("q", POINTER, "codes in rows"),
        Field("q_scales", POINTER, "float32 (batch, heads, tiles)"),
        Field("k_mean", POINTER, "float32 (batch, key/value heads, head_dim)"),
        Field("shift", POINTER, "float32 (batch, heads, queries)"),
        *stride_fields("q", ROW_AXES, "bytes"),
        Field("tiles", FAST_DIV, "of a head"),
        Field("heads", FAST_DIV, "query heads"),
        Field("group", FAST_DIV, "query heads per key/value head"),
        Field("kv_heads", I32, "key/value heads"),
        Field("seqlen", I32, "queries"),
        Field("e5m2", I32, "0: e4m3"),
        Field("scale", F32, ""),
    ),
    per_launch=4,
)

FAMILIES = {
    family.name: family
    for family in (
        KernelFamily("quantize", "quantize.cu.j2", "cuflash_quantize", QUANTIZE, quantize_config),
        KernelFamily("quantize_means", "quantize_means.cu.j2", "cuflash_means", MEANS, quantize_means_config),
        KernelFamily("quantize_lse", "quantize_lse.cu.j2", "cuflash_lse_shift", LSE_SHIFT, quantize_lse_config),
    )
}


def shipped_problems(arch: str) -> Iterator[AttentionProblem]:
    """What ``cuflash compile --all`` builds for a target that names devices."""
    if arch in TMA_TARGETS.values():
        return
    for (d, dv), dtype in product(SHIPPED_HEAD_DIMS, DTYPES):
        for task in TASKS:
            yield AttentionProblem(d, dv, dtype, "full", 16, False, arch, task)
    for d in dict.fromkeys(d for d, _ in SHIPPED_HEAD_DIMS):
        yield lse_problem(d, arch)
    from .prepare_kernels import shipped_problems as shipped_prepare_problems

    yield from shipped_prepare_problems(arch)


def lse_problem(head_dim: int, arch: str) -> AttentionProblem:
    """The kernel that finds what the mean of K adds to the LSE; of the padded head dim."""
    return AttentionProblem(head_dim, head_dim, "bfloat16", "full", 16, False, arch, "quantize_lse")
