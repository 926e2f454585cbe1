"""How the Hopper forward kernel computes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from .config import ForwardConfig, pitches
from .problem import AttentionProblem

WARPGROUP = 128
"""Threads that issue a ``wgmma`` together; they own 64 rows of its result."""
WARPGROUP_ROWS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Sm90Config(ForwardConfig):
    """A kernel of the Hopper family: TMA, ``wgmma``, persistent thread blocks of a producer and consumer warpgroups.

    Parameters
    ----------
    block_m : int
        64 rows for each consumer warpgroup.
    stages : int
        K tiles in flight, and as many V tiles.
    q_stages : {1, 2, 3}
        Q buffers; with two, the next work tile's Q arrives while this one is computed; with three, while the output
        before this one is still on its way as well.
    q_registers : int
        Leading k-steps (16 elements of the head dim) of Q that stay in registers; the others are read from shared
        memory in every step.
    ping_pong : bool
        The consumers take turns on the tensor cores: the softmax of one hides behind the products of another.
    tma_store : bool
        O leaves by TMA through a Q buffer, so that no consumer waits for it; needs two of those, or all of Q in
        registers. Otherwise from registers, in 16-byte stores.
    dynamic : bool
        Work tiles are handed out by an atomic counter; otherwise in a static order.
    exact : bool
        The softmax reference is the row's exact maximum in every step, whatever ``slack`` says.
    """

    family: ClassVar[str] = "forward_sm90"
    work_stages: ClassVar[int] = 3
    """Work tiles that are published at once: loaders run ahead of the consumers, and those of the storing thread."""

    q_stages: int
    ping_pong: bool
    tma_store: bool
    q_registers: int = 0
    dynamic: bool = False
    exact: bool = False

    def __post_init__(self) -> None:
        ForwardConfig.__post_init__(self)
        if self.block_m % WARPGROUP_ROWS or self.consumers not in _REGISTERS:
            raise ValueError(f"block_m is {self.block_m}; accepted are 64, 128 and 192")
        if self.block_n % 16 or not 16 <= self.block_n <= 256:
            raise ValueError(f"block_n is {self.block_n}; accepted are multiples of 16 up to 256")
        if self.stages < 2:
            raise ValueError(f"stages is {self.stages}; accepted are 2 and more: one is read while another is filled")
        if self.q_stages not in (1, 2, 3):
            raise ValueError(f"q_stages is {self.q_stages}; accepted are 1, 2 and 3")
        if self.tma_store and self.q_stages < 2 and not self.q_registers:
            raise ValueError(
                "tma_store needs q_stages=2 or 3, or q_registers: O takes a buffer whose Q is not read again"
            )

    @property
    def consumers(self) -> int:
        """Warpgroups that compute."""
        return self.block_m // WARPGROUP_ROWS

    @property
    def warps(self) -> int:
        return WARPGROUP // 32 * self.consumers

    @property
    def threads(self) -> int:
        return WARPGROUP * (self.consumers + 1)

    @property
    def ctas(self) -> int:
        return 1

    @property
    def producer_registers(self) -> int:
        """Of each thread of the producer warpgroup, after ``setmaxnreg``."""
        return _REGISTERS[self.consumers][0]

    @property
    def consumer_registers(self) -> int:
        """Of each thread of a consumer warpgroup, after ``setmaxnreg``."""
        return _REGISTERS[self.consumers][1]

    @property
    def label(self) -> str:
        switches = "".join(
            letter for letter, on in (("p", self.ping_pong), ("t", self.tma_store), ("d", self.dynamic)) if on
        )
        softmax = "x" if self.exact else f"l{self.slack}"
        return f"m{self.block_m}n{self.block_n}s{self.stages}q{self.q_stages}r{self.q_registers}{switches}{softmax}"

    @property
    def summary(self) -> str:
        together = " in turns" if self.ping_pong else ""
        out = "TMA" if self.tma_store else "16-byte stores"
        order = "a counter" if self.dynamic else "static order"
        buffers = f"{self.q_stages} Q buffer{'s' * (self.q_stages > 1)}"
        return (
            f"{self.block_m} queries x {self.block_n} keys, {self.consumers} consumer warpgroups{together}, "
            f"{self.stages} stages, {buffers}, {self.q_registers} Q k-steps in registers, O by {out}, work by {order}"
        )

    def smem_sizes(self, problem: AttentionProblem) -> Sequence[tuple[str, int]]:
        """Q buffers (later the output's staging), K, V, softmax references, the published work tiles, mbarriers."""
        if self.tma_store and self.q_stages == 1 and 16 * self.q_registers < problem.head_dim:
            raise ValueError(
                f"q_registers is {self.q_registers}; with tma_store and one Q buffer head dim {problem.head_dim} needs "
                f"{-(-problem.head_dim // 16)}: O takes a buffer whose Q is not read again"
            )
        pitch_k, pitch_v = pitches(problem)
        pitch_q = max(pitch_k, pitch_v) if self.tma_store else pitch_k
        # A pair for each published work tile and for each stage of K and of V; each consumer's part of each Q buffer
        # has a pair, and one more for its O.
        barriers = 2 * self.work_stages + 4 * self.stages + 3 * self.q_stages * self.consumers
        return [
            *((f"q{i}", self.block_m * pitch_q) for i in range(self.q_stages)),
            *((f"k{i}", self.block_n * pitch_k) for i in range(self.stages)),
            *((f"v{i}", self.block_n * pitch_v) for i in range(self.stages)),
            ("softmax_reference", self.block_m * 4),
            ("work", 16 * self.work_stages),
            ("barriers", 8 * barriers),
        ]


_REGISTERS = {1: (40, 240), 2: (40, 232), 3: (32, 160)}
"""By consumer warpgroups: registers of a producer's and of a consumer's thread; together all that a block has."""
