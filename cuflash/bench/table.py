"""A table of speed and error, case by case, of cuflash and its peers: how its rows are measured, and what they hold."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from .. import kernels
from ..build import Job
from ..explanation import Explanation, explain
from ..problem import AttentionProblem
from . import accuracy, published
from .inputs import Case, InputPool
from .measure import Spread, Timer, device_times
from .peers import OURS, OURS_SM80, Contestant, Refusal

MAIN_HEAD_DIMS = (64, 128, 256)

PassName = Literal["forward", "backward"]


@dataclass(frozen=True, slots=True)
class Pass:
    """What the table of one pass has of its own.

    Attributes
    ----------
    cases, quick_cases : tuple of Case
        The complete table, and a look that takes seconds.
    rounds : int
        Of the complete table.
    contestants : callable
        From a case, its arrays (q, k, v, and one like the output), the peers and the explanation of the call: who
        takes the case, and who refuses it.
    exact : callable
        From the same arrays, causal, the array module and a number of heads: what results are compared with.
    problems : callable
        The kernels that a case needs on a device that a target names.
    """

    name: PassName
    cases: tuple[Case, ...]
    quick_cases: tuple[Case, ...]
    rounds: int
    contestants: Callable[[Case, list[Any], tuple[str, ...], Explanation], tuple[list[Contestant], list[Refusal]]]
    exact: Callable[[Sequence[Any], bool, Any, int], Iterator[accuracy.Exact]]
    problems: Callable[[Case, str], Iterable[AttentionProblem]]

    def explain(self, case: Case, arrays: Sequence[Any]) -> Explanation:
        """The call that is measured."""
        return explain(*arrays[:3], causal=case.causal, backward=self.name == "backward")


@dataclass(frozen=True, slots=True)
class Result:
    """One implementation on one case: milliseconds, and the error of each result against float64 where it was taken."""

    milliseconds: Spread
    tflops: float
    errors: dict[str, accuracy.Error]


@dataclass(slots=True)
class Row:
    """One case with everybody's result, and what the others said who refused it.

    Attributes
    ----------
    kernels : dict
        The kernel that does the work, of each of cuflash's families that takes part.
    case_flops : float
        By the papers' convention.
    hbm_bytes, standard_bytes : int
        Predicted memory traffic of the kernels that a call takes, and that of attention which stores the scores
        (`cuflash.cost`, `cuflash.backward_cost`).
    """

    case: Case
    kernels: dict[str, str]
    case_flops: float
    hbm_bytes: int
    standard_bytes: int
    results: dict[str, Result] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)


def measure_table(
    which: Pass, cases: Sequence[Case], peers: tuple[str, ...], rounds: int, timer: Timer, report: Callable[[Row], None]
) -> list[Row]:
    """All cases, by dtype; ``report`` hears of each row as it is finished."""
    rows: list[Row] = []
    xp = accuracy.array_module()
    for dtype in dict.fromkeys(case.dtype for case in cases):
        chosen = [case for case in cases if case.dtype == dtype]
        pool = InputPool(dtype, chosen)
        for case in chosen:
            rows.append(measure_case(which, case, pool, peers, rounds, timer, xp))
            report(rows[-1])
        del pool  # one dtype's buffers at a time
    return rows


def measure_case(
    which: Pass, case: Case, pool: InputPool, peers: tuple[str, ...], rounds: int, timer: Timer, xp: Any
) -> Row:
    """Time everybody who takes the case, in turn, and compare everybody's results with float64."""
    arrays = pool.arrays(case)
    about = which.explain(case, arrays)
    taking, refusing = which.contestants(case, arrays, peers, about)
    flops = case.flops_of(which.name)
    row = Row(case, family_symbols(case, about), flops, about.hbm_bytes, about.standard_bytes)
    row.refused = {refusal.name: refusal.reason for refusal in refusing}
    results = {one.name: one.results() for one in taking}
    errors = accuracy.compare(results, which.exact(arrays, case.causal, xp, 1 if xp is np else 4), xp)
    del results
    # A short case gets up to three times the rounds: its time is the noisier one, and costs less.
    rounds *= min(3, max(1, round(4e11 / flops)))
    times = device_times({one.name: one.call for one in taking}, rounds, timer)
    for name, spread in times.items():
        row.results[name] = Result(spread, flops / spread.median / 1e9, errors[name])
    return row


def has_two_families(about: Explanation) -> bool:
    """Whether the device has Ampere-style kernels beside those that the call takes."""
    return about.kernel is not None and not about.kernel.family.endswith("_sm80")


def family_symbols(case: Case, about: Explanation) -> dict[str, str]:
    """The kernel that a call takes, and the Ampere-style one where that is another."""
    if about.kernel is None:
        return {}
    symbols = {OURS: about.kernel.symbol}
    if has_two_families(about):
        assert about.device is not None
        problem = replace(case.problem(about.device.arch), task=about.kernel.problem.task)
        symbols[OURS_SM80] = kernels.symbol(problem, kernels.select_config(problem))
    return symbols


def describe_row(row: Row) -> str:
    """One line for the progress display."""
    speeds = "  ".join(f"{name} {result.tflops:.0f}" for name, result in row.results.items())
    return f"{row.case}: {speeds} TFLOP/s"


def kernel_jobs(which: Pass, cases: Iterable[Case], arch: str) -> list[Job]:
    """(problem, config) of every kernel that the cases need on a device that ``arch`` names."""
    problems = {problem for case in cases for problem in which.problems(case, arch)}
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


def ratio_to_fastest(row: dict[str, Any]) -> float | None:
    """How many times faster than the fastest peer of a row cuflash is; None without one."""
    ratios = [ratio(row, name) for name in row["results"] if not name.startswith(OURS)]
    return min((value for value in ratios if value is not None), default=None)


def derived_ratio(row: dict[str, Any], which: PassName, device: str) -> float | None:
    """Cuflash's multiple of the best public kernel, through cuDNN, which both were timed beside; None if unknown."""
    case, over_cudnn = row["case"], ratio(row, "cudnn")
    if over_cudnn is None or not is_main(row):
        return None
    best = published.best_over_cudnn(which, device, case["head_dim"], case["causal"], case["seqlen"])
    return over_cudnn / best if best else None
