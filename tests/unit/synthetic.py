"""A benchmark record with invented numbers of a plausible size."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

from cuflash.bench.forward import all_cases
from cuflash.bench.inputs import Case
from cuflash.cost import NOMINAL_DEVICES, Schedule, Shape, fused_bytes

PLATEAU = {"cuflash": 2.1, "cuflash sm80": 1.2, "flash": 1.0, "cudnn": 1.9, "efficient": 0.75}
"""Speed at long sequences as a multiple of 320 TFLOP/s."""


def spread(median: float, noise: float = 0.02) -> dict[str, float]:
    return {"median": median, "q1": median * (1 - noise), "q3": median * (1 + noise), "samples": 15}


def result(case: Case, name: str, rng: random.Random) -> dict[str, Any]:
    """Grows with N towards a plateau, more slowly under a causal mask."""
    half = 900 if case.causal else 250
    tflops = 320 * PLATEAU[name] * case.seqlen / (case.seqlen + half) * rng.uniform(0.97, 1.03)
    error = {"relative": 2.1e-3 * rng.uniform(0.98, 1.02), "largest": 1.5e-2, "where": [0, 17, 3, 5]}
    milliseconds = spread(case.flops / tflops / 1e9, rng.uniform(0.002, 0.03))
    return {"milliseconds": milliseconds, "tflops": tflops, "error": error}


def row(case: Case, rng: random.Random) -> dict[str, Any]:
    device = NOMINAL_DEVICES["sm_90"]
    shape = Shape(case.batch, case.heads, case.heads_k, case.seqlen, case.seqlen, case.head_dim, case.head_dim_v,
                  0 if case.causal else None)  # fmt: skip
    names = [name for name in PLATEAU if not (name == "cudnn" and case.head_dim in (32, 80))]
    return {
        "case": dataclasses.asdict(case),
        "kernels": {"cuflash": "cuflash_fwd_sm90", "cuflash sm80": "cuflash_fwd_sm80"},
        "case_flops": case.flops,
        "hbm_bytes": fused_bytes(shape, Schedule(128, 8 if case.causal else 1, 132, device.l2_bytes, 2), lse=False),
        "standard_bytes": shape.standard_bytes,
        "results": {name: result(case, name, rng) for name in names},
        "refused": {} if "cudnn" in names else {"cudnn": "No valid engine"},
    }


def record(seed: int = 0) -> dict[str, Any]:
    """A complete record."""
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
    return {
        "schema": 2,
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
        "forward": [row(case, rng) for case in all_cases()],
        "host": {name: spread(us) for name, us in host.items()},
        "startup": {"cold": start, "warm": start, "import": {"import": spread(1.0), "with_functions": spread(9.0)}},
        "memory": [{"case": "B1 N128 H8 D64", "requested": 131072, "output": 131072, "lse": 4096, "driver": 0}],
        "seconds": 201.0,
    }
