"""Markdown tables, drawn from the record alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from itertools import groupby
from typing import Any

from .forward import MAIN_HEAD_DIMS, ours_against
from .peers import OURS

TITLES = {OURS: "cuflash", "flash": "torch flash (FA2)", "cudnn": "torch cuDNN", "efficient": "torch efficient"}

Record = dict[str, Any]
Row = dict[str, Any]


def markdown(record: Record) -> str:
    """The whole report of a record."""
    parts = [f"# Forward benchmark: {record['environment']['device']}", environment_text(record["environment"])]
    if rows := record.get("forward"):
        parts += [summary_text(rows), *forward_tables(rows), other_dims_text(rows), accuracy_text(rows)]
    if record.get("host"):
        parts.append(host_text(record["host"]))
    if record.get("startup"):
        parts.append(startup_text(record["startup"]))
    if record.get("memory"):
        parts.append(memory_text(record["memory"]))
    return "\n\n".join(part for part in parts if part) + "\n"


def table(columns: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    columns = list(columns)
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    lines += ["| " + " | ".join(str(cell) for cell in row) + " |" for row in rows]
    return "\n".join(lines)


def environment_text(environment: Record) -> str:
    """One paragraph: when, where, with what."""
    smi = environment.get("nvidia_smi", {})
    loaded = environment.get("nvidia_smi_under_load", {})
    packages = environment.get("packages", {})
    clocks = f"SM clock {environment['clock_mhz']:.0f} MHz at most"
    if loaded.get("clocks.sm"):
        clocks += f", {loaded['clocks.sm']} MHz at {loaded['power.draw']} W under load"
    facts = [
        environment["date"],
        f"commit {environment.get('commit') or 'unknown'}",
        f"driver {smi.get('driver_version', 'unknown')}",
        f"{environment['multiprocessors']} SMs, {clocks}",
        f"NVRTC {environment['nvrtc']}",
        *(f"{name} {version}" for name, version in packages.items() if name.startswith(("cupy", "torch"))),
    ]
    if environment.get("cudnn"):
        number = environment["cudnn"]
        facts.append(f"cuDNN {number // 10000}.{number // 100 % 100}.{number % 100}")
    return "; ".join(facts) + "."


def groups(rows: list[Row]) -> list[tuple[tuple[str, int, bool], list[Row]]]:
    """Rows by (dtype, head dim, causal), in order."""

    def key(row: Row) -> tuple[str, int, bool]:
        case = row["case"]
        return case["dtype"], case["head_dim"], case["causal"]

    return [(which, list(group)) for which, group in groupby(sorted(rows, key=key), key)]


def contestant_names(rows: list[Row]) -> list[str]:
    """Who appears in some row, cuflash first."""
    return [name for name in TITLES if any(name in row["results"] for row in rows)]


def forward_tables(rows: list[Row]) -> list[str]:
    """TFLOP/s over N, one table per dtype, head dim and mask."""
    parts = [
        "## Speed\n\nTFLOP/s: medians of device-event times, everybody in turn, round by round, in one process; in "
        "parentheses the interquartile range in per cent where it exceeds 2. FLOPs = 4 B H N² D, half for causal; "
        "B N = 16384, H D = 2048, layout (B, N, H, D)."
    ]
    for (dtype, head_dim, causal), group in groups([r for r in rows if r["case"]["head_dim"] in MAIN_HEAD_DIMS]):
        group.sort(key=lambda row: row["case"]["seqlen"])
        body = [[TITLES[name], *(speed_cell(row, name) for row in group)] for name in contestant_names(group)]
        if any(ours_against(row, "flash") for row in group):
            body.append(["**cuflash / flash**", *(ratio_cell(ours_against(row, "flash")) for row in group)])
        columns = ["", *(str(row["case"]["seqlen"]) for row in group)]
        parts.append(f"### {dtype}, d = {head_dim}, {'causal' if causal else 'full'}\n\n{table(columns, body)}")
    return parts


def speed_cell(row: Row, name: str) -> str:
    result = row["results"].get(name)
    if result is None:
        return "-"
    spread = result["milliseconds"]
    iqr = 100 * (spread["q3"] - spread["q1"]) / spread["median"]
    return f"{result['tflops']:.0f}" + (f" ({iqr:.0f})" if iqr > 2 else "")


def ratio_cell(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.2f}"


def geometric_mean(values: list[float]) -> float:
    return math.exp(sum(math.log(value) for value in values) / len(values))


def summary_text(rows: list[Row]) -> str:
    """Least and geometric mean ratio to each peer."""
    body = []
    chosen = [row for row in rows if row["case"]["head_dim"] in MAIN_HEAD_DIMS]
    for peer in contestant_names(chosen):
        ratios = [(ratio, row) for row in chosen if (ratio := ours_against(row, peer)) is not None]
        if peer == OURS or not ratios:
            continue
        least, where = min(ratios, key=lambda pair: pair[0])
        mean = geometric_mean([ratio for ratio, _ in ratios])
        body.append([TITLES[peer], f"{mean:.2f}", f"{least:.2f}", case_name(where["case"]), len(ratios)])
    if not body:
        return ""
    return "## Summary\n\nHow many times faster than each peer, head dims 64, 128 and 256:\n\n" + table(
        ["peer", "geometric mean", "least", "where", "cases"], body
    )


def case_name(case: Row) -> str:
    return f"{case['dtype']} d{case['head_dim']} {'causal' if case['causal'] else 'full'} N {case['seqlen']}"


def other_dims_text(rows: list[Row]) -> str:
    """The other head dims, one table per dtype."""
    parts = []
    others = [row for row in rows if row["case"]["head_dim"] not in MAIN_HEAD_DIMS]
    for dtype in sorted({row["case"]["dtype"] for row in others}):
        chosen = [row for row in others if row["case"]["dtype"] == dtype]
        names = contestant_names(chosen)
        body = []
        for row in chosen:
            label = f"{row['case']['head_dim']} {'causal' if row['case']['causal'] else 'full'}"
            body.append([label, *(speed_cell(row, n) for n in names), ratio_cell(ours_against(row, "flash"))])
        columns = ["head dim", *(TITLES[name] for name in names), "cuflash / flash"]
        parts.append(f"### {dtype}, N = {chosen[0]['case']['seqlen']}\n\n{table(columns, body)}")
    return "## Other head dims (TFLOP/s)\n\n" + "\n\n".join(parts) if parts else ""


def accuracy_text(rows: list[Row]) -> str:
    """Error against float64 per dtype and head dim: the worst over masks and lengths, and the worst ratio to flash."""
    names = contestant_names(rows)
    body = []
    for (dtype, head_dim), group in group_by(rows, lambda r: (r["case"]["dtype"], r["case"]["head_dim"])):
        cells: list[str] = [f"{dtype} d{head_dim}"]
        cells += [worst_error(group, name, "relative") for name in names]
        cells += [worst_ratio(group, measure) for measure in ("relative", "largest")]
        body.append(cells)
    columns = ["", *(TITLES[name] for name in names), "worst ratio to flash, relative", "largest absolute"]
    intro = (
        "## Error against float64\n\nRelative Frobenius norm on sampled heads, worst of all masks and lengths; the "
        "last two columns are the worst single case of cuflash's error divided by that of torch's flash backend."
    )
    return f"{intro}\n\n{table(columns, body)}"


def group_by(rows: list[Row], key: Callable[[Row], Any]) -> list[tuple[Any, list[Row]]]:
    return [(which, list(group)) for which, group in groupby(sorted(rows, key=key), key)]


def error_of(row: Row, name: str, measure: str) -> float | None:
    result = row["results"].get(name)
    return float(result["error"][measure]) if result and result.get("error") else None


def worst_error(rows: list[Row], name: str, measure: str) -> str:
    values = [value for row in rows if (value := error_of(row, name, measure)) is not None]
    return f"{max(values):.2e}" if values else "-"


def worst_ratio(rows: list[Row], measure: str) -> str:
    pairs = [(error_of(row, OURS, measure), error_of(row, "flash", measure)) for row in rows]
    ratios = [ours / flash for ours, flash in pairs if ours is not None and flash]
    return f"{max(ratios):.2f}" if ratios else "-"


def host_text(host: Row) -> str:
    """Host time per call, and as a multiple of the faster SDPA call."""
    sdpa = [value["median"] for name, value in host.items() if name.startswith("torch SDPA")]
    body = []
    for name, value in host.items():
        multiple = f"{value['median'] / min(sdpa):.2f}" if sdpa else "-"
        body.append([name, f"{value['median']:.2f}", f"{value['q1']:.2f} - {value['q3']:.2f}", multiple])
    intro = "## Host time of one call\n\nB 1, N 128, H 8, D 64, float16, no_grad; medians over batches of 200 calls."
    return f"{intro}\n\n{table(['call', 'us', 'quartiles', 'of the faster SDPA'], body)}"


def startup_text(startup: Row) -> str:
    """Start of a process."""
    phases = {
        "import": "`import cuflash`",
        "first_call": "first call",
        "second_call": "second call",
        "beyond_cupy": "import and first call together",
        "cupy_and_context": "(`import cupy` and the context)",
    }
    body = []
    for phase, title in phases.items():
        cells = [startup[kind].get(phase) for kind in ("cold", "warm")]
        body.append([title, *(f"{cell['median']:.1f}" if cell else "-" for cell in cells)])
    for phase, title in (
        ("import", "`import cuflash` after NumPy alone"),
        ("with_functions", "and `cuflash.attention`"),
    ):
        body.append([title, "", f"{startup['import'][phase]['median']:.1f}"])
    intro = "## Start of a process\n\nMilliseconds, with an empty kernel cache and with the kernel in it."
    return f"{intro}\n\n{table(['phase', 'empty cache', 'kernel cached'], body)}"


def memory_text(memory: list[Row]) -> str:
    """Allocations of a call."""
    body = [[m["case"], m["output"], m["requested"] - m["output"], m["lse"], m["driver"]] for m in memory]
    columns = ["case", "output", "beyond output", "an LSE would be", "growth outside the pool in 100 calls"]
    return f"## Device memory of a warm call\n\nBytes.\n\n{table(columns, body)}"
