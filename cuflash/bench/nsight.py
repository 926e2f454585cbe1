"""Metrics of kernel launches by Nsight Compute (``ncu``), for the scripts in ``bench/``."""

from __future__ import annotations

import csv
import io
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

ANNOUNCED = "launch "


class Launch(NamedTuple):
    """What was announced about a launch, and its metrics by name."""

    about: Any
    metrics: dict[str, float]


def announce(about: Any) -> None:
    """In the profiled process: say what the next launch of a cuflash kernel is, in JSON's types."""
    print(ANNOUNCED + json.dumps(about), flush=True)


def profile(
    script: str, metrics: Sequence[str], options: Sequence[str] = (), environment: Mapping[str, str] | None = None
) -> list[Launch]:
    """Run ``script --launch`` under the profiler, which empties the caches before each launch.

    Parameters
    ----------
    script : str
        It must `announce` each launch of a cuflash kernel.
    metrics : sequence of str
    options : sequence of str
        Of ``ncu``.
    environment : mapping, optional
        Variables on top of this process's.

    Raises
    ------
    SystemExit
        The profiler or the script failed; the message has the end of what they said.
    """
    command = ["ncu", "--csv", "--print-units", "base", "--metrics", ",".join(metrics), *options]
    command += ["-k", "regex:cuflash_", sys.executable, script, "--launch"]
    full = {**os.environ, **(environment or {})}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=full)
    if done.returncode:
        raise SystemExit(f"ncu failed:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    return parse(done.stdout)


def parse(text: str) -> list[Launch]:
    """Announcements and the profiler's table, both in the order of the launches, which must be as many."""
    lines = text.splitlines()
    announced = [json.loads(line.removeprefix(ANNOUNCED)) for line in lines if line.startswith(ANNOUNCED)]
    start = next(i for i, line in enumerate(lines) if line.startswith('"ID"'))
    measured: dict[str, dict[str, float]] = {}
    for row in csv.DictReader(io.StringIO("\n".join(line for line in lines[start:] if line.startswith('"')))):
        measured.setdefault(row["ID"], {})[row["Metric Name"]] = float(row["Metric Value"].replace(",", ""))
    return [Launch(about, metrics) for about, metrics in zip(announced, measured.values(), strict=True)]
