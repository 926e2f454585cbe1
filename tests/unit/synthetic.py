"""A benchmark record with invented numbers of a plausible size."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

from cuflash.backward_cost import backward_standard_bytes
from cuflash.bench.inputs import Case
from cuflash.bench.runner import PASSES
from cuflash.cost import NOMINAL_DEVICES, Schedule, Shape, fused_bytes

PLATEAU = {
    "forward": {"cuflash": 2.1, "cuflash sm80": 1.2, "flash": 1.0, "cudnn": 1.9, "efficient": 0.75},
    "backward": {
        "cuflash": 1.8, "cuflash deterministic": 1.6, "cuflash sm80": 1.0, "flash": 0.9, "cudnn": 1.5, "efficient": 0.4,
    },
}  # fmt: skip
"""Speed at long sequences as a multiple of 320 TFLOP/s, by pass."""
RESULTS = {"forward": ("out",), "backward": ("dq", "dk", "dv")}


def spread(median: float, noise: float = 0.02) -> dict[str, float]:
    return {"median": median, "q1": median * (1 - noise), "q3": median * (1 + noise), "samples": 15}


def result(case: Case, which: str, name: str, rng: random.Random) -> dict[str, Any]:
    """Grows with N towards a plateau, more slowly under a causal mask."""
    half = 900 if case.causal else 250
    tflops = 320 * PLATEAU[which][name] * case.seqlen / (case.seqlen + half) * rng.uniform(0.97, 1.03)
    errors = {
        made: {"relative": 2.1e-3 * rng.uniform(0.98, 1.02), "largest": 1.5e-2, "where": [0, 17, 3, 5]}
        for made in RESULTS[which]
    }
    milliseconds = spread(case.flops_of(which) / tflops / 1e9, rng.uniform(0.002, 0.03))
    return {"milliseconds": milliseconds, "tflops": tflops, "errors": errors}


def row(case: Case, which: str, rng: random.Random) -> dict[str, Any]:
    device = NOMINAL_DEVICES["sm_90"]
    shape = Shape(case.batch, case.heads, case.heads_k, case.seqlen, case.seqlen, case.head_dim, case.head_dim_v,
                  0 if case.causal else None)  # fmt: skip
    names = [name for name in PLATEAU[which] if not (name == "cudnn" and case.head_dim in (32, 80))]
    return {
        "case": dataclasses.asdict(case),
        "kernels": {"cuflash": "cuflash_fwd_sm90", "cuflash sm80": "cuflash_fwd_sm80"},
        "case_flops": case.flops_of(which),
        "hbm_bytes": fused_bytes(shape, Schedule(128, 8 if case.causal else 1, 132, device.l2_bytes, 2), lse=False),
        "standard_bytes": shape.standard_bytes if which == "forward" else backward_standard_bytes(shape),
        "results": {name: result(case, which, name, rng) for name in names},
        "refused": {} if "cudnn" in names else {"cudnn": "No valid engine"},
    }


def long_calls() -> list[dict[str, Any]]:
    """Forward and backward of one sequence, each twice as long as the one before."""
    errors = {name: {"relative": 2.2e-3, "largest": 0.03, "where": [0, 1, 2, 3]} for name in ("out", "dq", "dk", "dv")}
    sizes = {"inputs": 1 << 27, "results": (1 << 27) + (1 << 20), "peak": (1 << 28) + (1 << 26)}
    return [
        {"case": f"B1 N{n} H16 D64", "seqlen": n, "errors": errors if n == 65536 else {}}
        | {name: size * n // 16384 for name, size in sizes.items()}
        for n in (16384, 32768, 65536)
    ]


def record(which: str = "forward", seed: int = 0) -> dict[str, Any]:
    """A complete record of a pass."""
    rng = random.Random(seed)
    device = NOMINAL_DEVICES["sm_90"]
    phases = {"cupy_and_context": 900.0, "import": 9.0, "first_call": 30.0, "second_call": 0.1, "beyond_cupy": 39.0}
    start = {phase: spread(milliseconds) for phase, milliseconds in phases.items()}
    host = {
        "cuflash, CuPy": 12.5,
        "cuflash, CuPy, out=": 10.1,
        "cuflash, torch": 15.2,
        "cuflash, torch, out=": 11.0,
        "torch SDPA": 17.7,
        "torch SDPA, flash": 16.9,
    }
    forward_only = {
        "startup": {"cold": start, "warm": start, "import": {"import": spread(1.0), "with_functions": spread(9.0)}},
        "memory": [{"case": "B1 N128 H8 D64", "requested": 131072, "output": 131072, "lse": 4096, "driver": 0}],
    }
    return {
        "schema": 3,
        "pass": which,
        "environment": {
            "commit": "0123456789ab",
            "date": "2026-01-02 03:04 UTC",
            "device": "NVIDIA H200 (invented)",
            "compute_capability": [9, 0],
            "multiprocessors": 132,
            "clock_mhz": 1980.0,
            "peak_tflops": device.peak_flops / 1e12,
            "bandwidth_gb_s": device.bandwidth / 1e9,
            "l2_bytes": device.l2_bytes,
            "nvidia_smi": {"driver_version": "580.0", "clocks.sm": "345", "power.draw": "80"},
            "nvidia_smi_under_load": {"clocks.sm": "1665", "power.draw": "698"},
            "nvrtc": "13.0.88",
            "python": "3.12.3",
            "packages": {"numpy": "2.4.6", "cupy-cuda13x": "14.2.0", "torch": "2.11.0"},
            "cudnn": 91900,
        },
        "speed": [row(case, which, rng) for case in PASSES[which].cases],
        "host": {name: spread(us) for name, us in host.items()},
        **(forward_only if which == "forward" else {"memory": long_calls()}),
        "seconds": 201.0,
    }
