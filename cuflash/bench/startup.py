"""Cold and warm start, each in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from typing import Any

from .measure import Spread

# Runs in the child. CuPy's import and the device's context are made first: they are not cuflash's.
FIRST_CALL = """
import json, time
from time import perf_counter as now
t0 = now()
import cupy, numpy
q, k, v = (cupy.zeros((1, 128, 8, 64), dtype=cupy.float16) for _ in range(3))
cupy.cuda.get_current_stream().synchronize()
t1 = now()
import cuflash
t2 = now()
cuflash.attention(q, k, v)
cupy.cuda.get_current_stream().synchronize()
t3 = now()
cuflash.attention(q, k, v)
cupy.cuda.get_current_stream().synchronize()
t4 = now()
print(json.dumps({"cupy_and_context": t1 - t0, "import": t2 - t1, "first_call": t3 - t2, "second_call": t4 - t3}))
"""

IMPORT_ONLY = """
import json, time
import numpy
t0 = time.perf_counter()
import cuflash
t1 = time.perf_counter()
cuflash.attention
t2 = time.perf_counter()
print(json.dumps({"import": t1 - t0, "with_functions": t2 - t0}))
"""


def child(code: str, cache: str) -> dict[str, Any]:
    """The JSON line that a fresh interpreter prints.

    Raises
    ------
    RuntimeError
        The child failed; the message has its error.
    """
    environment = {**os.environ, "CUFLASH_CACHE_DIR": cache, "CUFLASH_DISABLE_JIT": "0", "CUFLASH_PREBUILT_DIR": ""}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # modules are compiled once for all runs, as pip leaves them
    paths = [path for path in sys.path if path]
    environment["PYTHONPATH"] = os.pathsep.join(paths)
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=300)
    if done.returncode:
        raise RuntimeError(f"the start-up measurement failed:\n{done.stderr.strip()}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def spreads(runs: list[dict[str, float]]) -> dict[str, Spread]:
    """Milliseconds of each phase over several runs, and ``beyond_cupy``: import and first call together."""
    totals = [{**run, "beyond_cupy": run["import"] + run["first_call"]} for run in runs]
    return {phase: Spread.of([1e3 * run[phase] for run in totals]) for phase in totals[0]}


def measure_startup(cold: int = 3, warm: int = 7) -> dict[str, dict[str, Spread]]:
    """First calls with an empty kernel cache (``cold``) and with the kernel in it (``warm``), in milliseconds.

    Also ``import``: ``import cuflash`` after NumPy, alone and with the modules that its first use loads.
    """
    cold_runs, warm_runs = [], []
    for _ in range(cold):
        with tempfile.TemporaryDirectory() as cache:
            cold_runs.append(child(FIRST_CALL, cache))
    with tempfile.TemporaryDirectory() as cache:
        child(FIRST_CALL, cache)
        warm_runs += [child(FIRST_CALL, cache) for _ in range(warm)]
        imports = [child(IMPORT_ONLY, cache) for _ in range(warm)]
    return {
        "cold": spreads(cold_runs),
        "warm": spreads(warm_runs),
        "import": {phase: Spread.of([1e3 * run[phase] for run in imports]) for phase in imports[0]},
    }
