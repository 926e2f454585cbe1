"""Tuning table of the Hopper kernels for 8-bit inputs."""

from __future__ import annotations

from dataclasses import replace

from ..fp8_sm90_config import MOST_TWO_LEVEL, Fp8Sm90Config
from ..problem import AttentionProblem, Mask
from .tuning import Row, row_for

ARCHES = ("sm_90a",)
SHORT = 1024
"""Queries up to which a problem counts as short."""


# A reason's figures compare with a row that has that alone otherwise, at B N = 16384, H D = 2048, N = 1024, 4096, 8192.
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
    two_level: bool = True,
    short: bool = False,
    reason: str,
) -> Row[Fp8Sm90Config]:
    config = Fp8Sm90Config(
        block_m=block_m,
        stages=stages,
        q_stages=q_stages,
        tma_store=tma_store,
        dynamic=dynamic,
        two_level=two_level,
        late_turn=late_turn,
        reason=reason,
    )
    return Row(ARCHES, head_dim, head_dim_v or head_dim, masks, config, short)


FORWARD = (
    _row(64, 128, stages=4, q_stages=2, masks=("full",),
         reason="two consumers have registers for both levels; turns end late: +17, +18, +18 %"),
    _row(64, 128, stages=4, q_stages=2, masks=("causal",), dynamic=True,
         reason="as without a mask; a counter: +1, +3, +3 %"),
    _row(128, 128, stages=4, q_stages=2, masks=("full",),
         reason="O leaves through a Q buffer: +10, +4, +1 %; turns end late: +4, +3, +2 %"),
    _row(128, 128, stages=3, q_stages=2, masks=("causal",), dynamic=True,
         reason="three stages, to four: +0.7, +1.1, +0.5 %; a counter: +2, +7, +8 %"),
    _row(256, 128, stages=3, q_stages=2, masks=("full",), head_dim_v=128, reason="as 128, with room for three stages"),
    _row(256, 128, stages=3, q_stages=2, masks=("causal",), head_dim_v=128, dynamic=True,
         reason="as without a mask; a counter"),
    # One level, because it is asked for
    _row(64, 192, stages=4, q_stages=2, masks=("full",), two_level=False, late_turn=False,
         reason="three consumers, turns that end early; to two and late ones: +2, +11, +16 %"),
    _row(64, 192, stages=4, q_stages=2, masks=("causal",), two_level=False, late_turn=False, dynamic=True,
         reason="as without a mask: -4, +5, +9 %; a counter"),
    _row(64, 128, stages=3, q_stages=2, masks=("causal",), two_level=False, dynamic=True, short=True,
         reason="smaller tiles, of which the mask hides less: +5 % at N = 1024; three stages, to four: +0.8 %"),
    _row(128, 128, stages=4, q_stages=2, masks=("full",), two_level=False, late_turn=False,
         reason="turns end early: +0.4, +1.6, +2.2 %"),
    _row(128, 128, stages=4, q_stages=2, masks=("causal",), two_level=False, late_turn=False, dynamic=True,
         reason="turns end early: -0.3, +3.0, +3.8 %; a counter"),
    _row(256, 128, stages=3, q_stages=2, masks=("full",), head_dim_v=128, two_level=False, late_turn=False,
         reason="as 128, with room for three stages"),
    _row(256, 128, stages=3, q_stages=2, masks=("causal",), head_dim_v=128, two_level=False, late_turn=False,
         dynamic=True, reason="as without a mask; a counter"),
    # One level, because O takes 128 registers
    _row(256, 128, stages=2, q_stages=2, masks=("full",), tma_store=False, two_level=False, late_turn=False,
         reason="a second Q buffer: +4, +1, +1 %; turns end early: +2, +3, +3 %"),
    _row(256, 128, stages=2, q_stages=2, masks=("causal",), tma_store=False, two_level=False, late_turn=False,
         dynamic=True, reason="a second Q buffer: +3.3, +0.3, +0.7 %; a counter, with one buffer: +3, +13, -0.5 %"),
)  # fmt: skip


def forward_config(problem: AttentionProblem) -> Fp8Sm90Config:
    """The config of the row with the smallest head dim that serves the problem, and adds up O as it must.

    Raises
    ------
    UnsupportedError
        There is none.
    """
    return row_for(_rows(problem), problem).config


def is_short(problem: AttentionProblem, seqlen_q: int) -> bool:
    """Whether a problem of so many queries has a row of its own."""
    short = replace(problem, short=True)
    return seqlen_q <= SHORT and any(row.serves(short) for row in _rows(problem))


def _rows(problem: AttentionProblem) -> list[Row[Fp8Sm90Config]]:
    """Those with as many levels of sums as the problem wants, and registers allow."""
    two_level = problem.head_dim_v <= MOST_TWO_LEVEL and not problem.one_level
    return [row for row in FORWARD if row.config.two_level == two_level]
