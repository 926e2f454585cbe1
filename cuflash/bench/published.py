"""The best public kernels beside torch's cuDNN, as another run had them: a way to figures that cannot be measured here.

FlashAttention-3 and -4 are not on every machine, cuDNN is wherever torch is. What they reached beside cuDNN, and what
cuflash reaches beside it in a run of its own, give cuflash's multiple of them: a derived figure, never a measured one.
"""

from __future__ import annotations

DEVICE = "H200"
SOURCE = (
    "one NVIDIA H200 (driver 580, CUDA 13.0), torch 2.11, cuDNN 9.19, bfloat16, the cases of the tables here, medians "
    "of device-event times, in turn, 2026-11-29: the fastest of FlashAttention-3 (hopper/ of flash-attention at its "
    "newest commit, nvcc 13.0), FlashAttention-4 (flash-attn-4's Hopper path) and cuDNN, over cuDNN in the same run"
)

LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
_BEST_OVER_CUDNN = {
    (64, False): (1.00, 1.00, 1.08, 1.14, 1.28, 1.27),
    (64, True): (1.00, 1.00, 1.08, 1.13, 1.26, 1.28),
    (128, False): (1.00, 1.04, 1.06, 1.09, 1.18, 1.23),
    (128, True): (1.00, 1.13, 1.18, 1.19, 1.19, 1.32),
    (256, False): (1.00, 1.06, 1.08, 1.08, 1.14, 1.19),
    (256, True): (1.00, 1.08, 1.16, 1.20, 1.23, 1.38),
}
"""By head dim and whether causal, for each of ``LENGTHS``."""


def best_over_cudnn(device: str, head_dim: int, causal: bool, seqlen: int) -> float | None:
    """How many times cuDNN's speed the fastest public kernel has; None where that is not known."""
    row = _BEST_OVER_CUDNN.get((head_dim, causal))
    if DEVICE not in device or row is None or seqlen not in LENGTHS:
        return None
    return row[LENGTHS.index(seqlen)]
