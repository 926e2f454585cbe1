"""Compiles many kernels in processes: for ``cuflash compile``, the benchmark and sweeps."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from .config import KernelConfig
from .problem import AttentionProblem

if TYPE_CHECKING:
    from .compiled import Compiled

Job = tuple[AttentionProblem, KernelConfig]

UNBOUNDED = 1 << 62
"""Size limit of a directory that is being filled on purpose: nothing is evicted from it."""


@dataclass(frozen=True, slots=True)
class Built:
    """One kernel of a build: its numbers, or why it failed; ``kept``: it is in the cache that was to be filled."""

    symbol: str
    arch: str
    registers: int = 0
    spill_bytes: int = 0
    smem_bytes: int = 0
    seconds: float = 0.0
    cached: bool = False
    kept: bool = True
    error: str = ""

    @classmethod
    def of(
        cls, problem: AttentionProblem, config: KernelConfig, compiled: Compiled, *, cached: bool, kept: bool
    ) -> Built:
        return cls(
            compiled.symbol,
            problem.arch,
            compiled.registers,
            compiled.spill_bytes,
            config.smem_bytes(problem),
            compiled.seconds,
            cached,
            kept,
        )


def build_one(job: Job, root: Path, max_bytes: int = UNBOUNDED) -> Built:
    """Compile one kernel into the cache at ``root``, unless it is there."""
    from .cache import KernelCache, cache_key
    from .compiler import compile_source
    from .errors import CompileError
    from .kernels import symbol
    from .render import render

    problem, config = job
    cache = KernelCache(root, max_bytes)
    key = cache_key(problem, config)
    compiled = cache.load(key)
    cached = kept = compiled is not None
    if compiled is None:
        try:
            source = render(problem, config)
            compiled = compile_source(source)
        except CompileError as error:
            return Built(symbol(problem, config), problem.arch, error=str(error))
        kept = cache.publish(key, source, compiled)
    return Built.of(problem, config, compiled, cached=cached, kept=kept)


def build(jobs: Sequence[Job], root: Path, workers: int | None = None, max_bytes: int = UNBOUNDED) -> Iterator[Built]:
    """Compile kernels into the cache at ``root``, in the order in which they finish.

    Processes, not threads: NVRTC compiles one program at a time in a process. They are spawned, because a forked
    child cannot use a CUDA context of its parent.
    """
    workers = min(len(jobs), workers or len(os.sched_getaffinity(0)))
    if workers <= 1:
        for job in jobs:
            yield build_one(job, root, max_bytes)
        return
    pool = ProcessPoolExecutor(
        workers,
        mp_context=multiprocessing.get_context("spawn"),
        # Ctrl-C reaches the whole process group; a worker that it hits between two jobs would leave the pool waiting.
        initializer=signal.signal,
        initargs=(signal.SIGINT, signal.SIG_IGN),
    )
    running = [pool.submit(build_one, job, root, max_bytes) for job in jobs]
    try:
        for future in as_completed(running):
            yield future.result()
    finally:  # after an interrupt, or when the caller has had enough: what has not begun never will
        pool.shutdown(cancel_futures=True)
