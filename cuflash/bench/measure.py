"""Timing: device events with the contestants in turn, host cost per call, and the spread of both."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

Call = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Spread:
    """Median and quartiles of repeated measurements, in the unit of the samples."""

    median: float
    q1: float
    q3: float
    samples: int

    @classmethod
    def of(cls, samples: Sequence[float]) -> Spread:
        if not samples:
            raise ValueError("no samples: measure at least one round")
        q1, median, q3 = np.percentile(np.asarray(samples, dtype=np.float64), [25, 50, 75])
        return cls(float(median), float(q1), float(q3), len(samples))

    @property
    def relative_iqr(self) -> float:
        """(q3 - q1) / median: above 0.05 a difference of a few per cent means nothing."""
        return (self.q3 - self.q1) / self.median if self.median else 0.0


class Timer(Protocol):
    """What timing needs of a device; the tests pass a fake one."""

    def record(self) -> Any:
        """An event on the stream that the calls use."""

    def elapsed_ms(self, start: Any, stop: Any) -> float: ...

    def synchronize(self) -> None: ...


class CupyTimer:
    """CuPy events on the current stream.

    CuPy and torch both start on the legacy default stream, so one timer serves all contestants.
    """

    def __init__(self) -> None:
        import cupy

        self._cuda = cupy.cuda

    def record(self) -> Any:
        event = self._cuda.Event()
        event.record()
        return event

    def elapsed_ms(self, start: Any, stop: Any) -> float:
        return float(self._cuda.get_elapsed_time(start, stop))

    def synchronize(self) -> None:
        self._cuda.get_current_stream().synchronize()


def device_times(calls: Mapping[str, Call], rounds: int, timer: Timer, warm_rounds: int = 2) -> dict[str, Spread]:
    """Milliseconds on the device of each call, the calls taking turns.

    Every round runs each call once, in order, so that clocks and temperature are the same for all of them. The
    whole series is queued without synchronising: the device is always behind the host, and the events see no
    host time. The warm rounds just before also give it that lead.
    """
    for _ in range(warm_rounds):
        for call in calls.values():
            call()
    events: dict[str, list[tuple[Any, Any]]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            start = timer.record()
            call()
            events[name].append((start, timer.record()))
    timer.synchronize()
    return {name: Spread.of([timer.elapsed_ms(*pair) for pair in pairs]) for name, pairs in events.items()}


@dataclass(frozen=True, slots=True)
class HostCall:
    """A call whose host time is measured, and the context that it runs in (entered once per batch, not timed)."""

    call: Call
    context: Callable[[], AbstractContextManager[Any]] = nullcontext


def host_times(
    calls: Mapping[str, HostCall], timer: Timer, *, batches: int = 25, calls_per_batch: int = 200
) -> dict[str, Spread]:
    """Microseconds of host time per call: batches without synchronisation, the contestants taking turns.

    The work must be so small that the device keeps up; otherwise the launch queue fills and the device is timed.
    The first batch of each is not counted.
    """
    samples: dict[str, list[float]] = {name: [] for name in calls}
    collecting = gc.isenabled()
    gc.disable()
    try:
        for batch in range(batches + 1):
            for name, host_call in calls.items():
                with host_call.context():
                    seconds = time_batch(host_call.call, calls_per_batch)
                timer.synchronize()
                if batch:
                    samples[name].append(seconds * 1e6 / calls_per_batch)
    finally:
        if collecting:
            gc.enable()
    return {name: Spread.of(values) for name, values in samples.items()}


def time_batch(call: Call, count: int) -> float:
    """Seconds of wall time that ``count`` calls take."""
    start = time.perf_counter()
    for _ in range(count):
        call()
    return time.perf_counter() - start
