"""Tuning table of the Ampere-style kernels for 8-bit inputs, for every target.

On sm_90 ordinary calls take the Hopper kernels; its rows here serve tests and comparisons. Only these were measured:
where a reason has no figures, registers and shared memory decided. Targets whose hardware multiplies 8-bit floats in
``mma.sync`` take the codes, and sum the output in fp32; the others convert tiles to fp16, whose products the tensor
cores sum well enough by themselves.
"""

from __future__ import annotations

from dataclasses import replace

from ..fp8_sm80_config import Fp8Sm80Config
from ..problem import MASKS, AttentionProblem, Mask
from .tuning import Row, row_for

LARGE = ("sm_80", "sm_90", "sm_100")
"""163 KiB of shared memory for a block and more, and no products of codes."""
CODES = ("sm_89", "sm_120")
"""Products of codes; 99 KiB of shared memory for a block."""


def _row(
    arches: tuple[str, ...],
    head_dim: int,
    block_m: int,
    block_n: int,
    *,
    warps: int,
    ctas: int,
    masks: tuple[Mask, ...] = MASKS,
    reason: str,
) -> Row[Fp8Sm80Config]:
    codes = arches == CODES
    levels = "codes, so two levels" if codes else "fp16, so one level"
    config = Fp8Sm80Config(
        block_m=block_m,
        block_n=block_n,
        warps=warps,
        q_registers=0,
        ctas=ctas,
        converted=not codes,
        two_level=codes,
        reason=f"{reason}; {levels}",
    )
    return Row(arches, head_dim, head_dim, masks, config)


FORWARD = (
    _row(CODES, 64, 128, 64, warps=4, ctas=2, reason="32 rows a warp halve K and V reads; two blocks hide softmax"),
    _row(CODES, 128, 64, 64, warps=4, ctas=2, reason="two blocks within 100 KiB; 32 rows a warp spill"),
    _row(CODES, 256, 128, 32, warps=8, ctas=1, reason="96 KiB of 99"),
    _row(LARGE, 64, 128, 64, warps=4, ctas=2, reason="sm_90, N = 4096: 273 TFLOP/s, others 202-245"),
    _row(LARGE, 128, 128, 32, warps=4, ctas=2, masks=("full",), reason="sm_90, N = 4096: 302 TFLOP/s, 64 x 64 248"),
    _row(LARGE, 128, 64, 64, warps=4, ctas=2, masks=("causal",), reason="32 rows a warp spill 16 to 24 bytes"),
    _row(LARGE, 256, 128, 64, warps=8, ctas=1, reason="160 KiB of 163; sm_90: 294 TFLOP/s, others 237-250"),
    _row(("sm_86",), 64, 128, 64, warps=4, ctas=2, reason="as on sm_80"),
    _row(("sm_86",), 128, 128, 64, warps=8, ctas=1, reason="80 KiB of 99, so one block"),
    _row(("sm_86",), 256, 64, 32, warps=4, ctas=1, reason="80 KiB of 99"),
)


def forward_config(problem: AttentionProblem) -> Fp8Sm80Config:
    """The config of the row with the smallest head dim that serves the problem.

    Raises
    ------
    UnsupportedError
        There is none.
    """
    config = row_for(FORWARD, problem).config
    return replace(config, two_level=config.two_level and not problem.one_level)
