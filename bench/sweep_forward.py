"""Tuning: checks kernel configs of one head dim against float64 and times them, in turn, beside torch's flash backend.

    python bench/sweep_forward.py 128 --causal block_n=48 block_n=80,q_registers=4 ctas=1,warps=8,block_m=256

Each CONFIG overrides fields of the tuning table's row, which always takes part as ``table``; ``--configs-file FILE``
reads a JSON list of such objects instead. With ``--compile-only`` nothing runs and no GPU is needed: the kernels go to
the ``--kernels`` directory, from which a later run takes them.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cuflash import jit, kernels
from cuflash.arch import ARCHES, arch_for
from cuflash.bench.accuracy import array_module, errors
from cuflash.bench.inputs import Case, InputPool, numpy_dtype, poison
from cuflash.bench.measure import CupyTimer, Spread, device_times
from cuflash.bench.peers import Refusal, torch_available, torch_peer
from cuflash.build import Built, build
from cuflash.cache import cache_key, load_prebuilt
from cuflash.checks import make_request
from cuflash.cli.problems import parse_override, widest_access
from cuflash.config import KernelConfig
from cuflash.problem import AttentionProblem

ODD_LENGTHS = ((1000, 777), (130, 77), (77, 130))
"""Nq, Nk of the small checks: partial tiles on both axes, and dead rows under a causal mask."""


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("head_dim", type=int)
    parser.add_argument("configs", nargs="*", type=parse_override, metavar="CONFIG")
    parser.add_argument("--configs-file", type=Path, metavar="FILE", help="JSON list of objects of overrides")
    parser.add_argument("--head-dim-v", type=int)
    parser.add_argument("--causal", action="store_true")
    parser.add_argument("--dtype", choices=("bfloat16", "float16"), default="bfloat16")
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 4096])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--kernels", type=Path, metavar="DIR", help="keep compiled kernels here between runs")
    parser.add_argument("--compile-only", action="store_true")
    parser.add_argument("--arch", help="compile target; default: the device's")
    parser.add_argument("-j", "--workers", type=int)
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="append one JSON line per config and length")
    return parser.parse_intermixed_args()


def problem_of(args: argparse.Namespace, arch: str) -> AttentionProblem:
    head_dim_v = args.head_dim_v or args.head_dim
    return AttentionProblem(
        head_dim=args.head_dim,
        head_dim_v=head_dim_v,
        dtype=args.dtype,
        mask="causal" if args.causal else "full",
        access_bytes=widest_access(args.head_dim, head_dim_v),
        scale_first=False,
        arch=arch,
    )


def candidates(problem: AttentionProblem, overrides: list[dict[str, int]]) -> dict[str, KernelConfig]:
    """The table's config and its variants, by name; equal ones once."""
    table = kernels.select_config(problem)
    named = {"table": table}
    for override in overrides:
        config = dataclasses.replace(table, **override)
        if config not in named.values():
            named[",".join(f"{k}={v}" for k, v in override.items())] = config
    return named


class Contender:
    """One compiled config, ready to be launched."""

    def __init__(self, problem: AttentionProblem, config: KernelConfig, root: Path) -> None:
        from cuflash import driver

        compiled = load_prebuilt(root, cache_key(problem, config))
        if compiled is None:
            raise LookupError(f"{kernels.symbol(problem, config)} is not in {root}")
        device = driver.current_device()
        kernel = driver.load_kernel(compiled, config.smem_bytes(problem), device)
        self.loaded = jit.LoadedKernel(kernel, problem, config, compiled, "prebuilt")

    def prepare(self, q: Any, k: Any, v: Any, out: Any) -> Callable[[], object]:
        """A launch on (batch, seq, heads, dim) arrays, bottom-right causal, through a plan of the product's own."""
        problem, device = self.loaded.problem, self.loaded.kernel.device
        request = make_request(
            (q, k, v), out, causal=problem.mask == "causal", scale=None, layout="bshd", return_lse=False
        )
        jit._loaded[problem, device] = self.loaded  # instead of what the tuning table would choose
        plan = jit.make_plan(request)
        if plan.loaded is not self.loaded:
            raise LookupError(f"the call needs {plan.loaded and plan.loaded.problem}, not {problem}")
        pointers = [array.data.ptr for array in (q, k, v, out)]
        return lambda: plan.launch(*pointers, 0, 0)


def compile_all(
    problem: AttentionProblem, named: dict[str, KernelConfig], args: argparse.Namespace
) -> dict[str, Built]:
    """Compiles what is missing and prints registers and spills; configs that do not compile or fit drop out."""
    limit = ARCHES[problem.arch].smem_per_block
    jobs = {name: (problem, config) for name, config in named.items() if config.smem_bytes(problem) <= limit}
    for name in named.keys() - jobs.keys():
        print(f"  {name}: {named[name].smem_bytes(problem)} bytes of shared memory exceed {limit}")
    by_symbol = {kernels.symbol(*job): found for job in jobs.values() if (found := prebuilt(args.kernels, *job))}
    missing = [job for job in jobs.values() if kernels.symbol(*job) not in by_symbol]
    by_symbol |= {built.symbol: built for built in build(missing, args.kernels, args.workers)}
    results = {name: by_symbol[kernels.symbol(*job)] for name, job in jobs.items()}
    for name, built in results.items():
        state = built.error or f"{built.registers} registers, {built.spill_bytes} B spilt, {built.smem_bytes} B shared"
        print(f"  {name:<40} {built.seconds:5.2f} s  {state}", flush=True)
    return {name: built for name, built in results.items() if not built.error}


def prebuilt(root: Path, problem: AttentionProblem, config: KernelConfig) -> Built | None:
    """A kernel of an earlier run or another machine, whatever NVRTC made it."""
    compiled = load_prebuilt(root, cache_key(problem, config))
    return Built.of(problem, config, compiled, cached=True) if compiled else None


def check(contender: Contender, dtype: str, xp: Any) -> tuple[float, float]:
    """Worst relative and absolute error over odd shapes, with ordinary keys and with keys that grow to the front."""
    import cupy
    import numpy as np

    rng = np.random.default_rng(1)
    worst = (0.0, 0.0)
    d, dv = contender.loaded.problem.head_dim, contender.loaded.problem.head_dim_v
    for seqlen_q, seqlen_k in ((1024, 1024), *ODD_LENGTHS):
        for growth in (1.0, 30.0):
            grow = np.geomspace(growth, 1.0, seqlen_k)[:, None, None]
            sizes = ((seqlen_q, d), (seqlen_k, d), (seqlen_k, dv))
            host = [rng.standard_normal((2, length, 3, width)) for length, width in sizes]
            host[1] *= grow
            q, k, v = (cupy.asarray(a.astype(numpy_dtype(dtype))) for a in host)
            out = cupy.empty((2, seqlen_q, 3, dv), dtype=v.dtype)
            poison(out)
            contender.prepare(q, k, v, out)()
            error = errors({"out": out}, [q, k, v], contender.loaded.problem.mask == "causal", xp)["out"]
            worst = (worst_of(worst[0], error.relative), worst_of(worst[1], error.largest))
    return worst


def worst_of(a: float, b: float) -> float:
    """The larger one; NaN is the worst of all."""
    return b if not b <= a else a


def time_length(contenders: dict[str, Contender], case: Case, pool: InputPool, rounds: int) -> dict[str, Spread]:
    """Every contender and torch's flash backend, in turn, on one shape."""
    arrays = pool.arrays(case.shape)
    calls = {name: contender.prepare(*arrays) for name, contender in contenders.items()}
    if torch_available():
        peer = torch_peer("flash", case, arrays)
        if isinstance(peer, Refusal):
            print(f"  torch flash refuses {case}: {peer.reason}")
        else:
            calls["flash"] = peer.call
    return device_times(calls, rounds, CupyTimer())


def main() -> int:
    args = arguments()
    overrides = args.configs + (json.loads(args.configs_file.read_text()) if args.configs_file else [])
    arch = args.arch
    if arch is None:
        from cuflash import driver

        arch = arch_for(driver.device_compute_capability(0)).name
    with tempfile.TemporaryDirectory() as scratch:
        args.kernels = args.kernels or Path(scratch)
        problem = problem_of(args, arch)
        named = candidates(problem, overrides)
        print(f"{problem}\ntable: {named['table'].label}", flush=True)
        built = compile_all(problem, named, args)
        if not args.compile_only:
            run(problem, {name: named[name] for name in built}, args)
    return 0


def run(problem: AttentionProblem, named: dict[str, KernelConfig], args: argparse.Namespace) -> None:
    import cupy

    cupy.zeros(1)  # makes the device's context current
    contenders = {name: Contender(problem, config, args.kernels) for name, config in named.items()}
    xp = array_module()
    checked = {}
    for name, contender in contenders.items():
        checked[name] = check(contender, args.dtype, xp)
        print(f"  {name:<40} error {checked[name][0]:.2e} relative, {checked[name][1]:.2e} largest", flush=True)
    if problem.head_dim != problem.head_dim_v:
        raise SystemExit("timing needs equal head dims: this was only a check")
    pool = InputPool(args.dtype)
    cases = [Case.of(args.head_dim, args.causal, n, args.dtype) for n in args.lengths]
    times = {case.seqlen: time_length(contenders, case, pool, args.rounds) for case in cases}
    report(cases, times)
    if args.output:
        append(args.output, problem, named, cases, times, checked)


def report(cases: list[Case], times: dict[int, dict[str, Spread]]) -> None:
    names = list(times[cases[0].seqlen])
    print(f"\nTFLOP/s (spread %), and the multiple of torch's flash; N = {', '.join(str(c.seqlen) for c in cases)}")
    for name in names:
        cells = []
        for case in cases:
            spread, flash = times[case.seqlen][name], times[case.seqlen].get("flash")
            ratio = f" x{flash.median / spread.median:.3f}" if flash else ""
            cells.append(f"{case.tflops(spread.median):6.1f} ({100 * spread.relative_iqr:3.1f}){ratio}")
        print(f"  {name:<40} " + "   ".join(cells), flush=True)


def append(
    path: Path,
    problem: AttentionProblem,
    named: dict[str, KernelConfig],
    cases: list[Case],
    times: dict[int, dict[str, Spread]],
    checked: dict[str, tuple[float, float]],
) -> None:
    with path.open("a") as file:
        for case in cases:
            for name, spread in times[case.seqlen].items():
                row = {"name": name, **dataclasses.asdict(problem), "seqlen": case.seqlen, **dataclasses.asdict(spread)}
                row |= {"tflops": case.tflops(spread.median)}
                if name in named:
                    row |= {"config": dataclasses.asdict(named[name]), "relative_error": checked[name][0]}
                file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    sys.exit(main())
