"""The forward table: speed and error of cuflash and its peers, case by case."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import numpy as np

from ..build import Job
from ..explanation import explain
from ..problem import Dtype
from . import accuracy
from .inputs import TOKENS, WIDTH, Case, InputPool
from .measure import Spread, Timer, device_times
from .peers import OURS, contestants

DTYPES: tuple[Dtype, ...] = ("bfloat16", "float16")
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
MAIN_HEAD_DIMS = (64, 128, 256)
OTHER_HEAD_DIMS = (32, 80, 96, 160, 192)
OTHER_LENGTH = 4096
PEERS = ("flash", "cudnn", "efficient")


@dataclass(frozen=True, slots=True)
class Result:
    """One implementation on one case: milliseconds, and the error against float64 where it was taken."""

    milliseconds: Spread
    tflops: float
    error: accuracy.Error | None = None


@dataclass(slots=True)
class Row:
    """One case with everybody's result, and what the others said who refused it.

    Attributes
    ----------
    kernel : str
        cuflash's kernel.
    case_flops : float
        By the papers' convention.
    hbm_bytes, standard_bytes : int
        Predicted memory traffic of the kernel, and that of attention which stores the scores (`cuflash.cost`).
    """

    case: Case
    kernel: str
    case_flops: float
    hbm_bytes: int
    standard_bytes: int
    results: dict[str, Result] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)


def all_cases() -> list[Case]:
    """The complete forward table."""
    main = product(DTYPES, MAIN_HEAD_DIMS, (False, True), LENGTHS)
    other = product(DTYPES, OTHER_HEAD_DIMS, (False, True), (OTHER_LENGTH,))
    return [Case.of(d, causal, n, dtype) for dtype, d, causal, n in (*main, *other)]


def quick_cases() -> list[Case]:
    """A look that takes seconds."""
    return [Case.of(*chosen, "bfloat16") for chosen in product(MAIN_HEAD_DIMS, (False, True), (1024, 4096))]


def measure_forward(
    cases: Iterable[Case], peers: tuple[str, ...], rounds: int, timer: Timer, report: Callable[[Row], None]
) -> list[Row]:
    """Every case in turn; ``report`` hears of each row as it is finished."""
    rows: list[Row] = []
    pools: dict[str, InputPool] = {}
    xp = accuracy.array_module()
    for case in cases:
        if case.dtype not in pools:
            pools.clear()  # one dtype's buffers at a time
            pools[case.dtype] = InputPool(case.dtype, TOKENS * WIDTH)
        rows.append(measure_case(case, pools[case.dtype], peers, rounds, timer, xp))
        report(rows[-1])
    return rows


def measure_case(case: Case, pool: InputPool, peers: tuple[str, ...], rounds: int, timer: Timer, xp: Any) -> Row:
    """Time everybody who takes the case, in turn, and compare everybody's output with float64."""
    arrays = pool.arrays(case.shape)
    taking, refusing = contestants(case, arrays, peers)
    about = explain(*arrays[:3], causal=case.causal)
    row = Row(case, about.kernel.symbol if about.kernel else "", case.flops, about.hbm_bytes, about.standard_bytes)
    row.refused = {refusal.name: refusal.reason for refusal in refusing}
    outputs = {one.name: one.output() for one in taking}
    errors = accuracy.errors(outputs, arrays[:3], case.causal, xp, heads=1 if xp is np else 4)
    del outputs
    # A short case gets up to three times the rounds: its time is the noisier one, and costs less.
    rounds *= min(3, max(1, round(4e11 / case.flops)))
    times = device_times({one.name: one.call for one in taking}, rounds, timer)
    for name, spread in times.items():
        row.results[name] = Result(spread, case.tflops(spread.median), errors[name])
    return row


def describe_row(row: Row) -> str:
    """One line for the progress display."""
    speeds = "  ".join(f"{name} {result.tflops:.0f}" for name, result in row.results.items())
    return f"{row.case}: {speeds} TFLOP/s"


def kernel_jobs(cases: Iterable[Case], arch: str) -> list[Job]:
    """(problem, config) of every kernel that the cases need."""
    from ..kernels import select_config

    problems = {case.problem(arch) for case in cases}
    ordered = sorted(problems, key=lambda p: -p.head_dim)  # the longest compilations first
    return [(problem, select_config(problem)) for problem in ordered]


def ours_against(row: dict[str, Any], peer: str) -> float | None:
    """How many times faster than a peer cuflash is, in a row of the record; None if either is missing."""
    results = row["results"]
    if OURS not in results or peer not in results:
        return None
    return float(results[peer]["milliseconds"]["median"] / results[OURS]["milliseconds"]["median"])
