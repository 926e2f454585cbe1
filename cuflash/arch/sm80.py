"""Tuning table of the Ampere-style kernels (mma.sync, ldmatrix, cp.async), for every target.

What was tried on an H200, with figures, is in bench/LOG.md.
Rows of targets that were not measured follow from shared memory and registers, and say so.
"""

from __future__ import annotations

from dataclasses import replace

from ..problem import MASKS, AttentionProblem, Mask
from ..sm80_config import Sm80Config
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
