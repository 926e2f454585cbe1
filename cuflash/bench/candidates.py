"""Kernel configs worth trying for a problem: a grid, less what shared memory or registers cannot hold."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from ..arch import ARCHES, KIB
from ..config import KernelConfig, round_up
from ..problem import AttentionProblem
from ..sm80_config import Sm80Config
from ..sm90_config import Sm90Config

# Registers of a thread beyond those for O, S, P and Q.
OTHER_REGISTERS_SM80 = 24
OTHER_REGISTERS_SM90 = 32

RESERVED_SMEM = KIB
"""Of each thread block, by the driver."""

BLOCK_M_WARPS = ((64, 4), (128, 4), (128, 8))
"""Query rows and warps of the Ampere-style kernels: 16 or 32 rows a warp."""


def candidates(problem: AttentionProblem, table: KernelConfig) -> Iterator[KernelConfig]:
    """Variants of the tuning table's config; what the grid leaves open stays as it is there."""
    if isinstance(table, Sm90Config):
        return sm90_candidates(problem, table)
    assert isinstance(table, Sm80Config)
    return sm80_candidates(problem, table)


def sm90_candidates(problem: AttentionProblem, table: Sm90Config) -> Iterator[Sm90Config]:
    """Tiles, stages and Q buffers; a single one only where two leave no room, or registers hold all of Q."""
    for block_m, block_n, stages in product((128, 192), range(48, 177, 16), (2, 3)):
        tile = replace(table, block_m=block_m, block_n=block_n, stages=stages)
        buffered = [replace(tile, q_stages=n, tma_store=n > 1, q_registers=0) for n in (3, 2, 1)]
        fitting = [config for config in buffered if smem_fits(problem, config)]
        several = [config for config in fitting if config.q_stages > 1]
        held = replace(tile, q_stages=1, tma_store=True, q_registers=k_steps(problem.head_dim))
        deepest = smem_fits(problem, held) and (stages == 3 or not smem_fits(problem, replace(held, stages=3)))
        for config in (*(several or fitting), *([held] if deepest else [])):
            if sm90_registers(problem, config) <= config.consumer_registers:
                yield config


def sm90_registers(problem: AttentionProblem, config: Sm90Config) -> int:
    """About what a consumer's thread needs: O and S in fp32, P and Q in 16 bits, of 64 rows over 128 threads."""
    out, scores = round_up(problem.head_dim_v, 16) // 2, config.block_n // 2
    return out + scores + scores // 2 + 4 * config.q_registers + OTHER_REGISTERS_SM90


def sm80_candidates(problem: AttentionProblem, table: Sm80Config) -> Iterator[Sm80Config]:
    """Tiles and stages, with as many thread blocks on a multiprocessor as fit, and as much of Q in registers."""
    for (block_m, warps), block_n, stages in product(BLOCK_M_WARPS, range(32, 97, 16), (2, 3)):
        for ctas in (3, 2, 1):
            config = replace(
                table, block_m=block_m, block_n=block_n, warps=warps, stages=stages, ctas=ctas, q_registers=0
            )
            free = sm80_free_registers(problem, config)
            if free >= 0 and smem_fits(problem, config):
                steps = free // (4 * config.block_m // (16 * config.warps))
                yield replace(config, q_registers=min(steps, k_steps(problem.head_dim)))
                break


def k_steps(head_dim: int) -> int:
    """Products of 16 elements of the head dim."""
    return round_up(head_dim, 16) // 16


def smem_fits(problem: AttentionProblem, config: KernelConfig) -> bool:
    """Whether a multiprocessor holds ``config.ctas`` thread blocks."""
    arch, size = ARCHES[problem.arch], config.smem_bytes(problem)
    return size <= arch.smem_per_block and config.ctas * (size + RESERVED_SMEM) <= arch.smem_per_sm


def sm80_free_registers(problem: AttentionProblem, config: Sm80Config) -> int:
    """About how many a thread has for Q, 4 for each k-step and 16 rows; O and S are in fp32, P in 16 bits."""
    arch = ARCHES[problem.arch]
    limit = min(arch.registers_per_thread, arch.registers_per_sm // (config.threads * config.ctas) // 8 * 8)
    row_blocks = config.block_m // (16 * config.warps)
    used = row_blocks * (round_up(problem.head_dim_v, 16) // 2 + config.block_n * 3 // 4)
    return limit - used - OTHER_REGISTERS_SM80
