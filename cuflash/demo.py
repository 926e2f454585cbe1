"""``cuflash demo``: what this machine can do."""

from __future__ import annotations

import importlib.util
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from . import driver, jit, kernels
from .bench.accuracy import Error, array_module, errors
from .bench.inputs import Case, InputPool, poison
from .build import UNBOUNDED, build
from .config import ForwardConfig
from .errors import INSTALL_CUDA, DriverError, MissingKernelError, UnsupportedError
from .explanation import Explanation, explain
from .problem import AttentionProblem, Mask
from .text import duration, metric, size

if TYPE_CHECKING:
    from .cli.screen import Screen

GPU_CASES = tuple(
    Case.of(head_dim, causal, 4096, "bfloat16", batch=2)
    for head_dim, causal in ((64, False), (128, False), (128, True), (256, True))
)
CPU_CASE_SHAPE = (1, 2048, 8, 64)
PLANNED_ARCHES = ("sm_80", "sm_90a")
PLANNED: tuple[tuple[int, Mask], ...] = ((64, "full"), (128, "causal"), (256, "full"))
TIMED_CALLS = 10


def run_demo(screen: Screen) -> int:
    """The GPU's demonstration, or the CPU's with the reason why; the exit status."""
    missing = gpu_obstacle()
    if missing is None:
        demo_gpu(screen)
        return 0
    screen.heading("GPU")
    screen.line(f"  not used: {missing}")
    demo_cpu(screen)
    demo_compile(screen)
    return 0


def gpu_obstacle() -> str | None:
    """Why the GPU kernels cannot run here; None if they can."""
    try:
        if not driver.device_count():
            return "the driver reports no device"
        jit.device_arch(0)
    except (DriverError, UnsupportedError) as error:
        return str(error)
    if importlib.util.find_spec("cupy") is None:
        return f"CuPy is not installed: {INSTALL_CUDA}"
    return None


# --- GPU -------------------------------------------------------------------------------------------------------


def demo_gpu(screen: Screen) -> None:
    """Each case: which kernel, where it came from, how fast and how exact it is, what it moves."""
    import cupy

    properties = driver.device_properties(0)
    screen.heading("GPU")
    screen.pairs(
        {
            "device": properties.name,
            "multiprocessors": f"{properties.multiprocessors} at up to {properties.clock_hz / 1e6:.0f} MHz",
            "memory": f"{size(properties.memory_bytes)} at {metric(properties.memory_bytes_per_second, 'B/s')}",
            "kernels for": " and ".join(kernels.device_targets(jit.device_arch(0).name)),
        }
    )
    with cupy.cuda.Device(0):
        pool = InputPool("bfloat16", GPU_CASES)
        xp = array_module()
        with screen.progress("running", len(GPU_CASES)) as advance:
            shown = []
            for case in GPU_CASES:
                shown.append(run_gpu_case(case, pool, xp))
                advance(case_text(case))
    screen.heading(f"kernels for {shown[0].case.dtype}, B {shown[0].case.batch}, N {shown[0].case.seqlen}")
    screen.pairs({f"{case_text(each.case)}, H {each.case.heads}": each.symbol for each in shown})
    screen.line()
    columns = ["call", "code", "first call", "registers", "spilt", "shared"]
    screen.table(columns, [each.kernel_row() for each in shown])
    screen.heading("results")
    columns = ["call", "time", "TFLOP/s", "of peak", "error", "largest", "traffic", "ratio"]
    screen.table(columns, [each.result_row() for each in shown])
    screen.line(f"{ERROR_LEGEND}\n{TRAFFIC_LEGEND}")


ERROR_LEGEND = "  against float64: error by the Frobenius norm, largest absolute difference"
TRAFFIC_LEGEND = "  traffic: predicted; ratio: traffic with the N x N matrix in memory, over it"


@dataclass(frozen=True)
class Shown:
    """One case of the GPU's demonstration; seconds of the first call by the clock, of a warm one on the device."""

    case: Case
    before: Explanation
    after: Explanation
    first_call: float
    seconds: float
    error: Error

    @property
    def symbol(self) -> str:
        return self.after.kernel.symbol if self.after.kernel else ""

    def kernel_row(self) -> list[str]:
        kernel, earlier = self.after.kernel, self.before.kernel
        assert kernel is not None and kernel.compiled is not None and earlier is not None
        code = {"no": f"compiled, {kernel.compiled.seconds:.2f} s", "disk": "disk cache"}
        return [
            case_text(self.case),
            code.get(earlier.cached, earlier.cached),
            duration(self.first_call),
            str(kernel.registers),
            str(kernel.spill_bytes),
            size(kernel.smem_bytes),
        ]

    def result_row(self) -> list[str]:
        rate = self.case.flops / self.seconds
        peak = self.after.device.peak_flops if self.after.device else rate
        return [
            case_text(self.case),
            duration(self.seconds),
            f"{rate / 1e12:.0f}",
            f"{100 * rate / peak:.0f} %",
            f"{self.error.relative:.1e}",
            f"{self.error.largest:.1e}",
            size(self.after.hbm_bytes),
            f"{self.after.standard_bytes / self.after.hbm_bytes:.0f}x",
        ]


def case_text(case: Case) -> str:
    return f"D {case.head_dim}, {'causal' if case.causal else 'full'}"


def run_gpu_case(case: Case, pool: InputPool, xp: Any) -> Shown:
    """First call, error, then warm calls by device events."""
    import cupy

    from .api import attention
    from .bench.measure import CupyTimer, device_times

    q, k, v, out = pool.arrays(case)

    def call() -> object:
        return attention(q, k, v, causal=case.causal, out=out)

    poison(out)
    cupy.cuda.get_current_stream().synchronize()
    before = explain(q, k, v, causal=case.causal)
    start = time.perf_counter()
    call()
    cupy.cuda.get_current_stream().synchronize()
    first_call = time.perf_counter() - start
    error = errors({"out": out}, [q, k, v], case.causal, xp, heads=2)["out"]
    spread = device_times({"": call}, TIMED_CALLS, CupyTimer())[""]
    after = explain(q, k, v, causal=case.causal)
    return Shown(case, before, after, first_call, spread.median / 1e3, error)


# --- CPU -------------------------------------------------------------------------------------------------------


def demo_cpu(screen: Screen) -> None:
    """The NumPy backend beside attention that stores the scores: time, memory, error against float64."""
    from .api import attention

    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal(CPU_CASE_SHAPE, dtype=np.float32) for _ in range(3))
    batch, seq, heads, dim = CPU_CASE_SHAPE
    screen.heading("NumPy backend")
    screen.line(f"  float32 B{batch} N{seq} H{heads} D{dim}, full\n")
    rows = []
    for name, function in (("cuflash.attention", attention), ("stored scores", stored_scores)):
        out, seconds, peak = timed_on_cpu(lambda function=function: function(q, k, v))  # type: ignore[misc]
        error = errors({name: out}, [q, k, v], False, np, heads=2)[name]
        rate = explain(q, k, v).flops / seconds
        cells = [duration(seconds), f"{rate / 1e9:.0f}", size(peak - out.nbytes)]
        rows.append([name, *cells, f"{error.relative:.1e}", f"{error.largest:.1e}"])
    screen.table(["", "time", "GFLOP/s", "extra memory", "error", "largest"], rows)
    screen.line(ERROR_LEGEND)


def stored_scores(q: Any, k: Any, v: Any) -> Any:
    """Attention as the textbook has it: the N x N matrix of each head in memory."""
    q, k, v = (x.transpose(0, 2, 1, 3) for x in (q, k, v))
    scores = q @ k.swapaxes(2, 3)
    scores *= 1 / np.sqrt(np.float32(q.shape[3]))
    scores -= scores.max(axis=3, keepdims=True)
    np.exp(scores, out=scores)
    scores /= scores.sum(axis=3, keepdims=True)
    return (scores @ v).transpose(0, 2, 1, 3)


def timed_on_cpu(call: Callable[[], Any]) -> tuple[Any, float, int]:
    """(result, seconds: the best of three after a first call, peak bytes allocated in a call)."""
    tracemalloc.start()
    out = call()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    best = float("inf")
    for _ in range(3):
        start = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - start)
    return out, best, peak


def demo_compile(screen: Screen) -> None:
    """GPU kernels compiled on this machine, which needs no GPU."""
    from . import compiler
    from .settings import read_settings

    screen.heading("GPU kernels, compiled here")
    try:
        compiler.nvrtc_build()
    except MissingKernelError as error:
        screen.line(f"  none: {error}")
        return
    problems = [
        AttentionProblem(d, d, "bfloat16", mask, 16, False, arch) for arch in PLANNED_ARCHES for d, mask in PLANNED
    ]
    settings = read_settings()
    jobs = [(problem, kernels.select_config(problem)) for problem in problems]
    cache = settings.cache_dir if settings.cache_bytes else None
    with scratch_or(cache) as root, screen.progress("compiling", len(jobs)) as advance:
        built = {}
        for one in build(jobs, root, max_bytes=settings.cache_bytes or UNBOUNDED):
            built[one.arch, one.symbol] = one
            advance(f"{one.arch} {one.symbol}")
    rows = []
    for problem, config in jobs:
        one = built[problem.arch, kernels.symbol(problem, config)]
        assert isinstance(config, ForwardConfig)
        code = "cached" if one.cached else f"{one.seconds:.2f} s"
        call, tile = f"D {problem.head_dim}, {problem.mask}", f"{config.block_m} x {config.block_n}"
        rows.append([problem.arch, call, tile, code, one.registers, one.spill_bytes, size(one.smem_bytes)])
    screen.table(["target", "bfloat16", "tile", "compiled", "registers", "spilt", "shared"], rows)
    screen.line("  tile: queries x keys; spilt: bytes per thread; shared: memory per thread block")


@contextmanager
def scratch_or(folder: Path | None) -> Iterator[Path]:
    """The folder; without one a temporary folder."""
    if folder is not None:
        yield folder
        return
    with tempfile.TemporaryDirectory() as scratch:
        yield Path(scratch)
