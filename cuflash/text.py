"""How numbers and explanations read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .explanation import Explanation, Kernel


def size(count: float) -> str:
    """Bytes in binary units: ``1.5 MiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def metric(value: float, unit: str) -> str:
    """A decimal prefix and three digits: ``68.7 GFLOP``."""
    for prefix in ("", "k", "M", "G", "T", "P"):
        if abs(value) < 999.5:
            return f"{value:.3g} {prefix}{unit}"
        value /= 1000
    return f"{value:.3g} E{unit}"


def duration(seconds: float) -> str:
    """``1.23 ms`` and the like."""
    for factor, unit in ((1.0, "s"), (1e3, "ms"), (1e6, "us")):
        if seconds * factor >= 1:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds * 1e9:.3g} ns"


def aligned(items: Sequence[tuple[str, object]]) -> str:
    """Names and values in two columns; a value of several lines stays in its column."""
    width = max((len(name) for name, _ in items), default=0)
    lines = []
    for name, value in items:
        first, *others = str(value).split("\n")
        lines.append(f"  {name:<{width}}  {first}".rstrip())
        lines += [f"  {'':<{width}}  {other}".rstrip() for other in others]
    return "\n".join(lines)


def explanation_items(e: Explanation) -> list[tuple[str, str]]:
    """An explanation as names and values, in reading order; a name for each kernel, where there are several."""
    if e.refused is not None:
        return [("refused by", e.rule or ""), ("because", e.refused)]
    backend = "NumPy (CPU)" if e.backend == "numpy" else "CUDA kernel" + ("s" if len(e.kernels) > 1 else "")
    items = [("call", e.call), ("backend", backend)]
    for kernel in e.kernels:
        items += kernel_items(kernel).items()
    return [*items, *cost_items(e).items(), *([("notes", "\n".join(e.notes))] if e.notes else [])]


def cost_items(e: Explanation) -> dict[str, str]:
    """The part of an explanation that is about what a call costs."""
    items = {"operations": metric(e.flops, "FLOP")}
    if e.hbm_bytes:
        by_kernel = f" ({' + '.join(size(k.hbm_bytes) for k in e.kernels)})" if len(e.kernels) > 1 else ""
        less = f", {e.standard_bytes / e.hbm_bytes:.0f} times as much"
        items["memory traffic"] = f"{size(e.hbm_bytes)} predicted{by_kernel}"
        items["stored scores"] = f"{size(e.standard_bytes)} if the Nq x Nk matrix were kept in memory{less}"
        items["intensity"] = f"{e.arithmetic_intensity:.0f} FLOP/byte"
    if e.workspace_bytes:
        items["workspace"] = f"{size(e.workspace_bytes)}, shared by the kernels"
    if e.device and e.roofline_seconds:
        bound = "tensor cores" if e.flops / e.device.peak_flops >= e.hbm_bytes / e.device.bandwidth else "memory"
        items["roofline"] = (
            f"{duration(e.roofline_seconds)} on {e.device.name}, bound by {bound} "
            f"({e.device.peak_flops / 1e12:.0f} TFLOP/s, {e.device.bandwidth / 1e12:.2f} TB/s)"
        )
    return items


def kernel_items(kernel: Kernel) -> dict[str, str]:
    """The part of an explanation that is about a kernel."""
    config = kernel.config
    shown = [" x ".join(map(str, blocks)) for blocks in kernel.grid]
    grid = " + ".join(shown if len(shown) <= 3 else [shown[0], f"... ({len(shown)} launches)", shown[-1]])
    items = {
        "kernel": kernel.symbol,
        "family": f"{kernel.family}, compiled for {kernel.problem.arch}",
        "tile": config.summary,
        "reason": config.reason,
        "grid": f"{grid} blocks of {config.threads} threads",
        "shared memory": smem_text(kernel),
    }
    code = {
        "memory": "loaded",
        "disk": "in the disk cache",
        "prebuilt": "in the prebuilt directory",
        "compiled": "compiled now",
        "no": "not compiled yet (compile=True compiles it)",
    }[kernel.cached]
    if kernel.compiled:
        code += f"; compiling took {duration(kernel.compiled.seconds)} (NVRTC {kernel.compiled.nvrtc})"
    items["code"] = code
    if kernel.registers is not None:
        items["registers"] = f"{kernel.registers} per thread, {kernel.spill_bytes} bytes spilt"
    return items


def smem_text(kernel: Kernel) -> str:
    """The total, and the map below it."""
    if not kernel.smem:
        return "none"
    regions = [f"{r.offset:>7} .. {r.offset + r.size:<7} {r.name}" for r in kernel.smem]
    return "\n".join([f"{size(kernel.smem_bytes)} per block", *regions])


def explanation_text(e: Explanation) -> str:
    """The whole report."""
    title = f"cuflash.{e.function}" + (" would refuse this call" if e.refused is not None else "")
    return f"{title}\n{aligned(explanation_items(e))}"
