"""Pictures of a record, drawn from its JSON: TFLOP/s over N, and the roofline."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .peers import OURS, OURS_FIXED, OURS_SM80
from .report import TITLES, Record, Row, contestant_names
from .table import is_main

COLOURS = {
    OURS: "#d1495b",
    OURS_FIXED: "#8c2f5e",
    OURS_SM80: "#e8a0a8",
    "flash": "#2e4057",
    "cudnn": "#66a182",
    "efficient": "#c9a227",
    "flash3": "#5b5f97",
}
HEAD_DIM_COLOURS = {64: "#edae49", 128: "#d1495b", 256: "#00798c"}
GRID = "#e4e4e4"
MUTED = "#5c5c5c"


def draw(record: Record, folder: Path) -> list[Path]:
    """Write every picture that the record allows; returns their paths.

    Raises
    ------
    ImportError
        matplotlib is not installed.
    """
    import matplotlib

    matplotlib.use("Agg")
    which = record["pass"]
    rows = [row for row in record.get("speed", []) if is_main(row)]
    if not rows:
        return []
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for dtype in sorted({row["case"]["dtype"] for row in rows}):
        chosen = [row for row in rows if row["case"]["dtype"] == dtype]
        figure = speed_figure(chosen, f"{which}, {dtype}", record["environment"])
        paths.append(save(figure, folder / f"{which}_{dtype}.png"))
        if not all(row["hbm_bytes"] for row in chosen):  # gradients on the CPU
            continue
        figure = roofline_figure(chosen, f"{which}, {dtype}", record["environment"])
        paths.append(save(figure, folder / f"{which}_roofline_{dtype}.png"))
    return paths


def save(figure: Any, path: Path) -> Path:
    import matplotlib.pyplot as plt

    figure.savefig(path, dpi=150, facecolor="white")
    plt.close(figure)
    return path


def style(axes: Any) -> None:
    """Light grid behind the data, no box."""
    axes.set_axisbelow(True)
    axes.grid(True, which="major", color=GRID, linewidth=0.8)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(MUTED)
    axes.tick_params(which="both", colors=MUTED, labelsize=9, length=3)


def caption(environment: Record) -> str:
    """The small print of every picture."""
    packages = environment.get("packages", {})
    parts = [
        environment["device"],
        f"driver {environment.get('nvidia_smi', {}).get('driver_version', '?')}",
        f"NVRTC {environment['nvrtc']}",
        *([f"torch {packages['torch']}"] if "torch" in packages else []),
        environment["date"],
        f"commit {environment.get('commit') or 'unknown'}",
    ]
    return "   ·   ".join(parts)


# --- speed -----------------------------------------------------------------------------------------------------


def speed_figure(rows: Sequence[Row], title: str, environment: Record) -> Any:
    """A panel for each head dim and mask: TFLOP/s over N, the quartiles as a band."""
    import matplotlib.pyplot as plt

    head_dims = sorted({row["case"]["head_dim"] for row in rows})
    masks = sorted({row["case"]["causal"] for row in rows})
    figure, panels = plt.subplots(
        len(masks), len(head_dims), figsize=(4.1 * len(head_dims) + 0.6, 3.3 * len(masks) + 1.3),
        sharex=True, sharey=True, squeeze=False, layout="constrained",
    )  # fmt: skip
    for line, causal in zip(panels, masks, strict=True):
        for axes, head_dim in zip(line, head_dims, strict=True):
            chosen = [r for r in rows if (r["case"]["head_dim"], r["case"]["causal"]) == (head_dim, causal)]
            speed_panel(axes, sorted(chosen, key=lambda row: row["case"]["seqlen"]))
            axes.set_title(f"d = {head_dim}, {'causal' if causal else 'full'}", fontsize=11, loc="left")
    for axes in panels[-1]:
        axes.set_xlabel("sequence length N   (B · N = 16384)", color=MUTED, fontsize=9)
    for axes in panels[:, 0]:
        axes.set_ylabel("TFLOP/s", color=MUTED, fontsize=9, labelpad=6)
        axes.set_ylim(bottom=0)
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.suptitle(f"Attention {title}", fontsize=14, x=0.01, ha="left", weight="bold")
    figure.legend(
        handles[::-1], labels[::-1], loc="outside upper right", ncols=len(labels), frameon=False, fontsize=8.5,
        handlelength=1.3, columnspacing=1.1, handletextpad=0.5,
    )  # fmt: skip
    figure.supxlabel(caption(environment), fontsize=8, color=MUTED, x=0.01, ha="left")
    return figure


def speed_panel(axes: Any, rows: Sequence[Row]) -> None:
    style(axes)
    for name in reversed(contestant_names(list(rows))):  # cuflash last: on top
        found = [row for row in rows if name in row["results"]]
        lengths = [row["case"]["seqlen"] for row in found]
        results = [row["results"][name] for row in found]
        # Speed is inverse to time: the slow quartile of the times is the low one of the speeds.
        scaled = [(r["tflops"] * r["milliseconds"]["median"], r["milliseconds"]) for r in results]
        low, high = [work / ms["q3"] for work, ms in scaled], [work / ms["q1"] for work, ms in scaled]
        ours = name == OURS
        axes.fill_between(lengths, low, high, color=COLOURS[name], alpha=0.18, linewidth=0)
        axes.plot(
            lengths, [r["tflops"] for r in results], label=TITLES[name], color=COLOURS[name],
            linewidth=2.4 if ours else 1.5, marker="o", markersize=5 if ours else 3.5, zorder=3 if ours else 2,
        )  # fmt: skip
    axes.set_xscale("log", base=2)
    lengths = sorted({row["case"]["seqlen"] for row in rows})
    axes.set_xticks(lengths, [f"{n // 1024}k" if n >= 1024 else str(n) for n in lengths])
    axes.minorticks_off()


# --- roofline --------------------------------------------------------------------------------------------------


def roofline_figure(rows: Sequence[Row], title: str, environment: Record) -> Any:
    """Speed over predicted arithmetic intensity, under the roofs of the device.

    Hollow marks on the memory roof: the most that attention could reach which keeps the N x N matrix in memory.
    """
    import matplotlib.pyplot as plt

    bandwidth = environment["bandwidth_gb_s"] * 1e9
    peak = environment["peak_tflops"] * 1e12
    figure, axes = plt.subplots(figsize=(9.2, 5.8), layout="constrained")
    style(axes)
    roofs(axes, peak, bandwidth, max(row["case_flops"] / row["hbm_bytes"] for row in rows))
    for head_dim in sorted({row["case"]["head_dim"] for row in rows}):
        for causal in (False, True):
            chosen = [r for r in rows if (r["case"]["head_dim"], r["case"]["causal"]) == (head_dim, causal)]
            roofline_series(axes, sorted(chosen, key=lambda r: r["case"]["seqlen"]), head_dim, bandwidth)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    axes.set_xlabel("arithmetic intensity (FLOP per byte of device memory, predicted)", color=MUTED, fontsize=9)
    axes.set_ylabel("TFLOP/s", color=MUTED, fontsize=9)
    axes.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
    axes.set_yticks(ticks := [y for y in (10, 20, 50, 100, 200, 500, 1000, 2000) if low < y < high], map(str, ticks))
    axes.minorticks_off()
    hollow = axes.plot([], [], color=MUTED, marker="o", linestyle="none", markerfacecolor="white")[0]
    hollow.set_label("with the N x N matrix in memory, at most")
    axes.legend(loc="lower right", frameon=False, fontsize=9)
    figure.suptitle(f"Roofline, attention {title}", fontsize=14, x=0.01, ha="left", weight="bold")
    figure.supxlabel(caption(environment), fontsize=8, color=MUTED, x=0.01, ha="left")
    return figure


def roofs(axes: Any, peak: float, bandwidth: float, right: float) -> None:
    """The memory roof up to the ridge, the tensor roof behind it, both labelled on the line."""
    ridge, left, right = peak / bandwidth, 8.0, 2 * right
    line = {"color": "#222222", "linewidth": 1.6, "zorder": 1}
    axes.plot([left, ridge], [left * bandwidth / 1e12, peak / 1e12], **line)
    axes.plot([ridge, right], [peak / 1e12] * 2, **line)
    axes.set_xlim(left, right)
    axes.set_ylim(left * bandwidth / 1e12, 2 * peak / 1e12)
    note = {"fontsize": 9, "color": "#222222"}
    axes.annotate(
        f"tensor cores {peak / 1e12:.0f} TFLOP/s", (right, peak / 1e12), (-4, 5), textcoords="offset points",
        ha="right", **note,
    )  # fmt: skip
    middle = (left * ridge) ** 0.5
    axes.annotate(
        f"memory {bandwidth / 1e12:.1f} TB/s", (middle, middle * bandwidth / 1e12), (-8, 6), textcoords="offset points",
        ha="right", **note,
    )  # fmt: skip


def roofline_series(axes: Any, rows: Sequence[Row], head_dim: int, bandwidth: float) -> None:
    """One head dim and mask: cuflash's measured points over N, and what a stored matrix would allow."""
    if not rows or OURS not in rows[0]["results"]:
        return
    causal = rows[0]["case"]["causal"]
    colour = HEAD_DIM_COLOURS.get(head_dim, MUTED)
    fused = [row["case_flops"] / row["hbm_bytes"] for row in rows]
    axes.plot(
        fused, [row["results"][OURS]["tflops"] for row in rows], color=colour, marker="^" if causal else "o",
        markersize=6, linewidth=1.4, linestyle="--" if causal else "-", zorder=3,
        label=f"cuflash d = {head_dim}, {'causal' if causal else 'full'}",
    )  # fmt: skip
    standard = [row["case_flops"] / row["standard_bytes"] for row in rows]
    axes.plot(
        standard, [x * bandwidth / 1e12 for x in standard], color=colour, marker="^" if causal else "o", markersize=6,
        linestyle="none", markerfacecolor="white", zorder=3,
    )  # fmt: skip
