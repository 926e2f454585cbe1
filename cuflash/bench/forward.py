"""The forward table: speed and error of cuflash and its peers, case by case."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import numpy as np

from .. import kernels
from ..build import Job
from ..explanation import Explanation, explain
from ..problem import Dtype
from . import accuracy, published
from .inputs import Case, InputPool
from .measure import Spread, Timer, device_times
from .peers import OURS, OURS_SM80, contestants

DTYPES: tuple[Dtype, ...] = ("bfloat16", "float16")
MASKS = (False, True)
"""Whether causal."""
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
MAIN_HEAD_DIMS = (64, 128, 256)
OTHER_HEAD_DIMS = ((32, 32), (80, 80), (96, 96), (160, 160), (192, 192), (192, 128))
OTHER_LENGTH = 4096
GROUPED_LENGTHS = (512, 1024, 2048, 4096, 8192, 16384, 32768)
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
    kernels : dict
        The kernel of each of cuflash's families that takes part.
    case_flops : float
        By the papers' convention.
    hbm_bytes, standard_bytes : int
        Predicted memory traffic of the kernel that a call takes, and that of attention which stores the scores
        (`cuflash.cost`).
    """

    case: Case
    kernels: dict[str, str]
    case_flops: float
    hbm_bytes: int
    standard_bytes: int
    results: dict[str, Result] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)


def all_cases() -> list[Case]:
    """The complete forward table."""
    main = [Case.of(d, causal, n, dtype) for dtype, d, causal, n in product(DTYPES, MAIN_HEAD_DIMS, MASKS, LENGTHS)]
    other = [
        Case.of(d, causal, OTHER_LENGTH, dtype, head_dim_v=dv)
        for dtype, (d, dv), causal in product(DTYPES, OTHER_HEAD_DIMS, MASKS)
    ]
    return [*main, *other, *(grouped_case(n) for n in GROUPED_LENGTHS)]


def grouped_case(seqlen: int) -> Case:
    """One sequence with the heads of a Llama 3 8B layer."""
    return Case.of(128, True, seqlen, "bfloat16", batch=1, heads=32, heads_k=8)


def quick_cases() -> list[Case]:
    """A look that takes seconds."""
    return [Case.of(*chosen, "bfloat16") for chosen in product(MAIN_HEAD_DIMS, MASKS, (1024, 4096))]


def measure_forward(
    cases: Sequence[Case], peers: tuple[str, ...], rounds: int, timer: Timer, report: Callable[[Row], None]
) -> list[Row]:
    """All cases, by dtype; ``report`` hears of each row as it is finished."""
    rows: list[Row] = []
    xp = accuracy.array_module()
    for dtype in dict.fromkeys(case.dtype for case in cases):
        chosen = [case for case in cases if case.dtype == dtype]
        pool = InputPool(dtype, chosen)
        for case in chosen:
            rows.append(measure_case(case, pool, peers, rounds, timer, xp))
            report(rows[-1])
        del pool  # one dtype's buffers at a time
    return rows


def measure_case(case: Case, pool: InputPool, peers: tuple[str, ...], rounds: int, timer: Timer, xp: Any) -> Row:
    """Time everybody who takes the case, in turn, and compare everybody's output with float64."""
    arrays = pool.arrays(case)
    about = explain(*arrays[:3], causal=case.causal)
    symbols = family_symbols(case, about)
    taking, refusing = contestants(case, arrays, peers, both_families=OURS_SM80 in symbols)
    row = Row(case, symbols, case.flops, about.hbm_bytes, about.standard_bytes)
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


def family_symbols(case: Case, about: Explanation) -> dict[str, str]:
    """The kernel that a call takes, and the Ampere-style one where that is another."""
    if about.kernel is None:
        return {}
    symbols = {OURS: about.kernel.symbol}
    if about.kernel.family != "forward_sm80":
        assert about.device is not None
        problem = case.problem(about.device.arch)
        symbols[OURS_SM80] = kernels.symbol(problem, kernels.select_config(problem))
    return symbols


def describe_row(row: Row) -> str:
    """One line for the progress display."""
    speeds = "  ".join(f"{name} {result.tflops:.0f}" for name, result in row.results.items())
    return f"{row.case}: {speeds} TFLOP/s"


def kernel_jobs(cases: Iterable[Case], targets: Iterable[str]) -> list[Job]:
    """(problem, config) of every kernel that the cases need, of the families for these targets."""
    problems = {case.problem(target) for case in cases for target in targets}
    ordered = sorted(problems, key=lambda p: -p.head_dim)  # the longest compilations first
    return [(problem, kernels.select_config(problem)) for problem in ordered]


# --- rows of the record ----------------------------------------------------------------------------------------


def is_grouped(row: dict[str, Any]) -> bool:
    """Whether the row has fewer heads of K and V than of Q."""
    return bool(row["case"]["heads_k"] != row["case"]["heads"])


def is_main(row: dict[str, Any]) -> bool:
    """Whether the row is of the tables over N."""
    case = row["case"]
    return case["head_dim"] in MAIN_HEAD_DIMS and case["head_dim_v"] == case["head_dim"] and not is_grouped(row)


def ratio(row: dict[str, Any], peer: str, name: str = OURS) -> float | None:
    """How many times faster than a peer cuflash is, in a row of the record; None if either is missing."""
    results = row["results"]
    if name not in results or peer not in results:
        return None
    return float(results[peer]["milliseconds"]["median"] / results[name]["milliseconds"]["median"])


def derived_ratio(row: dict[str, Any], device: str) -> float | None:
    """Cuflash's multiple of the best public kernel, through cuDNN, which both were timed beside; None if unknown."""
    case, over_cudnn = row["case"], ratio(row, "cudnn")
    if over_cudnn is None or not is_main(row):
        return None
    best = published.best_over_cudnn(device, case["head_dim"], case["causal"], case["seqlen"])
    return over_cudnn / best if best else None
