"""The IO claim, tested: device-memory bytes by Nsight Compute beside those that ``cuflash.explain`` predicts.

    python bench/traffic.py [-o bench/results/traffic.md]

Nsight Compute empties the caches before each launch. The sizes have K and V of all heads below and above the L2
cache, and at d = 256 those of a single head.
"""

from __future__ import annotations

import argparse
import csv
import io
import subprocess
import sys
from pathlib import Path

METRICS = ("dram__bytes_read.sum", "dram__bytes_write.sum")
CASES = tuple(
    (head_dim, causal, batch, seqlen, heads)
    for head_dim in (64, 128, 256)
    for causal in (False, True)
    for batch, seqlen, heads in (
        (4, 4096, 2048 // head_dim),
        (1, 16384, 2048 // head_dim),
        (1, 131072, 256 // head_dim),
    )
)


def launch_all() -> None:
    """Each case once; the part that runs under the profiler."""
    import cupy as cp
    import ml_dtypes

    import cuflash

    for head_dim, causal, batch, seqlen, heads in CASES:
        shape = (batch, seqlen, heads, head_dim)
        bits = cp.random.randint(0x3C00, 0x4000, shape, dtype=cp.uint16)  # bf16 values from 0.0078 to 2
        x = bits.view(ml_dtypes.bfloat16)
        explained = cuflash.explain(x, x.copy(), x.copy(), causal=causal)
        print("predicted", explained.hbm_bytes, flush=True)
        cuflash.attention(x, x.copy(), x.copy(), causal=causal)
        cp.cuda.Device().synchronize()


def profile() -> tuple[list[int], list[int]]:
    """(predicted, measured) bytes of every case."""
    command = ["ncu", "--csv", "--metrics", ",".join(METRICS), "--print-units", "base", "-k", "regex:cuflash_"]
    done = subprocess.run([*command, sys.executable, __file__, "--launch"], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"ncu failed:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    lines = done.stdout.splitlines()
    predicted = [int(line.split()[1]) for line in lines if line.startswith("predicted")]
    start = next(i for i, line in enumerate(lines) if line.startswith('"ID"'))
    measured: dict[str, int] = {}
    for row in csv.DictReader(io.StringIO("\n".join(line for line in lines[start:] if line.startswith('"')))):
        value = int(float(row["Metric Value"].replace(",", "")))
        measured[row["ID"]] = measured.get(row["ID"], 0) + value
    return predicted, list(measured.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--launch", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("-o", "--output", type=Path)
    args = parser.parse_args()
    if args.launch:
        return launch_all()
    rows = [
        "| d | mask | B | N | H | predicted MB | measured MB | measured / predicted |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for case, predicted, measured in zip(CASES, *profile(), strict=True):
        head_dim, causal, batch, seqlen, heads = case
        mask = "causal" if causal else "full"
        sizes = f"{predicted / 1e6:.1f} | {measured / 1e6:.1f} | {measured / predicted:.2f}"
        rows.append(f"| {head_dim} | {mask} | {batch} | {seqlen} | {heads} | {sizes} |")
    text = "\n".join(["# Device-memory traffic of one forward launch, bf16", "", *rows, ""])
    print(text)
    if args.output:
        args.output.write_text(text)


if __name__ == "__main__":
    main()
