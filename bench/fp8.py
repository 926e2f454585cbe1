"""Attention of 8-bit operands: speed beside bfloat16, what quantizing costs, and accuracy on the inputs.

    python bench/fp8.py [-o bench/results/fp8.md]

A script of its own beside ``cuflash bench``, whose inputs are all of 16 bits. Inputs, turns and medians as there; the
accuracy is that of some queries of some heads, since the error of a row does not depend on how many there are.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import cuflash
from cuflash.bench import accuracy, environment
from cuflash.bench.inputs import Case, InputPool, numpy_dtype
from cuflash.bench.measure import Call, CupyTimer, device_times
from cuflash.bench.peers import Contestant, torch_peer
from cuflash.bench.report import environment_text, table
from cuflash.build import build
from cuflash.settings import read_settings

HEAD_DIMS = (64, 128, 256)
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
ROUNDS = 12
QUERIES = 1024
Host = np.ndarray[Any, Any]


# --- speed -----------------------------------------------------------------------------------------------------


def compile_ahead(cases: list[Case], pool: InputPool) -> None:
    """All kernels into the cache, in processes."""
    jobs = {}
    for case in cases:
        *inputs, _ = pool.arrays(case)
        for options in (
            {}, {"precision": "fp8"}, {"precision": "fp8", "out_dtype": "float16"}, {"precision": "fp8-fast"},
        ):  # fmt: skip
            explained = cuflash.explain(*inputs, causal=case.causal, **options)  # type: ignore[arg-type]
            jobs.update({kernel.problem: kernel.config for kernel in explained.kernels})
    if (root := read_settings().cache_dir) is not None:
        for built in build(list(jobs.items()), root):
            if built.error:
                raise RuntimeError(f"{built.symbol}: {built.error}")


def contestants(case: Case, arrays: list[Any]) -> dict[str, Call]:
    """Everybody's call on the same numbers."""
    q, k, v, out = arrays
    quantized = cuflash.quantize_qkv(q, k, v)
    options: dict[str, Any] = {"causal": case.causal, "out": out}
    calls: dict[str, Call] = {
        "kernel": lambda: cuflash.attention(*quantized, **options),
        "quantize": lambda: cuflash.quantize_qkv(q, k, v),
        "rotate": lambda: cuflash.quantize_qkv(q, k, v, hadamard=True),
        "whole": lambda: cuflash.attention(q, k, v, precision="fp8", **options),
        "bf16": lambda: cuflash.attention(q, k, v, **options),
        # Not right behind "kernel", which leaves a part of the same operands in the L2 cache.
        "fast": lambda: cuflash.attention(*quantized, precision="fp8-fast", **options),
    }
    cudnn = torch_peer("cudnn", case, arrays)
    return calls | ({"cudnn": cudnn.call} if isinstance(cudnn, Contestant) else {})


SPEED_HEAD = [
    "d", "mask", "N", "fp8 kernel", "fast kernel", "fp8 whole call", "bf16", "cuDNN bf16", "kernel / bf16",
    "whole / bf16", "kernel / cuDNN bf16", "fast kernel / cuDNN bf16", "quantizing, us", "with hadamard, us",
]  # fmt: skip


def speed() -> list[list[object]]:
    """A line of the table for each case."""
    cases = [Case.of(d, causal, n, "bfloat16") for d, causal, n in product(HEAD_DIMS, (False, True), LENGTHS)]
    pool = InputPool("bfloat16", cases)
    compile_ahead(cases, pool)
    lines: list[list[object]] = []
    for case in cases:
        calls = contestants(case, pool.arrays(case))
        times = {name: spread.median for name, spread in device_times(calls, ROUNDS, CupyTimer()).items()}
        rates = [f"{case.tflops(times[name]):.0f}" for name in ("kernel", "fast", "whole", "bf16")]
        rates.append(f"{case.tflops(times['cudnn']):.0f}" if "cudnn" in times else "-")
        ratios = [f"{times['bf16'] / times[name]:.2f}" for name in ("kernel", "whole")]
        ratios += [f"{times['cudnn'] / times[name]:.2f}" if "cudnn" in times else "-" for name in ("kernel", "fast")]
        microseconds = [f"{1e3 * times[name]:.0f}" for name in ("quantize", "rotate")]
        lines.append([case.head_dim, "causal" if case.causal else "full", case.seqlen, *rates, *ratios, *microseconds])
    return lines


# --- accuracy --------------------------------------------------------------------------------------------------


class Inputs(NamedTuple):
    """Some queries, and all keys and values, of a few heads.

    Biases are relative to ``size``, the mean magnitude of V's means, and to that of the output where they are 0.
    """

    name: str
    keys: int
    heads: int
    dim: int
    size: float
    change: Callable[[list[Host], np.random.Generator], list[Host]]


def unchanged(arrays: list[Host], rng: np.random.Generator) -> list[Host]:
    return arrays


def with_outliers(arrays: list[Host], rng: np.random.Generator) -> list[Host]:
    """N(0, 1) + N(0, 100) * Bernoulli(0.001)."""
    return [x + 10 * rng.standard_normal(x.shape, np.float32) * (rng.random(x.shape) < 1e-3) for x in arrays]


def with_constant_channels(arrays: list[Host], rng: np.random.Generator) -> list[Host]:
    q, k, v = arrays
    k[..., [3, 17, 40, 60]] += 30
    return [q, k, v]


def with_mean(arrays: list[Host], rng: np.random.Generator) -> list[Host]:
    q, k, v = arrays
    return [q, k, v + np.float32(1)]


def with_drift(arrays: list[Host], rng: np.random.Generator) -> list[Host]:
    q, k, v = arrays
    return [q, k, v + np.linspace(-1, 1, v.shape[1], dtype=np.float32)[None, :, None, None]]


CASES = (
    Inputs("N(0, 1)", 4096, 8, 128, 0.0, unchanged),
    Inputs("outliers of the FlashAttention-3 paper", 4096, 8, 128, 0.0, with_outliers),
    Inputs("four channels of K at +30", 4096, 8, 128, 0.0, with_constant_channels),
    *(Inputs("V with mean 1", keys, 8 if keys == 4096 else 2, 128, 1.0, with_mean) for keys in (4096, 16384, 65536)),
    Inputs("V from mean -1 to 1", 65536, 2, 128, 0.5, with_drift),
    *(Inputs("V with mean 1", keys, 4, dim, 1.0, with_mean) for dim, keys in product((64, 256), (4096, 16384))),
    *(Inputs("V from mean -1 to 1", 65536, 2, dim, 0.5, with_drift) for dim in (64, 256)),
)
ACCURACY_HEAD = ["inputs", "d", "N", "fp8", "fp8, hadamard", "fp8, not centred", "bf16"]


def accuracies() -> list[list[object]]:
    """RMSE and bias of each kind of inputs."""
    import cupy

    rng, xp = np.random.default_rng(0), accuracy.array_module()
    lines: list[list[object]] = []
    for case in CASES:
        shapes = [(1, n, case.heads, case.dim) for n in (QUERIES, case.keys, case.keys)]
        drawn = case.change([rng.standard_normal(shape, np.float32) for shape in shapes], rng)
        arrays = [cupy.asarray(x.astype(numpy_dtype("bfloat16"))) for x in drawn]
        outputs = [cuflash.attention(*arrays, precision="fp8", out_dtype="float16")]
        for hadamard, center in ((True, True), (False, False)):
            quantized = cuflash.quantize_qkv(*arrays, hadamard=hadamard, center=center)
            outputs.append(cuflash.attention(*quantized, out_dtype="float16"))
        outputs.append(cuflash.attention(*arrays))
        exact = list(accuracy.exact_outputs(arrays, False, xp, case.heads))
        lines.append([case.name, case.dim, case.keys, *(_errors(output, exact, case.size, xp) for output in outputs)])
    return lines


def _errors(output: Any, exact: list[accuracy.Exact], size: float, xp: Any) -> str:
    """RMSE, and the mean error relative to a magnitude, as text."""
    squares = total = magnitude = 0.0
    for one in exact:
        difference = accuracy.to_float64(accuracy.to_module(output[one.batch, :, one.head], xp)) - one.values
        squares += float((difference**2).mean())
        total += float(difference.mean())
        magnitude += float(abs(one.values).mean())
    return f"{(squares / len(exact)) ** 0.5:.2e} ({total / (size * len(exact) or magnitude):+.2%})"


# --- report ----------------------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--commit", help="where the tree is a copy without its history")
    parser.add_argument("-o", "--output", type=Path)
    args = parser.parse_args()
    about = environment.describe(0)
    about["commit"] = args.commit or about.get("commit")
    text = f"""# Attention of 8-bit operands

{environment_text(about)}

## Speed, TFLOP/s

16384 tokens, 2048 columns. "Kernel": on operands that are quantized already, "fast kernel": with
`precision="fp8-fast"`; "whole call": `precision="fp8"` on bfloat16 inputs, quantizing included. Ratios are of times:
above 1, 8 bits are faster.

{table(SPEED_HEAD, speed())}

## Accuracy

RMSE against float64 on the bfloat16 inputs, and in brackets the mean error, relative to the magnitude of V's mean (0.5
where it drifts), or of the result where V has none; {QUERIES} queries, float16 results (bfloat16 in the last column,
whose rounding is most of the error there where results are near 1).

{table(ACCURACY_HEAD, accuracies())}
"""
    print(text)
    if args.output:
        args.output.write_text(text)


if __name__ == "__main__":
    main()
