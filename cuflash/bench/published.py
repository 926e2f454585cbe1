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

LENGTHS = {"forward": (512, 1024, 2048, 4096, 8192, 16384), "backward": (1024, 4096, 8192, 16384)}
_BEST_OVER_CUDNN = {
    ("forward", 64, False): (1.00, 1.00, 1.08, 1.14, 1.28, 1.27),
    ("forward", 64, True): (1.00, 1.00, 1.08, 1.13, 1.26, 1.28),
    ("forward", 128, False): (1.00, 1.04, 1.06, 1.09, 1.18, 1.23),
    ("forward", 128, True): (1.00, 1.13, 1.18, 1.19, 1.19, 1.32),
    ("forward", 256, False): (1.00, 1.06, 1.08, 1.08, 1.14, 1.19),
    ("forward", 256, True): (1.00, 1.08, 1.16, 1.20, 1.23, 1.38),
    ("backward", 64, False): (1.20, 1.25, 1.29, 1.18),
    ("backward", 64, True): (1.29, 1.33, 1.40, 1.42),
    ("backward", 128, False): (1.11, 1.11, 1.19, 1.16),
    ("backward", 128, True): (1.15, 1.18, 1.27, 1.28),
}
"""By pass, head dim and whether causal, for each of ``LENGTHS``; the whole backward pass, with 2.5 times the FLOPs."""


def best_over_cudnn(which: str, device: str, head_dim: int, causal: bool, seqlen: int) -> float | None:
    """How many times cuDNN's speed the fastest public kernel has in a pass; None where that is not known."""
    row = _BEST_OVER_CUDNN.get((which, head_dim, causal))
    if DEVICE not in device or row is None or seqlen not in LENGTHS[which]:
        return None
    return row[LENGTHS[which].index(seqlen)]
