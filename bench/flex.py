"""cuflash beside torch's FlexAttention, compiled, with a causal block mask; head dim 128, bfloat16.

    python bench/flex.py [-o bench/results/flex.md]

A script of its own, because FlexAttention needs torch's compiler, which takes half a minute. Inputs, turns and medians
as in ``cuflash bench``.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from cuflash.bench import accuracy, environment
from cuflash.bench.inputs import Case, InputPool
from cuflash.bench.measure import CupyTimer, device_times
from cuflash.bench.peers import OURS, Contestant, ours, torch_peer
from cuflash.bench.report import environment_text, table

LENGTHS = (1024, 4096, 16384)
FLEX = "torch FlexAttention"
ROUNDS = 20


def sees(batch: Any, head: Any, query: Any, key: Any) -> Any:
    """The causal mask, as FlexAttention takes it."""
    return query >= key


def flex(case: Case, arrays: list[Any]) -> Contestant:
    """``flex_attention`` compiled for the case, on the same memory; its block mask is made beforehand."""
    import cupy
    import torch
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    q, k, v = (torch.from_dlpack(array).transpose(1, 2) for array in arrays[:3])
    mask = create_block_mask(sees, None, None, case.seqlen, case.seqlen, device="cuda")
    compiled = torch.compile(flex_attention)

    def call() -> Any:
        with torch.no_grad():
            return compiled(q, k, v, block_mask=mask)

    return Contestant(FLEX, call, lambda: {"out": cupy.from_dlpack(call().transpose(1, 2).float())})


def measure() -> list[list[object]]:
    """A line of the table for each length."""
    cases = [Case.of(128, True, seqlen, "bfloat16") for seqlen in LENGTHS]
    pool, xp = InputPool("bfloat16", cases), accuracy.array_module()
    lines: list[list[object]] = []
    for case in cases:
        arrays = pool.arrays(case)
        cudnn = torch_peer("cudnn", case, arrays)
        taking = [ours(case, arrays), flex(case, arrays)] + ([cudnn] if isinstance(cudnn, Contestant) else [])
        errors = accuracy.errors({one.name: one.results()["out"] for one in taking}, arrays[:3], True, xp)
        times = device_times({one.name: one.call for one in taking}, ROUNDS, CupyTimer())
        ratio = times[FLEX].median / times[OURS].median
        cells = [f"{case.tflops(times[one.name].median):.0f}" if one.name in times else "-" for one in taking]
        cells += ["-"] * (3 - len(taking))
        lines.append([case.seqlen, *cells, f"{ratio:.2f}", f"{errors[OURS].relative / errors[FLEX].relative:.2f}"])
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--commit", help="where the tree is a copy without its history")
    parser.add_argument("-o", "--output", type=Path)
    args = parser.parse_args()
    head = ["N", "cuflash", "FlexAttention", "cuDNN", "cuflash / FlexAttention", "its error / FlexAttention's"]
    about = environment.describe(0)
    about["commit"] = args.commit or about.get("commit")
    text = f"# Causal attention beside FlexAttention, d 128, bf16, TFLOP/s\n\n{environment_text(about)}\n"
    text += "\n" + table(head, measure()) + "\n"
    print(text)
    if args.output:
        args.output.write_text(text)


if __name__ == "__main__":
    main()
