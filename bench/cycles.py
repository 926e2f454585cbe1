"""Device cycles of one forward launch by Nsight Compute: a measure that repeats within 1-2 %, as times do not.

    python bench/cycles.py [--prebuilt DIR] [-o bench/results/cycles.md]

What a call takes on this device, B 4, N 4096, heads x head dim 2048; clocks left alone, caches emptied before each
launch, the least of some launches. With --prebuilt, the kernels of a directory, which another NVRTC may have compiled
(``cuflash compile --all --prebuilt DIR``), beside those that are compiled here.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from cuflash.bench import nsight

METRIC = "sm__cycles_elapsed.max"
LAUNCHES = 4
BOUND = 0.03
"""How far the kernels of two compilers may be apart."""


class Case(NamedTuple):
    """The kernel of one call."""

    head_dim: int
    head_dim_v: int
    causal: bool
    dtype: str


CASES = tuple(
    Case(d, dv, causal, dtype)
    for d, dv in ((32, 32), (64, 64), (96, 96), (128, 128), (160, 160), (192, 128), (192, 192), (256, 256))
    for causal in (False, True)
    for dtype in ("bfloat16", "float16")
)


def launch_all() -> None:
    """Each case some times; the part that runs under the profiler."""
    import cupy as cp
    import ml_dtypes

    import cuflash

    for case in CASES:
        heads = 2048 // case.head_dim
        random = cp.random.RandomState(0)
        q, k, v = (
            random.standard_normal((4, 4096, heads, d), dtype=cp.float32).astype(cp.float16)
            for d in (case.head_dim, case.head_dim, case.head_dim_v)
        )
        if case.dtype == "bfloat16":
            q, k, v = (x.astype(cp.float32).astype(ml_dtypes.bfloat16) for x in (q, k, v))
        for _ in range(LAUNCHES):
            nsight.announce(case)
            cuflash.attention(q, k, v, causal=case.causal)
        cp.cuda.Device().synchronize()


def profile(prebuilt: Path | None) -> dict[Case, int]:
    """Thousands of cycles of each case, with the kernels of a directory or those compiled here."""
    with tempfile.TemporaryDirectory() as empty:
        given = {"CUFLASH_PREBUILT_DIR": str(prebuilt), "CUFLASH_DISABLE_JIT": "1", "CUFLASH_CACHE_DIR": empty}
        options = ("--clock-control", "none")
        return least_of(nsight.profile(__file__, (METRIC,), options, given if prebuilt else None))


def least_of(launches: Iterable[nsight.Launch]) -> dict[Case, int]:
    """Thousands of cycles: the least of each case's launches."""
    least: dict[Case, int] = {}
    for about, metrics in launches:
        case, cycles = Case(*about), round(metrics[METRIC] / 1000)
        least[case] = min(cycles, least.get(case, cycles))
    return least


def markdown(own: dict[Case, int], other: dict[Case, int] | None) -> str:
    """A row for each head dim and mask."""
    head = ["d", "mask", "bf16", "fp16", "fp16 / bf16"]
    if other is not None:
        head += ["prebuilt bf16", "prebuilt fp16", "prebuilt / own"]
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    far = 0
    for case in own:
        if case.dtype != "bfloat16":
            continue
        half = case._replace(dtype="float16")
        dims = str(case.head_dim) if case.head_dim == case.head_dim_v else f"{case.head_dim}/{case.head_dim_v}"
        cells = [dims, "causal" if case.causal else "full", own[case], own[half], f"{own[half] / own[case]:.3f}"]
        if other is not None:
            ratios = [other[c] / own[c] for c in (case, half)]
            far += sum(abs(ratio - 1) > BOUND for ratio in ratios)
            cells += [other[case], other[half], " and ".join(f"{ratio:.3f}" for ratio in ratios)]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    verdict = "" if other is None else f"{far} of {len(own)} prebuilt kernels are more than {BOUND:.0%} apart.\n\n"
    return f"# Device cycles of one forward launch, thousands\n\n{verdict}" + "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--launch", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--prebuilt", type=Path)
    parser.add_argument("-o", "--output", type=Path)
    args = parser.parse_args()
    if args.launch:
        return launch_all()
    text = markdown(profile(None), profile(args.prebuilt) if args.prebuilt else None)
    print(text)
    if args.output:
        args.output.write_text(text)


if __name__ == "__main__":
    main()
