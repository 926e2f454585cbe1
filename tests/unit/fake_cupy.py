"""A stand-in for CuPy on NumPy arrays, so that the benchmark's own code runs without a GPU."""

from __future__ import annotations

import contextlib
import importlib.machinery
import time
import types
from typing import Any

import numpy as np


class Event:
    """Takes the wall time: calls on the CPU are over when they return."""

    def record(self) -> None:
        self.at = time.perf_counter()


class Stream:
    def synchronize(self) -> None:
        pass


class MemoryHook:
    """Never called: nothing is allocated from a pool."""

    def __enter__(self) -> MemoryHook:
        return self

    def __exit__(self, *args: object) -> None:
        pass


def module() -> types.ModuleType:
    """Install with ``monkeypatch.setitem(sys.modules, "cupy", module())``."""
    cupy = types.ModuleType("cupy")
    cupy.__spec__ = importlib.machinery.ModuleSpec("cupy", None)
    cupy.__dict__.update({name: getattr(np, name) for name in np.__all__})
    cuda: Any = types.SimpleNamespace(
        Device=lambda ordinal: contextlib.nullcontext(),
        Event=Event,
        MemoryHook=MemoryHook,
        get_current_stream=Stream,
        get_elapsed_time=lambda start, stop: 1e3 * (stop.at - start.at),
        runtime=types.SimpleNamespace(memGetInfo=lambda: (1 << 30, 2 << 30)),
    )
    cupy.cuda = cuda  # type: ignore[attr-defined]
    return cupy
