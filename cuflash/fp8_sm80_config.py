"""How the Ampere-style forward kernel for 8-bit inputs computes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from .config import PITCH_STEP, round_up
from .fp8_layout import TILE
from .problem import AttentionProblem
from .sm80_config import Sm80Config

BLOCKS_N = (32, 64, 128)
BLOCKS_M = (64, 128)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp8Sm80Config(Sm80Config):
    """A kernel of the structure of `Sm80Config` for e4m3 and e5m2 inputs with a scale for every 128 tokens.

    Parameters
    ----------
    block_m : {64, 128}
        A block's queries share a scale.
    block_n : {32, 64, 128}
        A step's keys share a scale, and lie in one image of V.
    stages : int
        Key/value tiles in shared memory at a time: all as codes, or one of them as fp16.
    converted : bool
        Tiles become fp16 on chip, and the products are those of fp16; otherwise ``mma.sync`` takes the codes.
    two_level : bool
        The tensor cores add up one key tile, and the sum over tiles is fp32. Of 8-bit codes they truncate the sum;
        that of fp16 products they keep in fp32.
    """

    family: ClassVar[str] = "forward_fp8_sm80"

    converted: bool
    two_level: bool
    stages: int = field(default=2)
    slack: int = 0

    def __post_init__(self) -> None:
        Sm80Config.__post_init__(self)
        if self.block_n not in BLOCKS_N:
            raise ValueError(f"block_n is {self.block_n}; accepted are {', '.join(map(str, BLOCKS_N))}")
        if self.block_m not in BLOCKS_M:
            raise ValueError(f"block_m is {self.block_m}; accepted are {', '.join(map(str, BLOCKS_M))}")
        if self.slack:
            raise ValueError(f"slack is {self.slack}; accepted is 0: references are exact in kernels for fp8 inputs")

    @property
    def label(self) -> str:
        switches = "".join(letter for letter, on in zip("th", (self.two_level, self.converted), strict=True) if on)
        return f"m{self.block_m}n{self.block_n}w{self.warps}s{self.stages}q{self.q_registers}c{self.ctas}{switches}"

    @property
    def summary(self) -> str:
        products = "tiles converted to fp16" if self.converted else "mma.sync on codes"
        level = "in fp32" if self.two_level else "by the tensor cores"
        return f"{Sm80Config.summary.fget(self)}, {products}, O summed {level}"  # type: ignore[attr-defined]

    def smem_sizes(self, problem: AttentionProblem) -> Sequence[tuple[str, int]]:
        """Q (later the output's staging), codes of K and V of every stage, and the tile that is converted."""
        codes, halves = (round_up(problem.head_dim, step) for step in (2 * PITCH_STEP, PITCH_STEP))
        pitch_q = 2 * halves if self.converted else codes
        sizes = [("q_and_out", self.block_m * max(pitch_q, 2 * round_up(problem.head_dim_v, PITCH_STEP)))]
        for stage in range(self.stages - self.converted):
            sizes += [(f"k{stage}", self.block_n * codes), (f"v{stage}", self.block_n * problem.head_dim_v)]
        if self.converted:
            sizes += [("k_fp16", self.block_n * pitch_q), ("v_fp16", 2 * self.block_n * problem.head_dim_v)]
        return sizes


assert all(TILE % block == 0 for block in (*BLOCKS_M, *BLOCKS_N))
