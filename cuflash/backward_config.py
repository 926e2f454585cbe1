"""How the kernels of the backward pass compute; apart from the others, because a forward call needs none of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from .config import ELEMENT_BYTES, PITCH_STEP, KernelConfig, StreamConfig, pitches, round_up
from .problem import AttentionProblem
from .sm90_config import WARPGROUP, WARPGROUP_ROWS

ROW_CONSTANT_BYTES = 8
"""LSE and delta of a query row."""
CHUNK_BYTES = PITCH_STEP * ELEMENT_BYTES
"""Of a row: the columns that one TMA load brings."""
MOST_DQ_CHUNKS = 2
"""Of a thread block: 64 columns of dQ for each of its consumers."""


BACKWARD_STAGES = ((1, 1), (2, 1), (2, 2), (3, 3))
"""Buffers of Q and of dO that an Ampere-style backward kernel may have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BackwardConfig(KernelConfig):
    """The main kernel of the Ampere-style backward pass: a thread block for each tile of keys.

    Parameters
    ----------
    block_m, block_n : int
        Query rows and keys of a tile; ``block_m`` is a multiple of 32.
    key_warps : int
        Warps side by side along the keys, each with whole 16-row blocks of P^T.
    warps : int
        Warps of a thread block: ``key_warps`` times a power of two, which share the queries of P^T and the columns of
        dK and dV. ``block_m / 32`` of them lie side by side along the queries of dQ.
    q_stages, dout_stages : int
        Buffers of Q and dO, one of `BACKWARD_STAGES`. With two, the next tile arrives while one is in work; with one,
        when its last product is done, at the price of a barrier. With one of each, dO comes a product later than Q.
        With three there are two buffers of P^T and dS^T as well, and one barrier a step instead of two.
    ctas : int
        Thread blocks that share a multiprocessor.
    """

    family: ClassVar[str] = "backward_sm80"

    block_m: int
    block_n: int
    key_warps: int
    warps: int
    q_stages: int = 2
    dout_stages: int = 2
    ctas: int = field(default=1)

    def __post_init__(self) -> None:
        shares, rest = divmod(self.warps, self.key_warps)
        if rest or shares & (shares - 1) or self.block_m % (16 * shares) or self.block_n % (16 * self.key_warps):
            raise ValueError(
                f"{self.warps} warps, {self.key_warps} of them along {self.block_n} keys, cannot share {self.block_m} "
                "queries: accepted are key_warps times a power of two warps, each with whole 16x16 blocks"
            )
        if self.block_m % 32 or self.warps % (self.block_m // 32):
            raise ValueError(f"block_m is {self.block_m}; accepted are multiples of 32 that divide 32 * warps")
        if (self.q_stages, self.dout_stages) not in BACKWARD_STAGES:
            raise ValueError(
                f"q_stages is {self.q_stages} and dout_stages {self.dout_stages}; accepted are "
                f"{', '.join(map(str, BACKWARD_STAGES))}"
            )

    @property
    def runs_ahead(self) -> bool:
        """Whether warps may be a step apart."""
        return self.q_stages == 3

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def label(self) -> str:
        return (
            f"m{self.block_m}n{self.block_n}w{self.warps}k{self.key_warps}"
            f"s{self.q_stages}{self.dout_stages}c{self.ctas}"
        )

    @property
    def summary(self) -> str:
        return (
            f"{self.block_m} queries x {self.block_n} keys, {self.warps} warps, {self.key_warps} along the keys, "
            f"{self.q_stages} Q and {self.dout_stages} dO buffers, {self.ctas} blocks per SM"
        )

    def smem_sizes(self, problem: AttentionProblem) -> Sequence[tuple[str, int]]:
        """K and V (later the staging of dK and dV), Q and dO of every stage, P^T and dS^T, constants of the rows."""
        pitch_k, pitch_v = pitches(problem)
        scores = self.block_n * round_up(self.block_m, PITCH_STEP) * ELEMENT_BYTES
        return [
            ("k_and_dk", self.block_n * pitch_k),
            ("v_and_dv", self.block_n * pitch_v),
            *((f"q{i}", self.block_m * pitch_k) for i in range(self.q_stages)),
            *((f"dout{i}", self.block_m * pitch_v) for i in range(self.dout_stages)),
            *((f"{name}{i}", scores) for i in range(2 if self.runs_ahead else 1) for name in ("p", "ds")),
            *((f"rows{i}", self.block_m * ROW_CONSTANT_BYTES) for i in range(3 if self.runs_ahead else 2)),
        ]


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class _PersistentConfig(KernelConfig):
    """What the main kernels of the Hopper backward pass have in common."""

    block_n: ClassVar[int] = 128
    """Keys of a tile: 64 for each consumer warpgroup, of those that share dK or dV."""
    ds_buffers: ClassVar[int] = 2
    consumers: ClassVar[int] = 2
    producer_registers: ClassVar[int] = 24
    consumer_registers: ClassVar[int] = 240
    """Of each thread after ``setmaxnreg``; together all that a block has."""
    work_stages: ClassVar[int] = 2
    """Numbers of work tiles in shared memory: this one's and the next."""
    zero_bytes: ClassVar[int] = 4096
    """Zeros in shared memory, from which sums of dQ are cleared."""

    @property
    def threads(self) -> int:
        return WARPGROUP * (self.consumers + 1)

    @property
    def ctas(self) -> int:
        return 1

    def kv_sums(self, problem: AttentionProblem) -> int:
        """Float32 sums of dK and dV of a tile of keys, where several tiles share these."""
        return self.block_n * (round_up(problem.head_dim, 16) + round_up(problem.head_dim_v, 16))


@dataclass(frozen=True, slots=True, kw_only=True)
class BackwardSm90Config(_PersistentConfig):
    """The main kernel of the Hopper backward pass: TMA, ``wgmma``, tiles of 128 keys.

    Parameters
    ----------
    block_m : {64, 128}
        Query rows of a tile. Of the 64 the two consumer warpgroups share the columns of dQ, of the 128 the rows; these
        need a head dim of Q up to 64, for their registers.
    q_stages, dout_stages : int
        Buffers of Q and dO, at least 2: one is read while another is filled.
    """

    family: ClassVar[str] = "backward_sm90"
    stored_keys: ClassVar[int] = WARPGROUP_ROWS
    """Keys whose dK or dV leave at once."""
    own_barriers: ClassVar[int] = 3
    """mbarriers that the first warpgroup has for itself."""

    block_m: int
    q_stages: int
    dout_stages: int

    def __post_init__(self) -> None:
        if self.block_m not in (64, 128):
            raise ValueError(f"block_m is {self.block_m}; accepted are 64 and 128")
        for name, stages in (("q_stages", self.q_stages), ("dout_stages", self.dout_stages)):
            if stages < 2:
                raise ValueError(
                    f"{name} is {stages}; accepted are 2 and more: one buffer is read while another is filled"
                )

    @property
    def label(self) -> str:
        return f"m{self.block_m}n{self.block_n}s{self.q_stages}{self.dout_stages}"

    @property
    def summary(self) -> str:
        return (
            f"{self.block_m} queries x {self.block_n} keys, {self.consumers} consumer warpgroups in turns, "
            f"{self.q_stages} Q and {self.dout_stages} dO buffers"
        )

    def dq_columns(self, problem: AttentionProblem) -> int:
        """Columns of dQ that a consumer computes in 64 of its rows."""
        return PITCH_STEP if self.block_m == WARPGROUP_ROWS else round_up(problem.head_dim, 16)

    def smem_sizes(self, problem: AttentionProblem) -> Sequence[tuple[str, int]]:
        """K, V (later dV), every stage's Q and dO, dS, each consumer's dQ (at last dK), row constants, mbarriers."""
        pitch_k, pitch_v = pitches(problem)
        dq = max(WARPGROUP_ROWS * self.dq_columns(problem) * 4, self.stored_keys * pitch_k)
        # Pairs of them: numbers of work tiles, K and V, each stage of Q and dO; dK and dV of each consumer.
        barriers = 2 * (self.work_stages + 2 + self.q_stages + self.dout_stages + self.consumers)
        return [
            ("k", self.block_n * pitch_k),
            ("v_and_dv", self.block_n * pitch_v),
            *((f"q{i}", self.block_m * pitch_k) for i in range(self.q_stages)),
            *((f"dout{i}", self.block_m * pitch_v) for i in range(self.dout_stages)),
            *((f"ds{i}", self.block_m * self.block_n * ELEMENT_BYTES) for i in range(self.ds_buffers)),
            *((f"dq{i}_and_dk{i}", dq) for i in range(self.consumers)),
            *((f"rows{i}", self.block_m * ROW_CONSTANT_BYTES) for i in range(self.q_stages)),
            ("zeros", self.zero_bytes),
            ("work", 4 * self.work_stages),
            ("barriers", 8 * (barriers + self.own_barriers)),
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class BackwardWideConfig(_PersistentConfig):
    """The main kernel of the Hopper backward pass for head dims above 128: tiles of 128 keys for two thread blocks.

    One block computes P^T and dK, the other dS^T and dV, and each some columns of dQ.
    """

    family: ClassVar[str] = "backward_sm90_wide"
    cluster: ClassVar[int] = 2
    block_m: ClassVar[int] = WARPGROUP_ROWS
    q_stages: ClassVar[int] = 3
    """Buffers of Q, which is read for P^T, and two steps later for dK."""
    dout_stages: ClassVar[int] = 2
    p_buffers: ClassVar[int] = 2

    @property
    def label(self) -> str:
        return f"m{self.block_m}n{self.block_n}s{self.q_stages}{self.dout_stages}c{self.cluster}"

    @property
    def summary(self) -> str:
        return (
            f"{self.block_m} queries x {self.block_n} keys for a cluster of {self.cluster} blocks, {self.consumers} "
            f"consumer warpgroups in each, {self.q_stages} Q and {self.dout_stages} dO buffers"
        )

    def dq_chunks(self, problem: AttentionProblem) -> int:
        """Chunks of 64 columns of dQ that the first block computes: so many that both blocks have about the same to do.

        Counted in products of 64 columns: S^T and dK are twice the chunks of K, dP^T and dV twice those of V.
        """
        k, v = (pitch // CHUNK_BYTES for pitch in pitches(problem))
        possible = range(max(1, k - MOST_DQ_CHUNKS), min(k, MOST_DQ_CHUNKS) + 1)
        return min(possible, key=lambda first: abs((2 * k + first) - (2 * v + k - first)))

    def tiles(self, problem: AttentionProblem) -> tuple[list[tuple[str, int]], list[tuple[str, int]]]:
        """Shared memory of the first block, K, Q, dS^T and zeros; of the second, V, columns of K, dO, P^T and dS^T."""
        pitch_k, pitch_v = pitches(problem)
        scores = self.block_m * self.block_n * ELEMENT_BYTES
        ds = [(f"ds{i}", scores) for i in range(self.ds_buffers)]
        first = [
            ("k", self.block_n * pitch_k),
            *((f"q{i}", self.block_m * pitch_k) for i in range(self.q_stages)),
            *ds,
            ("zeros", self.zero_bytes),
        ]
        second = [
            ("v", self.block_n * pitch_v),
            ("k_columns", self.block_n * (pitch_k - self.dq_chunks(problem) * CHUNK_BYTES)),
            *((f"dout{i}", self.block_m * pitch_v) for i in range(self.dout_stages)),
            *((f"p{i}", scores) for i in range(self.p_buffers)),
            *ds,
        ]
        return first, second

    def tile_bytes(self, problem: AttentionProblem) -> int:
        """Of the block that has more."""
        return max(sum(size for _, size in tiles) for tiles in self.tiles(problem))

    def smem_sizes(self, problem: AttentionProblem) -> Sequence[tuple[str, int]]:
        """The tiles of the block that has more; what both have: row constants, numbers of work tiles, mbarriers."""
        # A pair of each: numbers of work tiles, and of the next one between the blocks; K or V, columns of K; sums that
        # are clear, that are added; dS^T, P^T of each consumer, each stage of Q or dO. One for the loader itself, and
        # for each consumer three of its additions.
        of_scores = self.ds_buffers + self.consumers * self.p_buffers
        barriers = 2 * (self.work_stages + 1 + 2 + 2 + of_scores + self.q_stages) + 1 + 3 * self.consumers
        return [
            *max(self.tiles(problem), key=lambda tiles: sum(size for _, size in tiles)),
            *((f"rows{i}", self.block_m * ROW_CONSTANT_BYTES) for i in range(self.q_stages)),
            ("work", 4 * self.work_stages + 8),
            ("barriers", 8 * barriers),
        ]


HopperConfig = BackwardSm90Config | BackwardWideConfig
"""Of the main kernels that load by TMA."""

MainConfig = BackwardConfig | HopperConfig
"""Of the main kernel, in any family."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BackwardRowsConfig(StreamConfig):
    """The first kernel of the backward pass, which reads each row of dO and of the output once."""

    family: ClassVar[str] = "backward_rows"
    threads: int = field(default=128)

    @property
    def summary(self) -> str:
        return f"{self.threads} threads"

    def smem_sizes(self, problem: AttentionProblem) -> Sequence[tuple[str, int]]:
        """Sums stay within warps."""
        return []


@dataclass(frozen=True, slots=True, kw_only=True)
class BackwardDqConfig(BackwardRowsConfig):
    """The last kernel of the backward pass, if there is one: it reads the sums of dQ once; 16 rows for each warp."""

    family: ClassVar[str] = "backward_dq"

    def smem_sizes(self, problem: AttentionProblem) -> Sequence[tuple[str, int]]:
        """The rows of each warp."""
        return [("rows", self.threads // 32 * 16 * pitches(problem)[0])]
