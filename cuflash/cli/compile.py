"""Compile kernels ahead: into the disk cache, or into a directory for machines without NVRTC.

    cuflash compile --all                            every kernel that is shipped, for this machine's GPU
    cuflash compile --all --arch sm_80 sm_90 --prebuilt kernels/        sm_90: Hopper kernels and Ampere-style ones
    cuflash compile --head-dim 128 --causal          one kernel

A directory filled with --prebuilt is named by CUFLASH_PREBUILT_DIR where it is used.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path

from ..arch import ARCHES
from ..build import UNBOUNDED, Built, Job, build
from .problems import add_problem_options, default_arch, problem_from
from .screen import Screen


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--all", action="store_true", help="every shipped kernel")
    parser.add_argument(
        "--arch", nargs="+", choices=tuple(ARCHES), metavar="ARCH",
        help=f"out of {', '.join(ARCHES)}; default: the GPU's, sm_90 without one; sm_90 stands for all kernels that "
        "a GPU of compute capability 9.0 takes, sm_90a for those that load by TMA alone",
    )  # fmt: skip
    parser.add_argument("--prebuilt", type=Path, metavar="DIR", help="fill this directory instead of the cache")
    parser.add_argument("-j", "--jobs", type=int, metavar="N", help="processes; default: one for each core")
    add_problem_options(parser.add_argument_group("one kernel (without --all)"))


def run(args: argparse.Namespace, screen: Screen) -> int:
    if args.jobs is not None and args.jobs < 1:
        raise ValueError(f"--jobs is {args.jobs}; accepted is 1 or more")
    root, limit = destination(args.prebuilt)
    jobs = kernel_jobs(args)
    finished: list[Built] = []
    with screen.progress(f"compiling into {root}", len(jobs)) as advance:
        for built in build(jobs, root, args.jobs, limit):
            finished.append(built)
            advance(describe(built))
    return report(finished, root, screen)


def destination(prebuilt: Path | None) -> tuple[Path, int]:
    """The directory to fill and its size limit."""
    from ..settings import read_settings

    if prebuilt is not None:
        return prebuilt.expanduser().absolute(), UNBOUNDED
    settings = read_settings()
    if settings.cache_dir is None or not settings.cache_bytes:
        raise ValueError(
            "there is no disk cache to fill (no home directory, or CUFLASH_CACHE_SIZE=0): name a directory with "
            "--prebuilt DIR, or the cache with CUFLASH_CACHE_DIR"
        )
    return settings.cache_dir, settings.cache_bytes


def kernel_jobs(args: argparse.Namespace) -> list[Job]:
    """The kernels that the options name, the longest compilations first."""
    from .. import kernels

    named = args.arch or [default_arch()]
    if args.all:
        found = [
            p for arch in named for target in kernels.device_targets(arch) for p in kernels.shipped_problems(target)
        ]
    else:
        asked = [problem_from(args, arch) for arch in named]
        found = [
            replace(p, arch=target) for p in asked for target in kernels.device_targets(p.arch, p.access_bytes, p.task)
        ]
        if args.short:  # of a device's families those that have such a variant; where none has, select_config says so
            variants = [p for p in found if p in kernels.variants_by_length(replace(p, short=False))]
            found = variants or found
        if args.input_dtype:
            found = [p for p in found if p.arch in kernels.TMA_TARGETS.values()] or found
    problems = list(dict.fromkeys(found))  # sm_90 and sm_90a name some kernels twice
    problems.sort(key=lambda problem: -(problem.head_dim + problem.head_dim_v))
    return [(problem, kernels.select_config(problem)) for problem in problems]


def describe(built: Built) -> str:
    """One kernel in the progress display."""
    if built.error:
        return f"{built.arch} {built.symbol}: FAILED"
    state = "cached" if built.cached else f"{built.seconds:.1f} s"
    spills = f", {built.spill_bytes} bytes spilt" if built.spill_bytes else ""
    return f"{built.arch} {built.symbol}: {state}, {built.registers} registers{spills}"


def report(finished: list[Built], root: Path, screen: Screen) -> int:
    """Totals, and what went wrong; the exit status."""
    failed = [built for built in finished if built.error]
    fresh = [built for built in finished if not built.error and not built.cached]
    screen.line(
        f"{len(fresh)} compiled in {sum(built.seconds for built in fresh):.1f} s of CPU, "
        f"{len(finished) - len(fresh) - len(failed)} there before, {len(failed)} failed"
    )
    if spilling := [built for built in finished if built.spill_bytes]:
        screen.line(f"{len(spilling)} spill registers:")
        screen.table(["kernel", "target", "bytes"], [[b.symbol, b.arch, b.spill_bytes] for b in spilling])
    for built in failed:
        print(f"cuflash: error: {built.symbol} for {built.arch}: {built.error}", file=sys.stderr)
    lost = sum(1 for built in finished if not built.error and not built.kept)
    if lost:
        print(f"cuflash: error: {lost} kernels could not be kept: {root} cannot be written", file=sys.stderr)
    return 1 if failed or lost else 0
