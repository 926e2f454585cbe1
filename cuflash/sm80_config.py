"""How the Ampere-style forward kernel computes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from .config import ForwardConfig, pitches
from .problem import AttentionProblem


@dataclass(frozen=True, slots=True, kw_only=True)
class Sm80Config(ForwardConfig):
    """A kernel of the Ampere-style family: ``mma.sync``, ``cp.async``, one work tile for each thread block.

    Parameters
    ----------
    warps : int
        Warps of a thread block.
    q_registers : int
        Leading k-steps (16 elements of the head dim) of Q that stay in registers; the others are read from
        shared memory in every step.
    ctas : int
        Thread blocks that share a multiprocessor: the register limit of ``__launch_bounds__``.
    """

    family: ClassVar[str] = "forward_sm80"

    # field(): without it a dataclass takes the base's property for the default.
    warps: int = field()
    q_registers: int
    ctas: int = field()

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def label(self) -> str:
        return f"m{self.block_m}n{self.block_n}w{self.warps}s{self.stages}q{self.q_registers}c{self.ctas}l{self.slack}"

    @property
    def summary(self) -> str:
        return (
            f"{self.block_m} queries x {self.block_n} keys, {self.warps} warps, {self.stages} stages, "
            f"{self.q_registers} Q k-steps in registers, {self.ctas} blocks per SM"
        )

    def smem_sizes(self, problem: AttentionProblem) -> Sequence[tuple[str, int]]:
        """Q (later the output's staging), K and V of every stage, the rows' softmax references."""
        pitch_k, pitch_v = pitches(problem)
        sizes = [("q_and_out", self.block_m * max(pitch_k, pitch_v))]
        for stage in range(self.stages):
            sizes += [(f"k{stage}", self.block_n * pitch_k), (f"v{stage}", self.block_n * pitch_v)]
        return [*sizes, ("softmax_reference", self.block_m * 4)]
