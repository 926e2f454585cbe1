"""Measure speed and accuracy on this GPU, beside torch's attention where torch is installed.

cuflash bench --quick
cuflash bench --output results/            a record (JSON), a report (Markdown) and pictures
cuflash bench --record results/forward.json --output results/     report and pictures of an earlier record
"""

from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path

from .screen import Screen


def configure(parser: argparse.ArgumentParser) -> None:
    from ..bench.runner import PARTS

    parser.add_argument("--quick", action="store_true", help="a few cases: seconds instead of minutes")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--rounds", type=int, metavar="N", help="rounds of the forward table")
    parser.add_argument("--output", type=Path, metavar="DIR", help="write record, report and pictures there")
    parser.add_argument("--record", type=Path, metavar="FILE", help="measure nothing: show this record")
    parser.add_argument("--commit", metavar="TEXT", help="names the commit in the record where git cannot")


def run(args: argparse.Namespace, screen: Screen) -> int:
    from ..bench import report, runner

    if args.rounds is not None and args.rounds < 1:
        raise ValueError(f"--rounds is {args.rounds}; accepted is 1 or more")
    if args.record:
        record = runner.load(args.record)
    else:
        require_gpu()
        record = runner.measure(runner.Plan(args.quick, tuple(args.parts), args.rounds, args.commit), screen)
    text = report.markdown(record)
    if args.output:
        paths = [runner.save(record, args.output)] if not args.record else []
        paths.append(args.output / "forward.md")
        args.output.mkdir(parents=True, exist_ok=True)
        paths[-1].write_text(text, encoding="utf-8")
        paths += draw(record, args.output, screen)
        for path in paths:
            screen.line(f"wrote {path}")
    else:
        screen.markdown(text)
    return 0


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
    from ..errors import DriverError

    try:
        count = driver.device_count()
    except DriverError as error:
        raise DriverError(f"the benchmark needs a GPU: {error}") from error
    if not count:
        raise DriverError("the benchmark needs a GPU, and the driver reports none")
    if importlib.util.find_spec("cupy") is None:
        raise ImportError("the benchmark needs CuPy: pip install 'cuflash[cuda12]' or 'cuflash[cuda13]'")


def draw(record: dict[str, object], folder: Path, screen: Screen) -> list[Path]:
    """The pictures, if matplotlib is there."""
    if importlib.util.find_spec("matplotlib") is None:
        screen.line("no pictures: matplotlib is not installed (pip install 'cuflash[bench]')")
        return []
    from ..bench.plots import draw as draw_record

    return draw_record(record, folder)
