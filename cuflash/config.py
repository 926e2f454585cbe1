"""How it is computed: everything a tuner may change, and the shared memory that follows from it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

from .problem import AttentionProblem

ELEMENT_BYTES = 2
PITCH_STEP = 64
"""Rows of a shared-memory tile are multiples of 64 elements (128 bytes), the span of the bank swizzle."""
WARPGROUP = 128
"""Threads that issue a ``wgmma`` together; they own 64 rows of its result."""
WARPGROUP_ROWS = 64


def round_up(value: int, step: int) -> int:
    return -(-value // step) * step


class SmemRegion(NamedTuple):
    """A named piece of the dynamic shared memory; offsets and sizes in bytes."""

    name: str
    offset: int
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelConfig(ABC):
    """How one kernel works: what every family has.

    Parameters
    ----------
    reason : str
        Why this row of the tuning table is what it is; not part of the identity.

    Attributes
    ----------
    family : str
        Kernel family, which is also the template's name.
    """

    family: ClassVar[str]

    reason: str = field(default="", compare=False)

    @property
    @abstractmethod
    def threads(self) -> int:
        """Threads of a block."""

    @property
    @abstractmethod
    def ctas(self) -> int:
        """Thread blocks that share a multiprocessor."""

    @property
    @abstractmethod
    def label(self) -> str:
        """The part of the symbol that names this config."""

    @property
    @abstractmethod
    def summary(self) -> str:
        """The config in words."""

    @abstractmethod
    def smem_sizes(self, problem: AttentionProblem) -> Sequence[tuple[str, int]]:
        """Names and sizes of the pieces of shared memory, in their order."""

    def smem(self, problem: AttentionProblem) -> tuple[SmemRegion, ...]:
        """The map of the dynamic shared memory."""
        regions, offset = [], 0
        for name, size in self.smem_sizes(problem):
            regions.append(SmemRegion(name, offset, size))
            offset += size
        return tuple(regions)

    def smem_bytes(self, problem: AttentionProblem) -> int:
        return sum(size for _, size in self.smem_sizes(problem))


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardConfig(KernelConfig):
    """The tile shape and pipeline of a forward kernel.

    Parameters
    ----------
    block_m, block_n : int
        Query rows and keys of a tile.
    stages : int
        Key/value tiles in flight, at least 2.
    slack : int
        Base-2 logarithm of how far a probability may exceed 1 before the softmax raises its reference. A larger slack
        is faster and less accurate: where one key outweighs the others, its probability should be near 1, which
        rounding to 16 bits does not change.
    """

    block_m: int
    block_n: int
    stages: int
    slack: int = 2

    @property
    @abstractmethod
    def warps(self) -> int:
        """Warps that compute; each owns ``block_m / warps`` rows, a multiple of 16."""


def pitches(problem: AttentionProblem) -> tuple[int, int]:
    """Bytes of a row of K (and Q) and of V in shared memory."""
    k, v = (round_up(dim, PITCH_STEP) * ELEMENT_BYTES for dim in (problem.head_dim, problem.head_dim_v))
    return k, v


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
    ping_pong : bool
        The consumers take turns on the tensor cores: the softmax of one hides behind the products of another.
    tma_store : bool
        O leaves by TMA through the work tile's Q buffer, so that no consumer waits for it; needs two of those at least.
        Otherwise from registers, in 16-byte stores.
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
    dynamic: bool = False
    exact: bool = False

    def __post_init__(self) -> None:
        if self.block_m % WARPGROUP_ROWS or self.consumers not in _REGISTERS:
            raise ValueError(f"block_m is {self.block_m}; accepted are 64, 128 and 192")
        if self.block_n % 16 or not 16 <= self.block_n <= 256:
            raise ValueError(f"block_n is {self.block_n}; accepted are multiples of 16 up to 256")
        if self.stages < 2:
            raise ValueError(f"stages is {self.stages}; accepted are 2 and more: one is read while another is filled")
        if self.q_stages not in (1, 2, 3):
            raise ValueError(f"q_stages is {self.q_stages}; accepted are 1, 2 and 3")
        if self.tma_store and self.q_stages < 2:
            raise ValueError("tma_store needs q_stages=2 or 3: O leaves through one Q buffer while the next Q arrives")

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
        return f"m{self.block_m}n{self.block_n}s{self.stages}q{self.q_stages}{switches}{softmax}"

    @property
    def summary(self) -> str:
        together = " in turns" if self.ping_pong else ""
        out = "TMA" if self.tma_store else "16-byte stores"
        order = "a counter" if self.dynamic else "static order"
        return (
            f"{self.block_m} queries x {self.block_n} keys, {self.consumers} consumer warpgroups{together}, "
            f"{self.stages} stages, {self.q_stages} Q buffer{'s' * (self.q_stages > 1)}, O by {out}, work by {order}"
        )

    def smem_sizes(self, problem: AttentionProblem) -> Sequence[tuple[str, int]]:
        """Q buffers (later the output's staging), K, V, softmax references, the published work tiles, mbarriers."""
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
