"""Tuning tables of the backward pass: of the Ampere-style kernels, and of those for compute capability 9.0."""

from __future__ import annotations

from dataclasses import replace

from ..backward_config import (
    BackwardConfig,
    BackwardDqConfig,
    BackwardRowsConfig,
    BackwardSm90Config,
    BackwardWideConfig,
    HopperConfig,
)
from ..errors import UnsupportedError
from ..problem import MASKS, AttentionProblem, Mask
from .sm80 import SMALL
from .tuning import Row, row_for


def _backward_row(
    arches: tuple[str, ...],
    head_dim: int,
    block_m: int,
    block_n: int,
    *,
    key_warps: int,
    warps: int = 8,
    stages: tuple[int, int] = (2, 2),
    ctas: int = 1,
    masks: tuple[Mask, ...] = MASKS,
    reason: str,
) -> Row[BackwardConfig]:
    q_stages, dout_stages = stages
    config = BackwardConfig(
        block_m=block_m,
        block_n=block_n,
        key_warps=key_warps,
        warps=warps,
        q_stages=q_stages,
        dout_stages=dout_stages,
        ctas=ctas,
        reason=reason,
    )
    return Row(arches, head_dim, head_dim, masks, config)


LARGE = ("sm_90", "sm_100")
"""227 KiB of shared memory for a block."""

BACKWARD = (
    _backward_row(
        LARGE, 64, 64, 64, key_warps=2, warps=4, ctas=3, reason="small enough for three blocks, which hide exponentials"
    ),
    _backward_row(("sm_80",), 64, 64, 64, key_warps=2, warps=4, ctas=2, reason="two blocks within 164 KiB"),
    _backward_row(("sm_90",), 128, 64, 128, key_warps=4, stages=(3, 3), reason="one barrier a step; 226 KiB"),
    _backward_row(("sm_80", "sm_100"), 128, 64, 128, key_warps=4, reason="161 KiB"),
    _backward_row(
        ("sm_90",),
        256,
        128,
        64,
        key_warps=2,
        stages=(1, 1),
        masks=("full",),
        reason="226 KiB; scores of 32 x 32 a warp load least: 12 % ahead of 64 queries",
    ),
    _backward_row(
        ("sm_90",),
        256,
        64,
        64,
        key_warps=2,
        masks=("causal",),
        reason="209 KiB; 128 queries: -5 % at N = 512, +7 % at 4096, but 212 bytes of spills",
    ),
    _backward_row(("sm_100",), 256, 64, 64, key_warps=2, reason="209 KiB"),
    _backward_row(("sm_80",), 256, 64, 64, key_warps=2, stages=(1, 1), reason="145 KiB of 163"),
    _backward_row(SMALL, 64, 64, 128, key_warps=4, reason="97 KiB of 99"),
    _backward_row(SMALL, 128, 64, 64, key_warps=2, stages=(2, 1), reason="97 KiB of 99, so one block, of 8 warps"),
    _backward_row(SMALL, 256, 32, 32, key_warps=2, warps=4, stages=(2, 1), reason="89 KiB of 99"),
)


def backward_config(problem: AttentionProblem) -> BackwardConfig:
    """The config of the row with the smallest head dim that serves the problem.

    Narrow loads take registers that large head dims do not leave to tiles of 64 queries.
    """
    row = row_for(BACKWARD, problem)
    narrow = problem.access_bytes == 2 or (problem.access_bytes < 16 and problem.arch == "sm_100")
    wide = row.head_dim > (128 if problem.arch == "sm_90" else 96)
    if narrow and wide and problem.arch not in SMALL:
        return replace(row.config, block_m=32, key_warps=4, reason="narrow loads need registers, so 32 queries")
    return row.config


def _hopper_row(
    head_dim: int,
    block_m: int,
    *,
    stages: tuple[int, int],
    reason: str,
) -> Row[HopperConfig]:
    q_stages, dout_stages = stages
    config = BackwardSm90Config(block_m=block_m, q_stages=q_stages, dout_stages=dout_stages, reason=reason)
    return Row(("sm_90a",), head_dim, head_dim, MASKS, config)


HOPPER: tuple[Row[HopperConfig], ...] = (
    _hopper_row(64, 128, stages=(2, 2), reason="198 KiB; a third Q stage: -3 to 1 %"),
    _hopper_row(128, 64, stages=(3, 2), reason="214 KiB; with two Q stages -10 to -15 %"),
    Row(("sm_90a",), 256, 256, MASKS,
        BackwardWideConfig(reason="dK and dV of 128 keys need two blocks; 226 KiB; turns: -2 to -15 %")),
)  # fmt: skip


def backward_sm90_config(problem: AttentionProblem) -> HopperConfig:
    """The config of the row with the smallest head dim that serves the problem.

    Raises
    ------
    UnsupportedError
        TMA moves 16 bytes at a time.
    """
    if problem.access_bytes != 16:
        raise UnsupportedError(
            f"the kernels for {problem.arch} load by TMA, 16 bytes at a time, and take no {problem.access_bytes}-byte "
            "accesses: those of sm_90 do"
        )
    return row_for(HOPPER, problem).config


def backward_rows_config(problem: AttentionProblem) -> BackwardRowsConfig:
    """One for all problems: the kernel is bound by memory."""
    return BackwardRowsConfig(reason="several rows for each warp, and loads of many in flight")


def backward_dq_config(problem: AttentionProblem) -> BackwardDqConfig:
    """One for all problems: the kernel is bound by memory."""
    return BackwardDqConfig(reason="a warp's rows are staged in its own shared memory")
