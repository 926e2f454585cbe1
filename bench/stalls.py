"""Where the time of single launches goes, by Nsight Compute: cycles, tensor pipe, issue slots, stalls, clock.

    python bench/stalls.py [-o bench/results/stalls.md]

What calls of the forward pass take on this device, B N = 16384, heads x head dim 2048, bfloat16; clocks left alone,
caches emptied before each launch, of some launches that with the fewest cycles. A launch alone does not reach the power
limit: beside its clock stands the one that calls in a row run at, from their time and the same cycles.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from cuflash.bench import nsight

CYCLES = "sm__cycles_elapsed.max"
NANOSECONDS = "gpu__time_duration.sum"
TENSOR = "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed"
ISSUE = "sm__inst_issued.avg.pct_of_peak_sustained_elapsed"
STALLS = (
    "barrier", "branch_resolving", "gmma", "long_scoreboard", "math_pipe_throttle", "mio_throttle", "not_selected",
    "short_scoreboard", "sleeping", "wait",
)  # fmt: skip
LAUNCHES = 3
CALLS = 40
"""In a row, timed as a whole, for the clock under load."""


def stall(reason: str) -> str:
    """The metric: how many warps wait for this reason, whenever an instruction is issued."""
    return f"smsp__average_warps_issue_stalled_{reason}_per_issue_active.ratio"


class Case(NamedTuple):
    """One call."""

    head_dim: int
    causal: bool
    seqlen: int


CASES = tuple(
    Case(d, causal, n) for d in (64, 128, 256) for causal in (False, True) for n in (512, 1024, 2048, 4096, 8192, 16384)
)


def inputs(case: Case) -> tuple[object, object, object]:
    """Q, K and V."""
    import cupy as cp
    import ml_dtypes

    random = cp.random.RandomState(0)
    shape = 16384 // case.seqlen, case.seqlen, 2048 // case.head_dim, case.head_dim
    q, k, v = (random.standard_normal(shape, dtype=cp.float32).astype(ml_dtypes.bfloat16) for _ in range(3))
    return q, k, v


def launch_all() -> None:
    """Each case some times; the part that runs under the profiler."""
    import cupy as cp

    import cuflash

    for case in CASES:
        q, k, v = inputs(case)
        for _ in range(LAUNCHES):
            nsight.announce(case)
            cuflash.attention(q, k, v, causal=case.causal)
        cp.cuda.Device().synchronize()


def seconds_in_a_row() -> dict[Case, float]:
    """What a call takes where many follow each other."""
    import cupy as cp

    import cuflash

    times = {}
    for case in CASES:
        q, k, v = inputs(case)
        start, end = cp.cuda.Event(), cp.cuda.Event()
        for event in (start, end):  # the first round warms up
            for _ in range(CALLS):
                cuflash.attention(q, k, v, causal=case.causal)
            event.record()
        end.synchronize()
        times[case] = cp.cuda.get_elapsed_time(start, end) / 1000 / CALLS
    return times


def least_of(launches: Iterable[nsight.Launch]) -> dict[Case, dict[str, float]]:
    """The metrics of each case's launch with the fewest cycles."""
    least: dict[Case, dict[str, float]] = {}
    for about, metrics in launches:
        case = Case(*about)
        if case not in least or metrics[CYCLES] < least[case][CYCLES]:
            least[case] = metrics
    return least


def row(case: Case, metrics: dict[str, float], seconds: float) -> list[str]:
    """A line of the table."""
    waits = sorted(((metrics[stall(reason)], reason) for reason in STALLS), reverse=True)[:4]
    cycles = metrics[CYCLES]
    return [
        str(case.head_dim), "causal" if case.causal else "full", str(case.seqlen), f"{cycles / 1000:.0f}",
        f"{metrics[TENSOR]:.1f}", f"{metrics[ISSUE]:.1f}", f"{cycles / metrics[NANOSECONDS] * 1000:.0f}",
        f"{cycles / seconds / 1e6:.0f}", ", ".join(f"{reason} {count:.1f}" for count, reason in waits),
    ]  # fmt: skip


def markdown(profiles: dict[Case, dict[str, float]], seconds: dict[Case, float]) -> str:
    """The table, and what its columns mean."""
    head = ["d", "mask", "N", "cycles, thousands", "tensor pipe, %", "issue slots, %", "MHz", "MHz in a row", "stalls"]
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    lines += [f"| {' | '.join(row(case, metrics, seconds[case]))} |" for case, metrics in profiles.items()]
    about = (
        "Per cent are of the launch's cycles. Stalls: warps of a scheduler that wait for the reason, whenever it "
        "issues; the four largest.\n\n"
    )
    return "# Profile of forward launches\n\n" + about + "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--launch", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("-o", "--output", type=Path)
    args = parser.parse_args()
    if args.launch:
        return launch_all()
    metrics = (CYCLES, NANOSECONDS, TENSOR, ISSUE, *map(stall, STALLS))
    text = markdown(least_of(nsight.profile(__file__, metrics, ("--clock-control", "none"))), seconds_in_a_row())
    print(text)
    if args.output:
        args.output.write_text(text)


if __name__ == "__main__":
    main()
