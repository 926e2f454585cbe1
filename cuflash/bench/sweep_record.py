"""What a sweep found, for people and for programs: the table, and the record."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..build import Built
from . import report
from .inputs import TOKENS, WIDTH, Case

if TYPE_CHECKING:
    from .sweep import Sweep


def legend(found: Sweep) -> str:
    """What the table's rows and cells are."""
    text = f"{found.table} is the tuning table's"
    if not found.times:
        return text
    return (
        f"{text}; TFLOP/s with B N = {TOKENS} and H D = {WIDTH}, in parentheses the interquartile range in per cent; "
        "error: the worst relative one against float64 of all checks"
    )


def table_of(found: Sweep) -> tuple[list[str], list[list[object]]]:
    """The columns, and a row for each config, the fastest first, then one for each peer."""
    ran = [case for case in found.cases if case.seqlen in found.times]
    columns = ["config", "registers", "spilt", "shared", "compiled in", *(["error"] if ran else [])]
    columns += [f"N {case.seqlen}" for case in ran]
    rows: list[list[object]] = []
    for name in (name for name in found.by_speed if name in found.runnable):
        built = found.built[name]
        cells = [name, built.registers, built.spill_bytes, built.smem_bytes, f"{built.seconds:.1f} s"]
        if ran:
            missing = "-" if name in found.right else "wrong"
            cells += [f"{found.checked[name].relative:.2e}", *(speed_cell(found, name, case, missing) for case in ran)]
        rows.append(cells)
    for name in dict.fromkeys(name for times in found.times.values() for name in times if name not in found.configs):
        rows.append([f"torch {name}", "", "", "", "", "", *(speed_cell(found, name, case, "-") for case in ran)])
    return columns, rows


def failures(found: Sweep) -> list[str]:
    """A line for each config that does not compile or fit."""
    return [f"{name}: {built_text(built)}" for name, built in found.built.items() if built.error]


def built_text(built: Built) -> str:
    """A config's numbers in a line, or the first line of what went wrong."""
    if built.error:
        return built.error.strip().splitlines()[0]
    return f"{built.registers} registers, {built.spill_bytes} bytes spilt, {built.seconds:.1f} s"


def speed_cell(found: Sweep, name: str, case: Case, missing: str) -> str:
    spread = found.times.get(case.seqlen, {}).get(name)
    return f"{case.tflops(spread.median):.0f} ({100 * spread.relative_iqr:.0f})" if spread else missing


def markdown(found: Sweep) -> str:
    """The table as a document."""
    columns, rows = table_of(found)
    where = report.environment_text(found.environment)
    parts = [f"# {found.stem}", where, f"{legend(found)}.", report.table(columns, rows)]
    if failures(found):
        parts.append("\n".join(f"- {line}" for line in failures(found)))
    return "\n\n".join(parts) + "\n"


def lines(found: Sweep) -> Iterator[dict[str, Any]]:
    """The record: what was tried where, then each config and peer at each length (once where it was not timed)."""
    yield {"sweep": asdict(found.problem), "table": found.table, "environment": found.environment}
    for name, config in found.configs.items():
        row = {"name": name, "config": asdict(config), "built": asdict(found.built[name])}
        if name in found.checked:
            row["error"] = found.checked[name]._asdict()
        timed = [
            row | timed_fields(found, name, case) for case in found.cases if name in found.times.get(case.seqlen, {})
        ]
        yield from timed or [row]
    for case in found.cases:
        for name in found.times.get(case.seqlen, {}):
            if name not in found.configs:
                yield {"name": name, **timed_fields(found, name, case)}


def timed_fields(found: Sweep, name: str, case: Case) -> dict[str, Any]:
    spread = found.times[case.seqlen][name]
    return {"case": asdict(case), "milliseconds": asdict(spread), "tflops": case.tflops(spread.median)}


def save(found: Sweep, folder: Path) -> list[Path]:
    """Write the record and the table; returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{found.stem}.jsonl", folder / f"{found.stem}.md"]
    paths[0].write_text("".join(json.dumps(line) + "\n" for line in lines(found)), encoding="utf-8")
    paths[1].write_text(markdown(found), encoding="utf-8")
    return paths
