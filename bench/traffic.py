"""The IO claim, tested: device-memory bytes by Nsight Compute beside those that ``cuflash.explain`` predicts.

    python bench/traffic.py [-o bench/results/traffic.md]

Every kernel family of the device, forward. Nsight Compute empties the caches before each launch. K and V of all heads
exceed the L2 cache in every case; at N = 131072 those of one head come to 34, 67 and 134 MB.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from cuflash.bench import nsight

METRICS = ("dram__bytes_read.sum", "dram__bytes_write.sum")
BOUND = 0.15
"""How far a measurement may be from its prediction."""


class Case(NamedTuple):
    """One launch; bfloat16, as many heads of K and V as of Q."""

    head_dim: int
    causal: bool
    batch: int
    seqlen: int
    heads: int


CASES = tuple(
    Case(head_dim, causal, batch, seqlen, heads)
    for head_dim in (64, 128, 256)
    for causal in (False, True)
    for batch, seqlen, heads in (
        (4, 4096, 2048 // head_dim),
        (1, 16384, 2048 // head_dim),
        (1, 131072, 256 // head_dim),
    )
)


class Row(NamedTuple):
    """A case of a family, and its bytes."""

    family: str
    case: Case
    predicted: int
    measured: int

    @property
    def ratio(self) -> float:
        return self.measured / self.predicted


def launch_all() -> None:
    """Each case once for each family; the part that runs under the profiler."""
    import cupy as cp
    import ml_dtypes

    import cuflash
    from cuflash import jit, kernels

    for target in kernels.device_targets(jit.device_arch(0).name):
        family = kernels.family_of(target).name
        for case in CASES:
            shape = (case.batch, case.seqlen, case.heads, case.head_dim)
            bits = cp.random.randint(0x3C00, 0x4000, shape, dtype=cp.uint16)  # bf16 values from 0.0078 to 2
            q, k, v = (x.view(ml_dtypes.bfloat16) for x in (bits, bits.copy(), bits.copy()))
            with kernels.use_family(family):
                explained = cuflash.explain(q, k, v, causal=case.causal)
                nsight.announce([family, case, explained.hbm_bytes])
                cuflash.attention(q, k, v, causal=case.causal)
            cp.cuda.Device().synchronize()


def rows_of(launches: Iterable[nsight.Launch]) -> list[Row]:
    """Predictions beside the bytes that were read and written."""
    return [
        Row(family, Case(*case), predicted, round(sum(metrics.values())))
        for (family, case, predicted), metrics in launches
    ]


def markdown(rows: list[Row]) -> str:
    """A table for each family."""
    parts = ["# Device-memory traffic of one forward launch, bf16"]
    for family in dict.fromkeys(row.family for row in rows):
        chosen = [row for row in rows if row.family == family]
        far = sum(abs(row.ratio - 1) > BOUND for row in chosen)
        table = [
            "| d | mask | B | N | H | predicted MB | measured MB | measured / predicted |",
            "|---|---|---|---|---|---|---|---|",
        ]
        for row in chosen:
            case = row.case
            mask = "causal" if case.causal else "full"
            sizes = f"{row.predicted / 1e6:.1f} | {row.measured / 1e6:.1f} | {row.ratio:.2f}"
            table.append(f"| {case.head_dim} | {mask} | {case.batch} | {case.seqlen} | {case.heads} | {sizes} |")
        verdict = f"{far} of {len(chosen)} are more than {BOUND:.0%} from the prediction."
        parts.append(f"## {family}\n\n{verdict}\n\n" + "\n".join(table))
    return "\n\n".join(parts) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--launch", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("-o", "--output", type=Path)
    args = parser.parse_args()
    if args.launch:
        return launch_all()
    text = markdown(rows_of(nsight.profile(__file__, METRICS)))
    print(text)
    if args.output:
        args.output.write_text(text)


if __name__ == "__main__":
    main()
