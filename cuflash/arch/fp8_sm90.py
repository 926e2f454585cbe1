"""Tuning table of the Hopper kernels for 8-bit inputs."""

from __future__ import annotations

from dataclasses import replace

from ..fp8_sm90_config import MOST_TWO_LEVEL, Fp8Sm90Config
from ..problem import AttentionProblem, Mask
from .tuning import Row, row_for

ARCHES = ("sm_90a",)


def _row(
    head_dim: int,
    block_m: int,
    *,
    stages: int,
    q_stages: int,
    masks: tuple[Mask, ...],
    head_dim_v: int | None = None,
    tma_store: bool = True,
    late_turn: bool = True,
    dynamic: bool = False,
    reason: str,
) -> Row[Fp8Sm90Config]:
    config = Fp8Sm90Config(
        block_m=block_m,
        stages=stages,
        q_stages=q_stages,
        tma_store=tma_store,
        dynamic=dynamic,
        two_level=True,
        late_turn=late_turn,
        reason=reason,
    )
    return Row(ARCHES, head_dim, head_dim_v or head_dim, masks, config)


FORWARD = (
    _row(64, 128, stages=4, q_stages=2, masks=("full",), reason="two consumers have registers for both levels"),
    _row(64, 128, stages=4, q_stages=2, masks=("causal",), dynamic=True, reason="as without a mask; a counter"),
    _row(128, 128, stages=4, q_stages=2, masks=("full",), reason="193 KiB"),
    _row(128, 128, stages=4, q_stages=2, masks=("causal",), dynamic=True, reason="193 KiB; a counter"),
    _row(256, 128, stages=3, q_stages=2, masks=("full",), head_dim_v=128, reason="as 128, with room for three stages"),
    _row(256, 128, stages=3, q_stages=2, masks=("causal",), head_dim_v=128, dynamic=True,
         reason="as without a mask; a counter"),
    _row(256, 128, stages=2, q_stages=2, masks=("full",), tma_store=False, late_turn=False,
         reason="O takes 128 registers, so there is one level; 201 KiB"),
    _row(256, 128, stages=2, q_stages=1, masks=("causal",), tma_store=False, late_turn=False, dynamic=True,
         reason="a second Q buffer, which works across the work tiles' boundaries, spills 4 bytes"),
)  # fmt: skip


def forward_config(problem: AttentionProblem) -> Fp8Sm90Config:
    """The config of the row with the smallest head dim that serves the problem.

    Raises
    ------
    UnsupportedError
        There is none.
    """
    config = row_for(FORWARD, problem).config
    two_level = problem.head_dim_v <= MOST_TWO_LEVEL and not problem.one_level
    return replace(config, two_level=two_level)
