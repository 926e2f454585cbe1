"""Tuning table of the Hopper kernels (TMA, wgmma, persistent thread blocks), for compute capability 9.0."""

from __future__ import annotations

from dataclasses import replace

from ..config import Sm90Config
from ..errors import UnsupportedError
from ..problem import MASKS, AttentionProblem, Mask
from .tuning import SLACK, Row, row_for

ARCHES = ("sm_90a",)


def _row(
    head_dim: int,
    block_m: int,
    block_n: int,
    *,
    stages: int,
    q_stages: int,
    ping_pong: bool = False,
    tma_store: bool = False,
    masks: tuple[Mask, ...] = MASKS,
    reason: str,
) -> Row[Sm90Config]:
    config = Sm90Config(
        block_m=block_m,
        block_n=block_n,
        stages=stages,
        q_stages=q_stages,
        ping_pong=ping_pong,
        tma_store=tma_store,
        reason=reason,
    )
    return Row(ARCHES, head_dim, masks, config)


FORWARD = (
    _row(64, 192, 128, stages=3, q_stages=2, ping_pong=True, tma_store=True,
         reason="three consumers: softmax weighs most where the head dim is small"),
    _row(128, 128, 128, stages=2, q_stages=2, ping_pong=True, tma_store=True,
         reason="two Q buffers hide the work tiles' boundaries; 193 KiB"),
    _row(192, 128, 112, stages=2, q_stages=1,
         reason="216 KiB leave no room for a second Q buffer"),
    _row(256, 128, 80, stages=2, q_stages=1, masks=("full",),
         reason="225 KiB; O takes 128 registers, so few keys"),
    _row(256, 128, 64, stages=2, q_stages=1, masks=("causal",),
         reason="as above; 64 divides the query tile, so one diagonal tile less"),
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
