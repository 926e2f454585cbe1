"""The kernel families: which template, parameter block, config and grid serve a problem."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from typing import NamedTuple

from . import params
from .arch import sm80
from .config import KernelConfig
from .problem import DTYPES, MASKS, AttentionProblem

L2_SECTION_BYTES = 32 * 2**20
"""K and V of the heads that run at the same time should fit this much of the L2 cache."""
MAX_GRID_YZ = 65535


class KernelFamily(NamedTuple):
    """One template and all that belongs to it."""

    name: str
    template: str
    symbol_stem: str
    params: params.ParameterBlock
    config_for: Callable[[AttentionProblem], KernelConfig]


FAMILIES = {
    family.name: family
    for family in (
        KernelFamily("forward_sm80", "forward_sm80.cu.j2", "cuflash_fwd_sm80", params.FORWARD, sm80.forward_config),
    )
}


def select_config(problem: AttentionProblem) -> KernelConfig:
    """The tuned config of a problem; its ``family`` names the kernel."""
    return FAMILIES["forward_sm80"].config_for(problem)


def symbol(problem: AttentionProblem, config: KernelConfig) -> str:
    """The kernel's name, which spells out problem and config so that a profiler's row explains itself."""
    parts = [FAMILIES[config.family].symbol_stem, f"d{problem.head_dim}"]
    if problem.head_dim_v != problem.head_dim:
        parts.append(f"dv{problem.head_dim_v}")
    parts += [{"float16": "f16", "bfloat16": "bf16"}[problem.dtype], problem.mask]
    if problem.access_bytes != 16:
        parts.append(f"a{problem.access_bytes}")
    if problem.scale_first:
        parts.append("sf")
    return "_".join([*parts, config.label])


class ForwardGrid(NamedTuple):
    """The launches of one forward call: more than one only beyond 65535 query tiles.

    ``launches`` holds (first query tile, grid) pairs.
    """

    m_tiles: int
    launches: tuple[tuple[int, tuple[int, int, int]], ...]


def forward_grid(
    problem: AttentionProblem, config: KernelConfig, batch_heads: int, group: int, seqlen_q: int, seqlen_k: int
) -> ForwardGrid:
    """Thread blocks of a forward call, in the order in which they start: x fastest, then y, then z.

    x runs over the query heads of a section, y over the query tiles (the kernel takes the last, longest one first),
    z over sections. Under a causal mask a section is as many heads as have their K and V in the L2 cache together, so
    that long tiles of many heads start before short ones; without one, all tiles are alike and a section is one head.
    """
    section = 1
    if problem.mask == "causal":
        kv_bytes = max(1, seqlen_k) * (problem.head_dim + problem.head_dim_v) * 2
        resident = max(1, L2_SECTION_BYTES // kv_bytes)
        section = group << (resident.bit_length() - 1)
    section = min(max(section, -(-batch_heads // MAX_GRID_YZ)), batch_heads)
    sections = -(-batch_heads // section)
    m_tiles = -(-seqlen_q // config.block_m)
    launches = tuple(
        (first, (section, min(MAX_GRID_YZ, m_tiles - first), sections)) for first in range(0, m_tiles, MAX_GRID_YZ)
    )
    return ForwardGrid(m_tiles, launches)


SHIPPED_HEAD_DIMS = (
    (32, 32),
    (64, 64),
    (80, 80),
    (96, 96),
    (112, 112),
    (128, 128),
    (160, 160),
    (192, 192),
    (192, 128),
    (256, 256),
)


def shipped_problems(arch: str) -> Iterator[AttentionProblem]:
    """Every instantiation that ``cuflash compile --all`` builds: common head dims, and each variant of some."""
    for (d, dv), dtype, mask in product(SHIPPED_HEAD_DIMS, DTYPES, MASKS):
        yield AttentionProblem(d, dv, dtype, mask, 16, False, arch)
    for d, mask in product((64, 128, 256), MASKS):
        base = AttentionProblem(d, d, "bfloat16", mask, 16, False, arch)
        yield replace(base, scale_first=True)
        for access_bytes in (8, 4, 2):
            yield replace(base, access_bytes=access_bytes)
