"""Tuning: configs of one problem, compiled, checked against float64, and timed in turn beside torch's attention."""

from __future__ import annotations

import contextlib
import math
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from .. import counters, driver, forward_plan, jit, kernels
from ..arch import ARCHES, arch_for
from ..build import Built, build
from ..cache import cache_key, load_prebuilt
from ..checks import make_request
from ..cli.problems import default_arch, overridden, widest_access
from ..cli.screen import Screen
from ..config import KernelConfig
from ..problem import AttentionProblem, Dtype, Mask
from . import accuracy, environment
from .candidates import candidates
from .inputs import Case, InputPool, numpy_dtype, poison
from .measure import Call, CupyTimer, Spread, Timer, device_times
from .peers import Refusal, planned_call, torch_available, torch_peer
from .sweep_record import built_text, failures, legend, table_of

PEERS = ("flash", "cudnn")

ODD_LENGTHS = ((1000, 777), (130, 77), (77, 130))
"""Nq, Nk of the small checks: partial tiles on both axes, and dead rows under a causal mask."""

LARGEST_ERROR: dict[Dtype, float] = {"bfloat16": 2 * 2.0**-8, "float16": 2 * 2.0**-11}
"""Relative to float64: beyond it a kernel is wrong, and not timed."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What a sweep tries.

    Attributes
    ----------
    overrides : tuple of dict
        Each makes a config of the tuning table's, which always takes part.
    auto : bool
        Also what `cuflash.bench.candidates` proposes.
    family : str or None
        None: that of an ordinary call.
    arch : str or None
        None: the device's.
    kernels : Path or None
        Where compiled kernels stay, of this machine or another; None: nowhere.
    """

    head_dim: int
    head_dim_v: int
    causal: bool = False
    dtype: Dtype = "bfloat16"
    lengths: tuple[int, ...] = (1024, 4096)
    rounds: int = 9
    overrides: tuple[dict[str, int], ...] = ()
    auto: bool = False
    family: str | None = None
    arch: str | None = None
    kernels: Path | None = None
    workers: int | None = None
    compile_only: bool = False
    commit: str | None = None

    @property
    def cases(self) -> list[Case]:
        return [Case.of(self.head_dim, self.causal, n, self.dtype, head_dim_v=self.head_dim_v) for n in self.lengths]

    def problem(self) -> AttentionProblem:
        """The problem, for the target of the family.

        Raises
        ------
        ValueError
            The device, or the head dims, are none of the family's.
        """
        access_bytes = widest_access(self.head_dim, self.head_dim_v)
        named = arch_for(ARCHES[self.arch or default_arch()].compute_capability).name
        targets = {kernels.family_of(target).name: target for target in kernels.device_targets(named, access_bytes)}
        family = self.family or list(targets)[-1]
        if family not in targets:
            raise ValueError(
                f"the family is {family}; for head dims {self.head_dim} and {self.head_dim_v}, {named} has "
                f"{' and '.join(targets)}"
            )
        mask: Mask = "causal" if self.causal else "full"
        return AttentionProblem(self.head_dim, self.head_dim_v, self.dtype, mask, access_bytes, False, targets[family])


class Checked(NamedTuple):
    """The worst errors of a config over the checks."""

    relative: float
    largest: float


@dataclass(slots=True)
class Sweep:
    """What was found; configs and peers by name, the tuning table's config first.

    Attributes
    ----------
    built : dict
        Registers, spills and seconds, or why it does not compile or fit.
    times : dict
        By length and name, milliseconds.
    """

    problem: AttentionProblem
    configs: dict[str, KernelConfig]
    cases: list[Case]
    environment: dict[str, Any]
    built: dict[str, Built] = field(default_factory=dict)
    checked: dict[str, Checked] = field(default_factory=dict)
    times: dict[int, dict[str, Spread]] = field(default_factory=dict)

    @property
    def table(self) -> str:
        """The name of the tuning table's config."""
        return next(iter(self.configs))

    @property
    def stem(self) -> str:
        """Names the record's files."""
        p = self.problem
        dims = f"d{p.head_dim}" + (f"dv{p.head_dim_v}" if p.head_dim_v != p.head_dim else "")
        return f"sweep_{p.arch}_{dims}_{p.dtype}_{p.mask}"

    @property
    def runnable(self) -> list[str]:
        return [name for name, built in self.built.items() if not built.error]

    @property
    def right(self) -> list[str]:
        bound = LARGEST_ERROR[self.problem.dtype]
        return [name for name, checked in self.checked.items() if checked.relative <= bound]

    @property
    def by_speed(self) -> list[str]:
        """Names of all configs, the fastest over the lengths first, then those that were not timed."""

        def slowness(name: str) -> float:
            medians = [times[name].median for times in self.times.values() if name in times]
            return sum(map(math.log, medians)) if medians else math.inf

        return sorted(self.configs, key=slowness)


def sweep(plan: Plan, screen: Screen) -> Sweep:
    """Compile, check and time all configs of a plan, and show the result.

    Raises
    ------
    ValueError
        A config that its family does not have, or head dims that no family takes.
    """
    problem = plan.problem()
    found = Sweep(problem, chosen_configs(problem, plan), plan.cases, {})
    screen.heading(found.stem)
    with kernel_folder(plan.kernels) as root:
        found.built = compile_all(problem, found.configs, root, plan.workers, screen)
        if not plan.compile_only:
            run(found, root, plan.rounds, CupyTimer(), screen)
    found.environment = environment.software() if plan.compile_only else environment.describe(driver.current_device())
    if plan.commit:
        found.environment["commit"] = plan.commit
    columns, rows = table_of(found)
    screen.line(f"\n{legend(found)}")
    screen.table(columns, rows)
    for line in failures(found):
        screen.line(line)
    return found


def chosen_configs(problem: AttentionProblem, plan: Plan) -> dict[str, KernelConfig]:
    """By label, which spells a config out: the tuning table's first, equal ones once."""
    table = kernels.select_config(problem)
    configs = [table, *(overridden(table, override) for override in plan.overrides)]
    if plan.auto:
        configs += candidates(problem, table)
    return {config.label: config for config in configs}


@contextlib.contextmanager
def kernel_folder(named: Path | None) -> Iterator[Path]:
    """The directory that was named, or one that goes with the sweep."""
    if named is not None:
        yield named
        return
    with tempfile.TemporaryDirectory() as scratch:
        yield Path(scratch)


# --- compiling -------------------------------------------------------------------------------------------------


def compile_all(
    problem: AttentionProblem, configs: dict[str, KernelConfig], root: Path, workers: int | None, screen: Screen
) -> dict[str, Built]:
    """Compile what is not in the directory; every config's numbers, or why it drops out."""
    limit = ARCHES[problem.arch].smem_per_block
    found: dict[str, Built] = {}
    missing = []
    for name, config in configs.items():
        symbol, size = kernels.symbol(problem, config), config.smem_bytes(problem)
        if size > limit:
            found[name] = Built(symbol, problem.arch, smem_bytes=size, error=f"shared memory beyond {limit} bytes")
        elif (built := prebuilt(root, problem, config)) is not None:
            found[name] = built
        else:
            missing.append((problem, config))
    names = {kernels.symbol(problem, config): name for name, config in configs.items()}
    if missing:
        with screen.progress("kernels", len(missing)) as advance:
            for built in build(missing, root, workers):
                found[names[built.symbol]] = built
                advance(f"{names[built.symbol]}: {built_text(built)}")
    return {name: found[name] for name in configs}


def prebuilt(root: Path, problem: AttentionProblem, config: KernelConfig) -> Built | None:
    """A kernel of an earlier run or another machine, whatever NVRTC made it."""
    compiled = load_prebuilt(root, cache_key(problem, config))
    return Built.of(problem, config, compiled, cached=True, kept=True) if compiled else None


# --- running ---------------------------------------------------------------------------------------------------


def run(found: Sweep, root: Path, rounds: int, timer: Timer, screen: Screen) -> None:
    """Check every config that was built, and time those that are right."""
    import cupy

    cupy.zeros(1)  # makes the device's context current
    xp = accuracy.array_module()
    loaded = {name: load(found.problem, found.configs[name], root) for name in found.runnable}
    with screen.progress("checks", len(loaded)) as advance:
        for name, kernel in loaded.items():
            checked = found.checked[name] = check(kernel, xp)
            advance(f"{name}: error {checked.relative:.2e} relative, {checked.largest:.2e} largest")
    pool = InputPool(found.problem.dtype, found.cases)
    right = {name: loaded[name] for name in found.right}
    with screen.progress("times", len(found.cases)) as advance:
        for case in found.cases:
            found.times[case.seqlen] = time_case(right, case, pool, rounds, timer, screen)
            advance(str(case))


def load(problem: AttentionProblem, config: KernelConfig, root: Path) -> jit.LoadedKernel:
    """A config's kernel on the current device.

    Raises
    ------
    FileNotFoundError
        It is not in the directory, which could not be written.
    """
    compiled = load_prebuilt(root, cache_key(problem, config))
    if compiled is None:
        raise FileNotFoundError(f"{kernels.symbol(problem, config)} is not in {root}, which cannot be written")
    device = driver.current_device()
    kernel = driver.load_kernel(compiled, config.smem_bytes(problem), device)
    if jit.takes_counter(config):
        counters.prepare(device)
    return jit.LoadedKernel(kernel, problem, config, compiled, "prebuilt")


def launch(loaded: jit.LoadedKernel, arrays: list[Any]) -> Call:
    """A launch of this very kernel on q, k, v and out, (batch, seq, heads, dim), bottom-right causal.

    Raises
    ------
    LookupError
        The arrays need another kernel.
    """
    problem = loaded.problem
    causal = problem.mask == "causal"
    request = make_request(arrays[:3], arrays[3], causal=causal, scale=None, layout="bshd", return_lse=False)
    with kernels.use_family(loaded.config.family):
        needed = kernels.problem_for(request, jit.device_arch(request.device).name)
    if replace(needed, short=problem.short) != problem:  # which is the better one for a length is to be measured
        raise LookupError(f"the call needs {needed}, not {problem}")
    return planned_call(forward_plan.plan_with(request, loaded), arrays)


def check(loaded: jit.LoadedKernel, xp: Any) -> Checked:
    """Worst errors over odd shapes, with ordinary keys and with keys that grow to the front."""
    import cupy

    problem = loaded.problem
    dtype = numpy_dtype(problem.dtype)
    rng = np.random.default_rng(1)
    worst = Checked(0.0, 0.0)
    for seqlen_q, seqlen_k in ((1024, 1024), *ODD_LENGTHS):
        for growth in (1.0, 30.0):
            grow = np.geomspace(growth, 1.0, seqlen_k)[:, None, None]
            sizes = ((seqlen_q, problem.head_dim), (seqlen_k, problem.head_dim), (seqlen_k, problem.head_dim_v))
            host = [rng.standard_normal((2, length, 3, width)) for length, width in sizes]
            host[1] *= grow
            q, k, v = (cupy.asarray(a.astype(dtype)) for a in host)
            out = cupy.empty((2, seqlen_q, 3, problem.head_dim_v), dtype=dtype)
            poison(out)
            launch(loaded, [q, k, v, out])()
            error = accuracy.errors({"": out}, [q, k, v], problem.mask == "causal", xp)[""]
            worst = Checked(worst_of(worst.relative, error.relative), worst_of(worst.largest, error.largest))
    return worst


def worst_of(a: float, b: float) -> float:
    """The larger one; NaN is the worst of all."""
    return b if not b <= a else a


def time_case(
    loaded: dict[str, jit.LoadedKernel], case: Case, pool: InputPool, rounds: int, timer: Timer, screen: Screen
) -> dict[str, Spread]:
    """Every kernel and torch's backends, in turn, on one shape."""
    arrays = pool.arrays(case)
    calls = {name: launch(kernel, arrays) for name, kernel in loaded.items()}
    for name in PEERS if torch_available() else ():
        peer = torch_peer(name, case, arrays)
        if isinstance(peer, Refusal):
            screen.line(f"torch {name} refuses {case}: {peer.reason}")
        else:
            calls[name] = peer.call
    return device_times(calls, rounds, timer)
