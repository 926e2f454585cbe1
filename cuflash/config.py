"""How it is computed: everything a tuner may change, and the shared memory that follows from it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from .problem import AttentionProblem

ELEMENT_BYTES = 2
PITCH_STEP = 64
"""Rows of a shared-memory tile are multiples of 64 elements (128 bytes), the span of the bank swizzle."""


def round_up(value: int, step: int) -> int:
    return -(-value // step) * step


class SmemRegion(NamedTuple):
    """A named piece of the dynamic shared memory; offsets and sizes in bytes."""

    name: str
    offset: int
    size: int


@dataclass(frozen=True, slots=True)
class KernelConfig:
    """The tile shape and pipeline of one kernel.

    Parameters
    ----------
    family : str
        Kernel family, which is also the template's name: ``"forward_sm80"``.
    block_m, block_n : int
        Query rows and keys of a tile.
    warps : int
        Warps of a thread block; each owns ``block_m / warps`` rows, a multiple of 16.
    stages : int
        Key/value tiles in flight, at least 2.
    q_registers : int
        Leading k-steps (16 elements of the head dim) of Q that stay in registers; the others are read from
        shared memory in every step.
    ctas : int
        Thread blocks that share a multiprocessor: the register limit of ``__launch_bounds__``.
    slack : int
        Base-2 logarithm of how far a probability may exceed 1 before the softmax raises its reference. A larger slack
        is faster and less accurate: where one key outweighs the others, its probability should be near 1, which
        rounding to 16 bits does not change.
    reason : str
        Why this row of the tuning table is what it is; not part of the identity.
    """

    family: str
    block_m: int
    block_n: int
    warps: int
    stages: int
    q_registers: int
    ctas: int
    slack: int = 2
    reason: str = field(default="", compare=False)

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def label(self) -> str:
        """The part of the symbol that names this config."""
        return f"m{self.block_m}n{self.block_n}w{self.warps}s{self.stages}q{self.q_registers}c{self.ctas}l{self.slack}"

    def smem(self, problem: AttentionProblem) -> tuple[SmemRegion, ...]:
        """The map: Q (later the output's staging), K and V of every stage, the rows' softmax references."""
        pitch_k = round_up(problem.head_dim, PITCH_STEP) * ELEMENT_BYTES
        pitch_v = round_up(problem.head_dim_v, PITCH_STEP) * ELEMENT_BYTES
        sizes = [("q_and_out", self.block_m * max(pitch_k, pitch_v))]
        for stage in range(self.stages):
            sizes += [(f"k{stage}", self.block_n * pitch_k), (f"v{stage}", self.block_n * pitch_v)]
        sizes.append(("softmax_reference", self.block_m * 4))
        regions, offset = [], 0
        for name, size in sizes:
            regions.append(SmemRegion(name, offset, size))
            offset += size
        return tuple(regions)

    def smem_bytes(self, problem: AttentionProblem) -> int:
        return sum(region.size for region in self.smem(problem))
