"""How the Hopper forward kernel for 8-bit inputs computes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from .config import round_up
from .driver import BYTE, box_bytes
from .fp8_layout import TILE
from .problem import AttentionProblem
from .sm90_config import Sm90Config

OUTPUT_CHUNK = 64
"""Columns of a chunk of the staged output, 128 bytes."""
MOST_TWO_LEVEL = 128
"""The largest head dim of V for which two sets of registers for the output fit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp8Sm90Config(Sm90Config):
    """A kernel of the structure of `Sm90Config` for e4m3 and e5m2 inputs with a scale for every 128 tokens.

    Parameters
    ----------
    block_n : {128}
        A step's keys share a scale, and V comes in tiles of so many.
    two_level : bool
        The tensor cores add up one key tile, and the sum over tiles is fp32; otherwise all of it is theirs, which
        truncate: right where V has no mean.
    late_turn : bool
        A consumer's turn on the tensor cores ends when it knows its row maxima, not when it has issued its products.
    """

    family: ClassVar[str] = "forward_fp8_sm90"

    two_level: bool
    late_turn: bool = False
    block_n: int = TILE
    slack: int = 0
    ping_pong: bool = True
    exact: bool = True

    def __post_init__(self) -> None:
        Sm90Config.__post_init__(self)
        if self.block_n != TILE:
            raise ValueError(f"block_n is {self.block_n}; accepted is {TILE}, the tokens that share a scale")
        if self.consumers < 2:
            raise ValueError(f"block_m is {self.block_m}; accepted are 128 and 192: the consumers take turns")
        if (self.slack, self.exact, self.ping_pong, self.q_registers) != (0, True, True, 0):
            raise ValueError(
                "slack, exact, ping_pong and q_registers are 0, True, True and 0 in kernels for fp8 inputs"
            )

    @property
    def producer_registers(self) -> int:
        return _REGISTERS[self.consumers][0]

    @property
    def consumer_registers(self) -> int:
        return _REGISTERS[self.consumers][1]

    @property
    def label(self) -> str:
        letters = zip("2tdm", (self.two_level, self.tma_store, self.dynamic, self.late_turn), strict=True)
        switches = "".join(letter for letter, on in letters if on)
        return f"m{self.block_m}s{self.stages}q{self.q_stages}{switches}"

    @property
    def summary(self) -> str:
        return f"{Sm90Config.summary.fget(self)}, O summed {'in fp32' if self.two_level else 'by the tensor cores'}"  # type: ignore[attr-defined]

    def smem_sizes(self, problem: AttentionProblem) -> Sequence[tuple[str, int]]:
        """Q buffers (later the output's staging), K, V^T, scales, notes of the warps, work tiles, mbarriers."""
        width = box_bytes(BYTE, problem.head_dim)
        row = round_up(problem.head_dim, width)
        row_out = round_up(problem.head_dim_v, OUTPUT_CHUNK) * 2 if self.tma_store else 0
        barriers = 2 * self.work_stages + 4 * self.stages + 3 * self.q_stages * self.consumers
        return [
            *((f"q{i}", self.block_m * max(row, row_out)) for i in range(self.q_stages)),
            *((f"k{i}", self.block_n * row) for i in range(self.stages)),
            *((f"v{i}", self.block_n * problem.head_dim_v) for i in range(self.stages)),
            ("scales", 16 * self.stages),
            ("means", 4 * problem.head_dim_v * self.warps),
            ("rows", 16 * self.warps * self.q_stages),
            ("work", 16 * self.work_stages),
            ("barriers", 8 * barriers),
        ]


_REGISTERS = {2: (24, 240), 3: (32, 160)}
"""By consumer warpgroups: as of `Sm90Config`, but for a producer that needs few."""
