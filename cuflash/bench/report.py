"""Markdown tables, drawn from the record alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from itertools import groupby
from typing import Any

from . import published
from .peers import OURS, OURS_FIXED, OURS_SM80
from .table import PassName, derived_ratio, is_grouped, is_main, ratio, ratio_to_fastest

TITLES = {
    OURS: "cuflash",
    OURS_FIXED: "cuflash deterministic",
    OURS_SM80: "cuflash sm80",
    "flash": "torch flash (FA2)",
    "cudnn": "torch cuDNN",
    "efficient": "torch efficient",
    "flash3": "FlashAttention-3",
}
FAMILIES = (OURS, OURS_SM80)
RATIOS = ((OURS, "flash"), (OURS, "cudnn"), (OURS, "flash3"), (OURS_SM80, "flash"), (OURS_FIXED, OURS))
"""Whose multiples of whom the tables show."""
FLOPS = {
    "forward": "2 B H N² (D + Dv)",
    "backward": "2 B H N² (3 D + 2 Dv), 2.5 times the forward pass's where D = Dv",
}
FASTEST = "fastest of the peers"
DERIVED = "best public kernel (derived through cuDNN)"

Record = dict[str, Any]
Row = dict[str, Any]


def markdown(record: Record) -> str:
    """The whole report of a record."""
    which, environment = record["pass"], record["environment"]
    parts = [f"# {which.capitalize()} benchmark: {environment['device']}", environment_text(environment)]
    if rows := record.get("speed"):
        device = environment["device"]
        parts += [summary_text(rows, which, device), *speed_tables(rows, which, device)]
        parts += [other_dims_text(rows), grouped_text(rows), accuracy_text(rows)]
    if record.get("host"):
        parts.append(host_text(record["host"], which))
    if record.get("startup"):
        parts.append(startup_text(record["startup"]))
    if record.get("memory"):
        parts.append((memory_text if which == "forward" else long_text)(record["memory"]))
    return "\n\n".join(part for part in parts if part) + "\n"


def table(columns: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    columns = list(columns)
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    lines += ["| " + " | ".join(str(cell) for cell in row) + " |" for row in rows]
    return "\n".join(lines)


def environment_text(environment: Record) -> str:
    """One paragraph: when, where, with what."""
    packages = environment.get("packages", {})
    facts = [
        environment["date"],
        f"commit {environment.get('commit') or 'unknown'}",
        *(device_facts(environment) if "device" in environment else ["no device"]),
        f"NVRTC {environment['nvrtc']}",
        *(f"{name} {version}" for name, version in packages.items() if name.startswith(("cupy", "torch"))),
    ]
    if environment.get("cudnn"):
        number = environment["cudnn"]
        facts.append(f"cuDNN {number // 10000}.{number // 100 % 100}.{number % 100}")
    return "; ".join(facts) + "."


def device_facts(environment: Record) -> list[str]:
    """Name, driver, size and clocks."""
    loaded = environment.get("nvidia_smi_under_load", {})
    clocks = f"SM clock {environment['clock_mhz']:.0f} MHz at most"
    if loaded.get("clocks.sm"):
        clocks += f", {loaded['clocks.sm']} MHz at {loaded['power.draw']} W under load"
    return [
        environment["device"],
        f"driver {environment.get('nvidia_smi', {}).get('driver_version', 'unknown')}",
        f"{environment['multiprocessors']} SMs, {clocks}",
    ]


def groups(rows: list[Row]) -> list[tuple[tuple[str, int, bool], list[Row]]]:
    """Rows by (dtype, head dim, causal), in order."""

    def key(row: Row) -> tuple[str, int, bool]:
        case = row["case"]
        return case["dtype"], case["head_dim"], case["causal"]

    return [(which, list(group)) for which, group in groupby(sorted(rows, key=key), key)]


def contestant_names(rows: list[Row]) -> list[str]:
    """Who appears in some row, cuflash first."""
    return [name for name in TITLES if any(name in row["results"] for row in rows)]


def speed_tables(rows: list[Row], which: PassName, device: str) -> list[str]:
    """TFLOP/s over N, one table per dtype, head dim and mask."""
    chosen = [row for row in rows if is_main(row)]
    intro = (
        "## Speed\n\nTFLOP/s: medians of device-event times, everybody in turn, round by round, in one process; in "
        f"parentheses the interquartile range in per cent where it exceeds 2. FLOPs = {FLOPS[which]}, half for "
        "causal; B N = 16384, H D = 2048, layout (B, N, H, D)."
    )
    if which == "backward":
        intro += (
            " The whole backward pass, from the output and the LSE on, results allocated (FlashAttention-3's are there "
            "already): torch.autograd.grad with the graph kept, for torch's backends."
        )
    if any(OURS_SM80 in row["results"] for row in rows):
        intro += " cuflash is what a call takes; cuflash sm80 is the Ampere-style family on the same device."
    if any(derived_ratio(row, which, device) for row in chosen):
        intro += (
            "\n\n*Derived* rows were not measured here: cuflash / cuDNN of this run, over the best public kernel / "
            f"cuDNN of another run, which was {published.SOURCE}. The float16 tables divide by the same figures."
        )
    parts = [intro]
    for (dtype, head_dim, causal), group in groups(chosen):
        title = f"### {dtype}, d = {head_dim}, {'causal' if causal else 'full'}"
        parts.append(f"{title}\n\n{table_over_lengths(group, which, device)}")
    return parts


def table_over_lengths(rows: list[Row], which: PassName, device: str) -> str:
    """Everybody's speed, and who is how many times as fast as whom, a column for each length."""
    rows = sorted(rows, key=lambda row: row["case"]["seqlen"])
    body = [[TITLES[name], *(speed_cell(row, name) for row in rows)] for name in contestant_names(rows)]
    for name, peer in RATIOS:
        ratios = [ratio(row, peer, name) for row in rows]
        if any(ratios):
            body.append([f"**{name} / {peer}**", *map(ratio_cell, ratios)])
    if len([name for name in contestant_names(rows) if not name.startswith(OURS)]) > 1:
        body.append([f"**cuflash / {FASTEST}**", *(ratio_cell(ratio_to_fastest(row)) for row in rows)])
    derived = [derived_ratio(row, which, device) for row in rows]
    if any(derived):
        body.append(["*cuflash / best public, derived through cuDNN*", *map(ratio_cell, derived)])
    return table(["", *(str(row["case"]["seqlen"]) for row in rows)], body)


def speed_cell(row: Row, name: str) -> str:
    result = row["results"].get(name)
    if result is None:
        return "-"
    spread = result["milliseconds"]
    iqr = 100 * (spread["q3"] - spread["q1"]) / spread["median"]
    return f"{result['tflops']:.0f}" + (f" ({iqr:.0f})" if iqr > 2 else "")


def ratio_cell(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def geometric_mean(values: list[float]) -> float:
    return math.exp(sum(math.log(value) for value in values) / len(values))


def summary_text(rows: list[Row], which: PassName, device: str) -> str:
    """Least and geometric mean multiple of each peer."""
    main, grouped = [row for row in rows if is_main(row)], [row for row in rows if is_grouped(row)]
    body = [
        *summary_lines(main, OURS, "64, 128, 256"),
        *parted_lines(main, FASTEST, ratio_to_fastest),
        *parted_lines(main, DERIVED, lambda row: derived_ratio(row, which, device)),
        *summary_lines(main, OURS_SM80, "64, 128, 256"),
        *fixed_lines(main),
        *summary_lines(grouped, OURS, "128, grouped heads"),
    ]
    columns = ["", "times as fast as", "head dims", "geometric mean", "least", "where", "cases"]
    return "## Summary\n\n" + table(columns, body) if body else ""


def summary_lines(rows: list[Row], name: str, part: str) -> list[list[object]]:
    """One of cuflash's families against each peer."""
    peers = [peer for peer in contestant_names(rows) if peer not in (*FAMILIES, OURS_FIXED)]
    lines = []
    for peer in peers:
        lines += summary_line((TITLES[name], TITLES[peer], part), [(ratio(row, peer, name), row) for row in rows])
    return lines


def fixed_lines(rows: list[Row]) -> list[list[object]]:
    """The deterministic mode against the default, by mask."""
    lines = []
    for part, causal in (("64, 128, 256, full", False), ("64, 128, 256, causal", True)):
        chosen = [row for row in rows if row["case"]["causal"] == causal]
        ratios = [(ratio(row, OURS, OURS_FIXED), row) for row in chosen]
        lines += summary_line((TITLES[OURS_FIXED], TITLES[OURS], part), ratios)
    return lines


def parted_lines(rows: list[Row], peer: str, ratio_of: Callable[[Row], float | None]) -> list[list[object]]:
    """Cuflash against whoever is the fastest, by parts of the table."""
    lines = []
    for part, head_dims, lengths in (
        ("64, 128; N up to 8192", (64, 128), range(8193)),
        ("64, 128; N = 16384", (64, 128), (16384,)),
        ("256", (256,), range(16385)),
    ):
        chosen = [r for r in rows if r["case"]["head_dim"] in head_dims and r["case"]["seqlen"] in lengths]
        lines += summary_line((TITLES[OURS], peer, part), [(ratio_of(row), row) for row in chosen])
    return lines


def summary_line(title: tuple[str, ...], ratios: list[tuple[float | None, Row]]) -> list[list[object]]:
    """One line, or none without a ratio."""
    found = [(value, row) for value, row in ratios if value is not None]
    if not found:
        return []
    least, where = min(found, key=lambda pair: pair[0])
    mean = geometric_mean([value for value, _ in found])
    return [[*title, f"{mean:.2f}", f"{least:.2f}", case_name(where["case"]), len(found)]]


def case_name(case: Row) -> str:
    return f"{case['dtype']} d{case['head_dim']} {'causal' if case['causal'] else 'full'} N {case['seqlen']}"


def dims_name(case: Row) -> str:
    """``192`` or ``192/128``."""
    return str(case["head_dim"]) + (f"/{case['head_dim_v']}" if case["head_dim_v"] != case["head_dim"] else "")


def other_dims_text(rows: list[Row]) -> str:
    """The other head dims, one table per dtype."""
    parts = []
    others = [row for row in rows if not is_main(row) and not is_grouped(row)]
    for dtype in sorted({row["case"]["dtype"] for row in others}):
        chosen = [row for row in others if row["case"]["dtype"] == dtype]
        names = contestant_names(chosen)
        shown = [(name, peer) for name, peer in RATIOS if any(ratio(row, peer, name) for row in chosen)]
        body = []
        for row in chosen:
            label = f"{dims_name(row['case'])} {'causal' if row['case']['causal'] else 'full'}"
            ratios = [ratio_cell(ratio(row, peer, name)) for name, peer in shown]
            body.append([label, *(speed_cell(row, n) for n in names), *ratios])
        columns = ["head dim", *(TITLES[name] for name in names), *(f"{name} / {peer}" for name, peer in shown)]
        parts.append(f"### {dtype}, N = {chosen[0]['case']['seqlen']}\n\n{table(columns, body)}")
    return "## Other head dims (TFLOP/s)\n\n" + "\n\n".join(parts) if parts else ""


def grouped_text(rows: list[Row]) -> str:
    """The cases with fewer heads of K and V."""
    chosen = [row for row in rows if is_grouped(row)]
    if not chosen:
        return ""
    case = chosen[0]["case"]
    heads = f"{case['heads']} query heads over {case['heads_k']}, d = {case['head_dim']}"
    intro = (
        f"## Grouped heads (TFLOP/s)\n\n{case['dtype']}, {'causal' if case['causal'] else 'full'}, B {case['batch']}, "
        f"{heads}. Everybody gets the same K and V; torch's backends with enable_gqa."
    )
    return f"{intro}\n\n{table_over_lengths(chosen, 'forward', '')}"


def accuracy_text(rows: list[Row]) -> str:
    """Error against float64 per dtype, head dim and result: the worst over masks and lengths, and that over flash's."""
    names = contestant_names(rows)
    ours = [name for name in FAMILIES if name in names]
    body = []

    def key(row: Row) -> tuple[str, int, int, bool]:
        return row["case"]["dtype"], row["case"]["head_dim"], row["case"]["head_dim_v"], is_grouped(row)

    for (dtype, *_, grouped), group in group_by(rows, key):
        label = f"{dtype} d{dims_name(group[0]['case'])}{', grouped heads' if grouped else ''}"
        for result in judged_results(group):
            cells = [label if result == "out" else f"{label}, {result}"]
            cells += [worst_error(group, name, result) for name in names]
            cells += [worst_ratio(group, name, result, measure) for name in ours for measure in ("relative", "largest")]
            body.append(cells)
    columns = ["", *(TITLES[name] for name in names)]
    columns += [f"{name} / flash, {measure}" for name in ours for measure in ("relative", "largest")]
    intro = (
        "## Error against float64\n\nRelative Frobenius norm on sampled heads, worst of all masks and lengths; the "
        "last columns are the worst single case of an error divided by that of torch's flash backend, for the relative "
        "and for the largest absolute one."
    )
    return f"{intro}\n\n{table(columns, body)}" if body else ""


def judged_results(rows: list[Row]) -> list[str]:
    """What was compared with float64."""
    return list(dict.fromkeys(name for row in rows for made in row["results"].values() for name in made["errors"]))


def group_by(rows: list[Row], key: Callable[[Row], Any]) -> list[tuple[Any, list[Row]]]:
    return [(which, list(group)) for which, group in groupby(sorted(rows, key=key), key)]


def error_of(row: Row, name: str, result: str, measure: str) -> float | None:
    found = row["results"].get(name, {}).get("errors", {}).get(result)
    return float(found[measure]) if found else None


def worst_error(rows: list[Row], name: str, result: str) -> str:
    values = [value for row in rows if (value := error_of(row, name, result, "relative")) is not None]
    return f"{max(values):.2e}" if values else "-"


def worst_ratio(rows: list[Row], name: str, result: str, measure: str) -> str:
    pairs = [(error_of(row, name, result, measure), error_of(row, "flash", result, measure)) for row in rows]
    ratios = [ours / flash for ours, flash in pairs if ours is not None and flash]
    return f"{max(ratios):.2f}" if ratios else "-"


def host_text(host: Row, which: PassName) -> str:
    """Host time per call, and as a multiple of the faster SDPA call."""
    sdpa = [value["median"] for name, value in host.items() if name.startswith("torch SDPA")]
    body = []
    for name, value in host.items():
        multiple = f"{value['median'] / min(sdpa):.2f}" if sdpa else "-"
        body.append([name, f"{value['median']:.2f}", f"{value['q1']:.2f} - {value['q3']:.2f}", multiple])
    what = {"forward": ("one call", "no_grad"), "backward": ("forward and backward", "with autograd where torch is")}
    title, mode = what[which]
    intro = f"## Host time of {title}\n\nB 1, N 128, H 8, D 64, float16, {mode}; medians over batches of 200 calls."
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


def long_text(calls: list[Row]) -> str:
    """Peak device memory over the length, and the errors of the longest call."""
    body = []
    for call, before in zip(calls, [None, *calls], strict=False):
        beyond = call["peak"] - call["inputs"] - call["results"]
        growth = f"{call['peak'] / before['peak']:.3f}" if before else "-"
        body.append([call["case"], call["inputs"], call["results"], beyond, call["peak"], growth])
    columns = ["case", "q, k, v, dO", "O, LSE, dQ, dK, dV", "beyond", "peak", "times the row before"]
    parts = [f"## Device memory of forward and backward\n\nBytes, bfloat16, full.\n\n{table(columns, body)}"]
    for call in calls:
        if call["errors"]:
            rows = [[name, f"{e['relative']:.2e}", f"{e['largest']:.2e}"] for name, e in call["errors"].items()]
            intro = f"Error against float64 of {call['case']}, all rows and keys of its first and last head:"
            parts.append(f"{intro}\n\n{table(['', 'relative', 'largest'], rows)}")
    return "\n\n".join(parts)
