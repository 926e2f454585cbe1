"""Tuning table of the Ampere-style kernels (mma.sync, ldmatrix, cp.async), for every target.

What was tried on an H200, with figures, is in bench/LOG.md.
Rows of targets that were not measured follow from shared memory and registers, and say so.
"""

from __future__ import annotations

from dataclasses import replace

from ..config import BackwardConfig, BackwardDqConfig, BackwardRowsConfig, Sm80Config
from ..problem import MASKS, AttentionProblem, Mask
from .tuning import SLACK, Row, row_for

SMALL = ("sm_86", "sm_89", "sm_120")
"""99 KiB of shared memory for a block."""

RARE_REASON = "narrow accesses or early scaling need registers, so narrower key tiles and Q in shared memory"


def _row(
    arches: tuple[str, ...],
    head_dim: int,
    block_m: int,
    block_n: int,
    *,
    warps: int,
    q: int,
    ctas: int,
    masks: tuple[Mask, ...] = MASKS,
    reason: str,
) -> Row[Sm80Config]:
    config = Sm80Config(
        block_m=block_m, block_n=block_n, warps=warps, stages=2, q_registers=q, ctas=ctas, reason=reason
    )
    return Row(arches, head_dim, head_dim, masks, config)


FORWARD = (
    _row(("sm_90",), 32, 128, 64, warps=4, q=2, ctas=3, reason="small enough for three blocks, which hide softmax"),
    _row(("sm_90",), 64, 128, 64, warps=4, q=4, ctas=2, reason="32 rows a warp; Q in registers saves ldmatrix"),
    _row(("sm_90",), 96, 128, 64, warps=4, q=2, ctas=2, reason="as 128, with room for two k-steps of Q"),
    _row(("sm_90",), 128, 128, 64, warps=4, q=0, ctas=2, reason="32 rows a warp halve K and V reads; two blocks"),
    _row(("sm_90",), 192, 128, 64, warps=8, q=12, ctas=1, reason="O leaves room for 16 rows a warp, and all of Q"),
    _row(("sm_90",), 256, 128, 64, warps=8, q=13, ctas=1, masks=("full",), reason="as 192, with room for most of Q"),
    _row(
        ("sm_90",),
        256,
        128,
        64,
        warps=8,
        q=12,
        ctas=1,
        masks=("causal",),
        reason="O leaves room for 16 rows a warp; 13 k-steps of Q spill",
    ),
    _row(("sm_100",), 64, 128, 64, warps=4, q=4, ctas=2, reason="as on sm_90; not measured there"),
    _row(("sm_100",), 128, 128, 48, warps=4, q=0, ctas=2, reason="64 keys spill there; not measured there"),
    _row(("sm_100",), 192, 128, 64, warps=8, q=12, ctas=1, reason="as on sm_90; not measured there"),
    _row(("sm_100",), 256, 128, 48, warps=8, q=7, ctas=1, reason="64 keys or 8 k-steps of Q spill; not measured there"),
    _row(("sm_80",), 64, 128, 64, warps=4, q=4, ctas=2, reason="as on sm_90; not measured there"),
    _row(("sm_80",), 128, 128, 48, warps=4, q=0, ctas=2, reason="two blocks within 164 KiB; not measured there"),
    _row(("sm_80",), 192, 128, 64, warps=8, q=12, ctas=1, reason="144 KiB of 163; not measured there"),
    _row(("sm_80",), 256, 128, 48, warps=8, q=4, ctas=1, reason="160 KiB of 163; not measured there"),
    _row(SMALL, 64, 128, 64, warps=4, q=4, ctas=2, reason="two blocks within 100 KiB; not measured there"),
    _row(SMALL, 128, 128, 64, warps=8, q=8, ctas=1, reason="96 KiB of 99, so one block; not measured there"),
    _row(SMALL, 192, 64, 48, warps=4, q=8, ctas=1, reason="96 KiB of 99; not measured there"),
    _row(SMALL, 256, 64, 32, warps=4, q=4, ctas=1, reason="96 KiB of 99; not measured there"),
)


def forward_config(problem: AttentionProblem) -> Sm80Config:
    """The config of the row with the smallest head dim that serves the problem.

    Accesses of less than 16 bytes take more addresses, and so registers, from the rest of the kernel; so do scores
    that are scaled before the softmax.
    """
    config = replace(row_for(FORWARD, problem).config, slack=SLACK[problem.mask])
    if problem.access_bytes < 16 or problem.scale_first:
        return replace(config, q_registers=0, block_n=min(48, config.block_n), reason=RARE_REASON)
    return config


# --- backward --------------------------------------------------------------------------------------------------


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
    return Row(arches, head_dim, head_dim, MASKS, config)


LARGE = ("sm_90", "sm_100")
"""227 KiB of shared memory for a block."""

BACKWARD = (
    _backward_row(
        LARGE, 64, 64, 64, key_warps=2, warps=4, ctas=3, reason="small enough for three blocks, which hide exponentials"
    ),
    _backward_row(("sm_80",), 64, 64, 64, key_warps=2, warps=4, ctas=2, reason="two blocks within 164 KiB"),
    _backward_row(("sm_90",), 96, 64, 128, key_warps=4, stages=(3, 3), reason="one barrier a step; 226 KiB, as at 128"),
    _backward_row(("sm_90",), 112, 64, 128, key_warps=4, reason="two stages, since three spill 52 bytes"),
    _backward_row(("sm_90",), 128, 64, 128, key_warps=4, stages=(3, 3), reason="one barrier a step; 226 KiB"),
    _backward_row(("sm_80", "sm_100"), 128, 64, 128, key_warps=4, reason="161 KiB; three stages spill on sm_100"),
    _backward_row(LARGE, 256, 64, 64, key_warps=2, reason="dK and dV take 128 registers; 209 KiB"),
    _backward_row(("sm_80",), 256, 64, 64, key_warps=2, stages=(1, 1), reason="145 KiB of 163"),
    _backward_row(SMALL, 64, 64, 128, key_warps=4, reason="97 KiB of 99"),
    _backward_row(SMALL, 128, 64, 64, key_warps=2, stages=(2, 1), reason="97 KiB of 99, so one block, of 8 warps"),
    _backward_row(SMALL, 256, 32, 32, key_warps=2, warps=4, stages=(2, 1), reason="89 KiB of 99"),
)


def backward_config(problem: AttentionProblem) -> BackwardConfig:
    """The config of the row with the smallest head dim that serves the problem.

    Loads of single elements take registers that large head dims do not leave to tiles of 64 queries.
    """
    row = row_for(BACKWARD, problem)
    if problem.access_bytes == 2 and row.head_dim == 256 and problem.arch not in SMALL:
        return replace(row.config, block_m=32, key_warps=4, reason="scalar loads need registers, so 32 queries")
    return row.config


def backward_rows_config(problem: AttentionProblem) -> BackwardRowsConfig:
    """One for all problems: the kernel is bound by memory."""
    return BackwardRowsConfig(reason="several rows for each warp, and loads of many in flight")


def backward_dq_config(problem: AttentionProblem) -> BackwardDqConfig:
    """One for all problems: the kernel is bound by memory."""
    return BackwardDqConfig(reason="a warp's rows are staged in its own shared memory")
