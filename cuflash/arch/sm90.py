"""Tuning table of the Hopper kernels (TMA, wgmma, persistent thread blocks), for compute capability 9.0."""

from __future__ import annotations

from dataclasses import replace

from ..errors import UnsupportedError
from ..problem import AttentionProblem, Mask
from ..sm90_config import Sm90Config
from .tuning import SLACK, Row, row_for

ARCHES = ("sm_90a",)
SHORT = 1024
"""Queries up to which a problem counts as short."""


# Turns of the consumers are worth up to 7 %. O leaves by TMA through a Q buffer where there are two, or where registers
# hold all of Q.
def _row(
    head_dim: int,
    block_m: int,
    block_n: int,
    *,
    stages: int,
    q_stages: int,
    q_registers: int = 0,
    masks: tuple[Mask, ...],
    head_dim_v: int | None = None,
    dynamic: bool = False,
    short: bool = False,
    reason: str,
) -> Row[Sm90Config]:
    config = Sm90Config(
        block_m=block_m,
        block_n=block_n,
        stages=stages,
        q_stages=q_stages,
        q_registers=q_registers,
        ping_pong=True,
        tma_store=q_stages > 1 or 16 * q_registers >= head_dim,
        dynamic=dynamic,
        reason=reason,
    )
    return Row(ARCHES, head_dim, head_dim_v or head_dim, masks, config, short)


FORWARD = (
    _row(64, 192, 128, stages=3, q_stages=2, masks=("full",),
         reason="three consumers: softmax weighs most where the head dim is small"),
    _row(64, 192, 128, stages=3, q_stages=3, masks=("causal",), dynamic=True,
         reason="three consumers, as without a mask; a counter; a third Q buffer: +4 % at N = 512"),
    _row(64, 128, 128, stages=3, q_stages=3, masks=("causal",), dynamic=True, short=True,
         reason="smaller tiles, of which the mask hides less: +5 % at N = 512, +2 % at 1024, -12 % at 2048"),
    _row(128, 128, 128, stages=3, q_stages=1, q_registers=8, masks=("full",),
         reason="Q in registers: a fifth less is read from shared memory, 2 % fewer cycles, room for a third stage"),
    _row(128, 128, 128, stages=3, q_stages=1, q_registers=8, masks=("causal",), dynamic=True,
         reason="Q in registers and three stages: +3 % at N = 1024; a counter, worth 25 % at N = 4096"),
    _row(160, 128, 96, stages=2, q_stages=1, q_registers=10, masks=("causal",), dynamic=True,
         reason="Q in registers, so that the products of work tiles overlap: +3 % to the row of 192"),
    _row(192, 128, 128, stages=2, q_stages=1, masks=("full",), head_dim_v=128,
         reason="one Q buffer leaves room for 128 keys: 769 TFLOP/s at N = 4096, two and 96 keys 747"),
    _row(192, 128, 128, stages=2, q_stages=1, masks=("causal",), head_dim_v=128, dynamic=True,
         reason="one Q buffer and 128 keys: 711 TFLOP/s at N = 4096, two and 96 keys 693"),
    _row(192, 128, 112, stages=2, q_stages=1, masks=("full",),
         reason="one Q buffer and 112 keys: 767 TFLOP/s at N = 4096, two and 80 keys 755"),
    _row(192, 128, 96, stages=2, q_stages=1, masks=("causal",), dynamic=True,
         reason="one Q buffer and 96 keys: 695 TFLOP/s at N = 4096, 112 keys 692, two and 80 keys 692"),
    _row(256, 128, 80, stages=2, q_stages=1, masks=("full",),
         reason="225 KiB with one Q buffer; O takes 128 registers"),
    _row(256, 128, 64, stages=2, q_stages=1, masks=("causal",), dynamic=True,
         reason="64 divides the query tile: less of the diagonal's tiles is masked"),
)  # fmt: skip


def forward_config(problem: AttentionProblem) -> Sm90Config:
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
    return replace(row_for(FORWARD, problem).config, slack=SLACK[problem.mask])


def is_short(problem: AttentionProblem, seqlen_q: int) -> bool:
    """Whether a problem of so many queries has a row of its own."""
    return (
        problem.task == "forward"
        and problem.input_dtype is None
        and seqlen_q <= SHORT
        and any(row.serves(replace(problem, short=True)) for row in FORWARD)
    )
