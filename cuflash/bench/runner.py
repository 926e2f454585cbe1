"""The benchmark as a whole: what is measured in a pass, in which order, and where it is written."""

from __future__ import annotations

import dataclasses
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..cli.screen import Screen
from . import environment, overhead, table, training
from .backward import BACKWARD
from .forward import FORWARD
from .inputs import Case, InputPool
from .measure import CupyTimer, Timer
from .peers import known_peers
from .startup import measure_startup

SCHEMA = 3
PASSES = {which.name: which for which in (FORWARD, BACKWARD)}
PARTS = {"forward": ("speed", "host", "memory", "startup"), "backward": ("speed", "host", "memory")}
MEMORY_SHAPES = (((1, 128, 8, 64), False), ((4, 4096, 16, 128), True))

Record = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Plan:
    """What a run of the benchmark does in one pass.

    Attributes
    ----------
    which : Pass
    quick : bool
        A few cases and rounds: seconds instead of minutes.
    parts : tuple of str
        Out of those in ``PARTS``.
    rounds : int or None
        Rounds of the table; None: those of the pass, or 7 when quick.
    commit : str or None
        Names the commit in the record where git cannot tell.
    """

    which: table.Pass
    quick: bool
    parts: tuple[str, ...]
    rounds: int | None = None
    commit: str | None = None

    @property
    def table_rounds(self) -> int:
        return self.rounds or (7 if self.quick else self.which.rounds)

    @property
    def cases(self) -> tuple[Case, ...]:
        return self.which.quick_cases if self.quick else self.which.cases


def measure(plan: Plan, screen: Screen, timer: Timer | None = None) -> Record:
    """Run the parts of a plan on the current device and return the record, JSON types only."""
    from .. import driver

    started = time.perf_counter()
    timer = timer or CupyTimer()
    record: Record = {
        "schema": SCHEMA, "pass": plan.which.name, "environment": environment.describe(driver.current_device()),
    }  # fmt: skip
    if plan.commit:
        record["environment"]["commit"] = plan.commit
    measure_host = {"forward": overhead.measure_host, "backward": training.measure_host}[plan.which.name]
    steps: dict[str, Callable[[], Any]] = {
        "speed": lambda: speed_part(plan, timer, screen, record["environment"]),
        "host": lambda: plain(measure_host(timer, batches=10 if plan.quick else 25)),
        "memory": {"forward": memory_part, "backward": long_part}[plan.which.name],
        "startup": lambda: plain(measure_startup(*((1, 3) if plan.quick else (3, 7)))),
    }
    for part in plan.parts:
        title = f"{plan.which.name}: {part}"
        screen.heading(title)
        record[part] = steps[part]()
        screen.line(f"{title}: done after {time.perf_counter() - started:.0f} s")
    record["seconds"] = round(time.perf_counter() - started, 1)
    return record


def speed_part(plan: Plan, timer: Timer, screen: Screen, found: dict[str, Any]) -> list[Record]:
    """Compile what is missing, in processes; then time every case."""
    compile_kernels(plan.which, plan.cases, screen)
    with screen.progress(f"{plan.which.name} table", len(plan.cases)) as advance:
        rows = table.measure_table(
            plan.which,
            plan.cases,
            known_peers(),
            plan.table_rounds,
            timer,
            lambda row: advance(table.describe_row(row)),
        )
    found["nvidia_smi_under_load"] = clocks_under_load(timer)
    return [plain(row) for row in rows]


def compile_kernels(which: table.Pass, cases: Iterable[Case], screen: Screen) -> None:
    """Fill the disk cache, so that the table does not wait for one kernel after the other."""
    from .. import driver, jit
    from ..build import build
    from ..settings import read_settings

    settings = read_settings()
    if settings.cache_dir is None or not settings.cache_bytes or not settings.jit:
        return
    target = jit.device_arch(driver.current_device()).name
    jobs = [job for job in table.kernel_jobs(which, cases, target) if jit.find_code(*job, settings) is None]
    if not jobs:
        return
    with screen.progress("kernels", len(jobs)) as advance:
        for built in build(jobs, settings.cache_dir, max_bytes=settings.cache_bytes):
            advance(f"{built.symbol}: {'cached' if built.cached else f'{built.seconds:.1f} s'}{built.error}")


def clocks_under_load(timer: Timer) -> dict[str, str]:
    """What nvidia-smi reads while the device works through a second and a half of queued calls."""
    import cuflash

    case = Case.of(128, False, 4096, "bfloat16")
    q, k, v, out = InputPool(case.dtype, [case]).arrays(case)
    cuflash.attention(q, k, v, out=out)
    start = timer.record()
    for _ in range(20):
        cuflash.attention(q, k, v, out=out)
    stop = timer.record()
    timer.synchronize()
    for _ in range(min(1000, int(20 * 1500 / max(1.0, timer.elapsed_ms(start, stop))))):
        cuflash.attention(q, k, v, out=out)
    seen = environment.smi(0)
    timer.synchronize()
    return seen


def memory_part() -> list[Record]:
    """Allocations of a call, per shape."""
    found = []
    for shape, causal in MEMORY_SHAPES:
        label = "B{} N{} H{} D{}".format(*shape) + (" causal" if causal else "")
        found.append({"case": label, **plain(overhead.measure_memory(shape, causal))})
    return found


def long_part() -> list[Record]:
    """Peak memory over the length."""
    return [plain(call) for call in training.measure_long_calls()]


def plain(value: Any) -> Any:
    """Dataclasses as dictionaries, all the way down."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    if isinstance(value, dict):
        return {name: plain(item) for name, item in value.items()}
    return value


def save(record: Record, folder: Path) -> Path:
    """Write ``forward.json`` or ``backward.json`` in one step; returns its path."""
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / f"{record['pass']}.json"
    descriptor, name = tempfile.mkstemp(dir=folder, suffix=".json")
    with os.fdopen(descriptor, "w") as file:
        json.dump(record, file, indent=1)
        file.write("\n")
    os.chmod(name, 0o644)
    os.replace(name, target)
    return target


def load(path: Path) -> Record:
    """Read a record.

    Raises
    ------
    ValueError
        The file is no record of this schema.
    """
    try:
        record = json.loads(path.read_bytes())
    except ValueError:
        record = None
    if not isinstance(record, dict) or record.get("schema") != SCHEMA:
        raise ValueError(f"{path} is no benchmark record of schema {SCHEMA}")
    return record
