"""The kernel families of the backward pass: as `cuflash.kernels`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import NamedTuple

from .arch import backward
from .backward_config import MainConfig
from .backward_params import BACKWARD_DQ, BACKWARD_ROWS, BACKWARD_SM80, BACKWARD_SM90
from .kernels import L2_SECTION_BYTES, SHIPPED_HEAD_DIMS, TMA_TARGETS, KernelFamily
from .problem import DTYPES, AttentionProblem

FAMILIES = {
    family.name: family
    for family in (
        KernelFamily(
            "backward_rows", "backward_rows.cu.j2", "cuflash_bwd_rows", BACKWARD_ROWS, backward.backward_rows_config
        ),
        KernelFamily(
            "backward_sm80", "backward_sm80.cu.j2", "cuflash_bwd_sm80", BACKWARD_SM80, backward.backward_config
        ),
        KernelFamily(
            "backward_sm90", "backward_sm90.cu.j2", "cuflash_bwd_sm90", BACKWARD_SM90, backward.backward_sm90_config
        ),
        KernelFamily("backward_dq", "backward_dq.cu.j2", "cuflash_bwd_dq", BACKWARD_DQ, backward.backward_dq_config),
    )
}


class BackwardGrid(NamedTuple):
    """The launch of the backward pass's main kernel, one thread block for each tile of keys, and what it adds to.

    ``section`` key/value heads run side by side before the next ones begin, the first key tiles of all of them first:
    under a causal mask these are the longest.
    """

    m_tiles: int
    n_tiles: int
    section: int
    blocks: int

    @property
    def last_section(self) -> int:
        """Key/value heads of the last section."""
        return (self.blocks // self.n_tiles - 1) % self.section + 1


def backward_grid(
    problem: AttentionProblem, config: MainConfig, sizes: tuple[int, int, int, int], deterministic: bool
) -> BackwardGrid:
    """Thread blocks of a backward call, in the order in which they start.

    A section is as many heads as have their Q, dO and sums of dQ in the L2 cache together. Without a mask all tiles are
    alike, and one head at a time keeps these the longest; but where tiles add in turns, those of many heads side by
    side wait for each other less.

    Parameters
    ----------
    problem : AttentionProblem
    config : BackwardConfig or BackwardSm90Config
    sizes : (batch * query heads, query heads for each key/value head, query length, key length)
    deterministic : bool
    """
    batch_heads, group, seqlen_q, seqlen_k = sizes
    heads = batch_heads // group
    section = 1
    if problem.mask == "causal" or deterministic:
        row_bytes = 2 * (problem.head_dim + problem.head_dim_v) + 4 * problem.head_dim
        section = max(1, L2_SECTION_BYTES // (group * seqlen_q * row_bytes))
    n_tiles = -(-seqlen_k // config.block_n)
    return BackwardGrid(-(-seqlen_q // config.block_m), n_tiles, min(section, heads), n_tiles * heads)


def shipped_problems(arch: str) -> Iterator[AttentionProblem]:
    """What ``cuflash compile --all`` builds for a target: its main kernel under each mask, and the two beside it."""
    forms = [(dims, dtype, 16) for dims, dtype in product(SHIPPED_HEAD_DIMS, DTYPES)]
    forms += [((d, d), "bfloat16", access_bytes) for d, access_bytes in product((64, 128, 256), (8, 4, 2))]
    last = set()
    for (d, dv), dtype, access_bytes in forms:
        base = AttentionProblem(d, dv, dtype, "full", access_bytes, False, arch, "backward")
        yield base
        yield replace(base, mask="causal")
        yield replace(base, task="backward_rows")
        last.add(replace(base, task="backward_dq", head_dim_v=d))
    yield from sorted(last, key=repr)
