"""Measure speed and accuracy on this GPU, beside torch's attention where torch is installed.

    cuflash bench --quick                      the forward pass, then the backward pass
    cuflash bench --backward --output results/            of one pass a record (JSON), a report (Markdown) and pictures
    cuflash bench --record results/forward.json --output results/     report and pictures of an earlier record

With --sweep, kernel configs of one head dim are checked and timed in turn, beside that of the tuning table:

    cuflash bench --sweep 128 block_n=112 block_n=96,stages=3 --causal --lengths 1024 4096
    cuflash bench --sweep 128 block_n=48 block_n=80,q_registers=4 --family forward_sm80
    cuflash bench --sweep 72 --auto --output results/                 a grid, for a head dim without a row of its own
    cuflash bench --sweep 72 --auto --compile-only --arch sm_90 --kernels kernels/       needs no GPU
"""

from __future__ import annotations

import argparse
import importlib.util
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..arch import ARCHES
from .problems import parse_override
from .screen import Screen

if TYPE_CHECKING:
    from ..bench.runner import Plan as TablePlan
    from ..bench.sweep import Plan

TABLE_OPTIONS = ("forward", "backward", "quick", "parts", "record")
SWEEP_OPTIONS = (
    "configs", "configs_file", "auto", "head_dim_v", "causal", "dtype", "lengths", "family", "kernels", "compile_only",
    "arch", "jobs",
)  # fmt: skip


def configure(parser: argparse.ArgumentParser) -> None:
    from ..bench.runner import PARTS, PASSES

    for name in PASSES:
        parser.add_argument(f"--{name}", action="store_true", help=f"the {name} pass alone; default: both")
    parts = tuple(dict.fromkeys(part for of_pass in PARTS.values() for part in of_pass))
    parser.add_argument("--quick", action="store_true", help="a few cases: seconds instead of minutes")
    parser.add_argument("--parts", nargs="+", choices=parts, metavar="PART", help=", ".join(parts))
    parser.add_argument("--rounds", type=int, metavar="N", help="rounds of the tables, or of a sweep")
    parser.add_argument("--output", type=Path, metavar="DIR", help="write record, report and pictures there")
    parser.add_argument("--record", type=Path, metavar="FILE", help="measure nothing: show this record")
    parser.add_argument("--commit", metavar="TEXT", help="names the commit in the record where git cannot")
    configure_sweep(parser.add_argument_group("kernel configs of one head dim"))


def configure_sweep(group: argparse._ArgumentGroup) -> None:
    """What to try; without defaults, so that what was not asked for is known."""
    from ..kernels import FAMILIES

    group.add_argument("--sweep", type=int, metavar="HEAD_DIM", help="try kernel configs of this head dim")
    group.add_argument(
        "configs", nargs="*", type=parse_override, metavar="CONFIG",
        help="fields of the tuning table's config to change: block_n=96,stages=3",
    )  # fmt: skip
    group.add_argument("--configs-file", type=Path, metavar="FILE", help="a JSON list of objects of such fields")
    group.add_argument("--auto", action="store_true", help="also a grid of what shared memory and registers can hold")
    group.add_argument("--head-dim-v", type=int, metavar="DV", help="default: HEAD_DIM")
    group.add_argument("--causal", action="store_true")
    group.add_argument("--dtype", choices=("bfloat16", "float16"), help="default: bfloat16")
    group.add_argument("--lengths", type=int, nargs="+", metavar="N", help="default: 1024 4096")
    families = [name for name in FAMILIES if "fp8" not in name]  # a sweep's operands have 16 bits
    group.add_argument("--family", choices=families, help="default: that of an ordinary call")
    group.add_argument(
        "--kernels", type=Path, metavar="DIR", help="keep compiled kernels there, and take what is there"
    )
    group.add_argument("--compile-only", action="store_true", help="registers and spills; runs nothing")
    group.add_argument(
        "--arch", choices=tuple(ARCHES), metavar="ARCH", help="with --compile-only; default: the GPU's, sm_90 without"
    )
    group.add_argument("-j", "--jobs", type=int, metavar="N", help="compiling processes; default: one for each core")


def run(args: argparse.Namespace, screen: Screen) -> int:
    check_options(args)
    return run_table(args, screen) if args.sweep is None else run_sweep(args, screen)


def check_options(args: argparse.Namespace) -> None:
    """Refuse what would be ignored.

    Raises
    ------
    ValueError
    """
    for name in ("rounds", "jobs"):
        if (value := getattr(args, name)) is not None and value < 1:
            raise ValueError(f"--{name} is {value}; accepted is 1 or more")
    if args.lengths and min(args.lengths) < 1:
        raise ValueError(f"--lengths has {min(args.lengths)}; accepted is 1 or more")
    foreign, rule = (SWEEP_OPTIONS, "only with") if args.sweep is None else (TABLE_OPTIONS, "not with")
    for name in foreign:
        if getattr(args, name):
            option = "CONFIG" if name == "configs" else "--" + name.replace("_", "-")
            raise ValueError(f"{option} goes {rule} --sweep")
    if args.arch and not args.compile_only:
        raise ValueError("--arch goes only with --compile-only: what runs is compiled for the device")


def run_table(args: argparse.Namespace, screen: Screen) -> int:
    from ..bench import runner

    if args.record:
        show(runner.load(args.record), args, screen)
        return 0
    require_gpu()
    for plan in table_plans(args):
        show(runner.measure(plan, screen), args, screen)
    return 0


def table_plans(args: argparse.Namespace) -> list[TablePlan]:
    """The passes that are asked for, in turn, each with those of the parts that it has.

    Raises
    ------
    ValueError
        None of them has any.
    """
    from ..bench.runner import PARTS, PASSES, Plan

    named = [name for name in PASSES if getattr(args, name)] or list(PASSES)
    parts = {name: tuple(part for part in args.parts or PARTS[name] if part in PARTS[name]) for name in named}
    if not any(parts.values()):
        raise ValueError(f"--parts has {', '.join(args.parts)}; of the {named[0]} pass: {', '.join(PARTS[named[0]])}")
    return [
        Plan(PASSES[name], args.quick, of_pass, args.rounds, args.commit) for name, of_pass in parts.items() if of_pass
    ]


def show(record: dict[str, Any], args: argparse.Namespace, screen: Screen) -> None:
    """Print the report, or write it with the record, unless that was read, and the pictures."""
    from ..bench import report, runner

    text = report.markdown(record)
    if not args.output:
        screen.markdown(text)
        return
    paths = [runner.save(record, args.output)] if not args.record else []
    paths.append(args.output / f"{record['pass']}.md")
    args.output.mkdir(parents=True, exist_ok=True)
    paths[-1].write_text(text, encoding="utf-8")
    paths += draw(record, args.output, screen)
    for path in paths:
        screen.line(f"wrote {path}")


def run_sweep(args: argparse.Namespace, screen: Screen) -> int:
    """The exit status is 1 if the tuning table's own config fails."""
    from ..bench import sweep, sweep_record

    if not args.compile_only:
        require_gpu()
    found = sweep.sweep(sweep_plan(args), screen)
    if args.output:
        for path in sweep_record.save(found, args.output):
            screen.line(f"wrote {path}")
    return 0 if found.table in (found.runnable if args.compile_only else found.right) else 1


def sweep_plan(args: argparse.Namespace) -> Plan:
    """What the options ask for."""
    from ..bench.sweep import Plan

    listed = json.loads(args.configs_file.read_text()) if args.configs_file else []
    given = {"dtype": args.dtype, "lengths": args.lengths and tuple(args.lengths), "rounds": args.rounds}
    options: dict[str, Any] = {name: value for name, value in given.items() if value}
    return Plan(
        head_dim=args.sweep,
        head_dim_v=args.head_dim_v or args.sweep,
        causal=args.causal,
        overrides=(*args.configs, *listed),
        auto=args.auto,
        family=args.family,
        arch=args.arch,
        kernels=args.kernels,
        workers=args.jobs,
        compile_only=args.compile_only,
        commit=args.commit,
        **options,
    )


def require_gpu() -> None:
    """Say at once what is missing.

    Raises
    ------
    DriverError
        There is no driver or no device.
    ImportError
        CuPy is missing.
    """
    from .. import driver
    from ..errors import INSTALL_CUDA, DriverError

    try:
        count = driver.device_count()
    except DriverError as error:
        raise DriverError(f"the benchmark needs a GPU: {error}") from error
    if not count:
        raise DriverError("the benchmark needs a GPU, and the driver reports none")
    if importlib.util.find_spec("cupy") is None:
        raise ImportError(f"the benchmark needs CuPy: {INSTALL_CUDA}")


def draw(record: dict[str, Any], folder: Path, screen: Screen) -> list[Path]:
    """The pictures, if matplotlib is there."""
    if importlib.util.find_spec("matplotlib") is None:
        screen.line("no pictures: matplotlib is not installed (pip install matplotlib)")
        return []
    from ..bench.plots import draw as draw_record

    return draw_record(record, folder)
