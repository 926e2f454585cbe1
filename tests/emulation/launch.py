"""Runs the forward kernel on the CPU the way the product runs it on a GPU: same render, parameter block and grid."""

from __future__ import annotations

import ctypes
import functools
import operator
import struct
from collections.abc import Collection
from dataclasses import dataclass, field
from unittest import mock

import numpy as np

from cuflash import jit, kernels
from cuflash.arch import ARCHES
from cuflash.checks import make_request
from cuflash.config import KernelConfig
from cuflash.forward_plan import CallPlan, make_plan
from cuflash.problem import AttentionProblem
from cuflash.render import Source, render
from cuflash.request import Causal, Request
from tests.emulation.build import build
from tests.emulation.tensors import Tensor
from tests.mutation import Mutation

SABOTAGE = ("no_wait", "no_block_barrier", "no_warp_barrier")
"""Instructions that the emulator can be told to ignore."""


INSTRUCTION_LIMIT = 500_000_000
"""Of one block, counted by thread: some ten seconds. Whatever takes longer runs for ever."""


class Coordinates(ctypes.Structure):
    _fields_ = (("x", ctypes.c_uint), ("y", ctypes.c_uint), ("z", ctypes.c_uint))


class Launch(ctypes.Structure):
    _fields_ = (
        ("parameters", ctypes.c_char_p),
        ("blocks", ctypes.POINTER(Coordinates)),
        ("block_count", ctypes.c_long),
        ("grid", Coordinates),
        ("threads", ctypes.c_int),
        ("shared_bytes", ctypes.c_int),
        ("instruction_limit", ctypes.c_long),
        ("seed", ctypes.c_uint),
        ("copies_land_late", ctypes.c_int),
        *((name, ctypes.c_int) for name in SABOTAGE),
        ("early", ctypes.c_int),
    )


@dataclass
class Report:
    """What a run did.

    ``faults``: for each kind how many, and the first in words. ``counts``: instructions of a warp, by name.
    ``bytes_read``: from global memory, by tensor.
    """

    faults: dict[str, tuple[int, str]] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    bytes_read: dict[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        faults = [f"{kind}: {times} times, first: {first}" for kind, (times, first) in self.faults.items()]
        return "\n".join([*faults, f"instructions: {self.counts}", f"bytes read: {self.bytes_read}"])

    def add(self, text: str) -> None:
        for line in text.splitlines():
            what, name, number, *first = line.split("\t")
            if what == "fault":
                times, earlier = self.faults.get(name, (0, ""))
                self.faults[name] = (times + int(number), earlier or first[0])
            else:
                self.counts[name] = self.counts.get(name, 0) + int(number)


@dataclass(frozen=True)
class Timing:
    """What a GPU leaves open: when copies land, in which order warps run; and which instructions are sabotaged."""

    late: bool = False
    seed: int = 0
    ignore: str = ""


EARLY = Timing()


@dataclass(frozen=True)
class Result:
    report: Report
    plan: CallPlan
    problem: AttentionProblem
    config: KernelConfig


class Emulator:
    """One kernel, compiled for the CPU."""

    def __init__(self, source: Source) -> None:
        self._library = ctypes.CDLL(str(build(source)))
        self._library.emulation_run.restype = ctypes.c_char_p
        assert self._library.emulation_launch_bytes() == ctypes.sizeof(Launch)
        self.parameter_bytes = int(self._library.emulated_parameter_bytes())

    def launch(
        self,
        block: bytes,
        grid: tuple[int, int, int],
        threads: int,
        shared_bytes: int,
        tensors: dict[str, Tensor],
        report: Report,
        *,
        blocks: Collection[tuple[int, int, int]] | None = None,
        timing: Timing = EARLY,
        patience: int = INSTRUCTION_LIMIT,
        early: bool = False,
    ) -> None:
        """One launch with these parameters; of some thread blocks, or in another order, if ``blocks`` says so."""
        assert len(block) == self.parameter_bytes
        chosen = _blocks(grid) if blocks is None else blocks
        launch = Launch(
            block,
            (Coordinates * len(chosen))(*(Coordinates(*c) for c in chosen)),
            len(chosen),
            Coordinates(*grid),
            threads,
            shared_bytes,
            patience,
            timing.seed,
            timing.late,
            **{timing.ignore: 1} if timing.ignore else {},
            early=early,
        )
        self.run(launch, tensors, report)

    def run(self, launch: Launch, tensors: dict[str, Tensor], report: Report) -> None:
        self._library.emulation_clear()
        reads = (ctypes.c_long * len(tensors))()
        for i, (name, t) in enumerate(tensors.items()):
            writes = None if t.writes is None else ctypes.c_void_p(t.writes.ctypes.data)
            base, elements = ctypes.c_void_p(t.extent.ctypes.data), ctypes.c_void_p(t.elements.ctypes.data)
            counter = ctypes.byref(reads, i * ctypes.sizeof(ctypes.c_long))
            nbytes = ctypes.c_long(t.extent.nbytes)
            self._library.emulation_tensor(name.encode(), base, nbytes, elements, writes, counter)
        report.add(self._library.emulation_run(ctypes.byref(launch)).decode())
        for name, count in zip(tensors, reads, strict=True):
            report.bytes_read[name] = report.bytes_read.get(name, 0) + count


@functools.cache
def emulator_for(problem: AttentionProblem, config: KernelConfig, mutation: Mutation | None = None) -> Emulator:
    source = render(problem, config)
    return Emulator(mutation.apply(source) if mutation else source)


def _plan(request: Request, problem: AttentionProblem, config: KernelConfig) -> CallPlan:
    """The product's own plan of a call, of a device that has `problem.arch` and a kernel that needs no loading."""
    loaded = mock.Mock(problem=problem, config=config)
    with (
        mock.patch.object(jit, "kernel_for", return_value=loaded),
        mock.patch.object(jit, "device_arch", return_value=ARCHES[problem.arch]),
    ):
        return make_plan(request)


def _blocks(grid: tuple[int, int, int]) -> list[tuple[int, int, int]]:
    """All blocks in the order in which a GPU starts them."""
    return [(x, y, z) for z, y, x in np.ndindex(*grid[::-1])]


def forward(
    tensors: dict[str, Tensor],
    *,
    causal: Causal = False,
    scale: float | None = None,
    config: KernelConfig | None = None,
    arch: str = "sm_90",
    timing: Timing = EARLY,
    mutation: Mutation | None = None,
    blocks: Collection[tuple[int, int, int]] | None = None,
) -> Result:
    """One attention call in the emulator.

    Parameters
    ----------
    tensors : dict
        "q", "k" and "v" of ``tensors.place``, "out" of ``tensors.allocate(output=True)``, and "lse" if it is wanted.
    causal, scale
        As in ``cuflash.attention``.
    config : KernelConfig, optional
        In place of the tuned one for ``arch``.
    timing : Timing
    mutation : Mutation, optional
    blocks : collection of (x, y, z), optional
        Run only these blocks, in each launch whose grid has them.
    """
    inputs = [tensors[name].view for name in ("q", "k", "v")]
    request = make_request(
        inputs, tensors["out"].view, causal=causal, scale=scale, layout="bhsd", return_lse="lse" in tensors
    )
    problem = request.problem(arch)
    config = config or kernels.select_config(problem)
    plan = _plan(request, problem, config)
    report = Report()
    pointers = [tensors[name].address if name in tensors else 0 for name in ("q", "k", "v", "out", "lse")]
    for extent, tail in plan.launches:
        emulator = emulator_for(problem, config, mutation)
        emulator.launch(
            struct.pack("<5Q", *pointers) + tail,
            extent,
            config.threads,
            config.smem_bytes(problem),
            tensors,
            report,
            blocks=None if blocks is None else [b for b in blocks if all(map(operator.lt, b, extent))],
            timing=timing,
        )
    return Result(report, plan, problem, config)
