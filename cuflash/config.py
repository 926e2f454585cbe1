"""How it is computed: everything a tuner may change, and the shared memory that follows from it.

What all kernels have; each family's own is in a module that a call of another family does not load.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

from .problem import AttentionProblem

ELEMENT_BYTES = 2
PITCH_STEP = 64
"""Rows of a shared-memory tile are multiples of 64 elements (128 bytes), the span of the bank swizzle."""
MOST_SLACK = 8
"""kMostSlack in device/softmax.cuh."""


def round_up(value: int, step: int) -> int:
    return -(-value // step) * step


class SmemRegion(NamedTuple):
    """A named piece of the dynamic shared memory; offsets and sizes in bytes."""

    name: str
    offset: int
    size: int


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
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
    cluster : int
        Thread blocks that work on a tile together.
    """

    family: ClassVar[str]
    cluster: ClassVar[int] = 1

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


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
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
        rounding to 16 bits does not change. At most 8, and in Hopper kernels it grows up to that with the row's sum.
    """

    block_m: int
    block_n: int
    stages: int
    slack: int = 2

    def __post_init__(self) -> None:
        if self.slack > MOST_SLACK:
            raise ValueError(f"slack is {self.slack}; accepted are numbers up to {MOST_SLACK}")

    @property
    @abstractmethod
    def warps(self) -> int:
        """Warps that compute; each owns ``block_m / warps`` rows, a multiple of 16."""


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class StreamConfig(KernelConfig):
    """A kernel that reads its operands once: nothing but threads to choose."""

    @property
    def ctas(self) -> int:
        return 1

    @property
    def label(self) -> str:
        return f"t{self.threads}"


def pitches(problem: AttentionProblem) -> tuple[int, int]:
    """Bytes of a row of K (and Q) and of V in shared memory."""
    k, v = (round_up(dim, PITCH_STEP) * ELEMENT_BYTES for dim in (problem.head_dim, problem.head_dim_v))
    return k, v
