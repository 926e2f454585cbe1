"""Every shipped kernel compiles for every target without warnings and within its budgets.

Those of the forward pass spill no register, those of the backward pass a few bytes at most.

CI compiles a subset in which every target meets every head dim, dtype, mask and variant, and these each other.
``pytest tests/compile --all-kernels`` compiles all.
"""

from __future__ import annotations

import multiprocessing
import os
import re
from concurrent.futures import Future, ProcessPoolExecutor
from itertools import chain

import pytest

from cuflash import kernels
from cuflash.arch import ARCHES
from cuflash.backward_config import BackwardWideConfig, HopperConfig
from cuflash.cli.dump import disassemble, find_disassembler
from cuflash.compiler import Compiled, to_ptx
from cuflash.config import KernelConfig
from cuflash.fp8_sm80_config import Fp8Sm80Config
from cuflash.problem import AttentionProblem
from cuflash.render import render
from cuflash.sm90_config import Sm90Config
from tests.compile.compile_time import seconds_alone
from tests.compile.shipped import compile_shipped, every_problem, label, pairs, pairwise
from tests.tiny import require_nvrtc

WARP_REGISTERS = 256
"""Registers are handed out to warps in steps of this many."""
FORWARD_SECONDS = 3.0
"""CPU time that a kernel may take to compile, unless it is one of the backward pass."""
BACKWARD_SECONDS = 5.0
BACKWARD_SPILL_BYTES = 64
"""What ptxas keeps of loop bounds and pointers of a backward kernel beside its products' registers."""
BLOCK_RESERVE = 1024
"""Bytes of shared memory that the driver takes for each thread block."""


KINDS = {"problem": KernelConfig, "hopper_problem": Sm90Config | HopperConfig, "fp8_problem": Fp8Sm80Config}
"""Fixtures, and the kernels that each is."""


def asked_for(config: pytest.Config) -> list[AttentionProblem]:
    problems = every_problem()
    return problems if config.getoption("--all-kernels", default=False) else pairwise(problems)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    for name in KINDS.keys() & set(metafunc.fixturenames):
        problems = [p for p in asked_for(metafunc.config) if isinstance(kernels.select_config(p), KINDS[name])]
        metafunc.parametrize(name, problems, ids=label)


@pytest.fixture(scope="session")
def compilations(request):
    """Compiles what the selected tests take, or what was asked for if none takes any; one kernel a core at a time."""
    require_nvrtc()
    calls = [item.callspec.params for item in request.session.items if hasattr(item, "callspec")]
    named = dict.fromkeys(params[name] for params in calls for name in KINDS if name in params)
    problems = named or asked_for(request.config)
    workers = min(os.cpu_count() or 1, 8)
    pool = ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn"))
    futures: dict[AttentionProblem, Future[Compiled]] = {p: pool.submit(compile_shipped, p) for p in problems}
    yield futures
    pool.shutdown(cancel_futures=True)


@pytest.mark.compile
def test_a_kernel_keeps_its_budgets(problem, compilations):
    compiled = compilations[problem].result()
    config, arch = kernels.select_config(problem), ARCHES[problem.arch]
    assert (compiled.arch, compiled.is_ptx) == (problem.arch, False)
    assert compiled.warnings == ()
    if problem.task == "backward":
        assert compiled.spill_bytes <= BACKWARD_SPILL_BYTES
    else:
        assert (compiled.spill_bytes, compiled.stack_bytes) == (0, 0)
    assert 0 < compiled.registers <= arch.registers_per_thread
    per_warp = -(-compiled.registers * 32 // WARP_REGISTERS) * WARP_REGISTERS
    assert per_warp * (config.threads // 32) * config.ctas <= arch.registers_per_sm
    smem_bytes = config.smem_bytes(problem) + compiled.static_smem
    assert smem_bytes <= arch.smem_per_block
    assert (smem_bytes + BLOCK_RESERVE) * config.ctas <= arch.smem_per_sm


@pytest.mark.compile
def test_a_hopper_kernel_uses_its_own_instructions(hopper_problem, compilations):
    compiled = compilations[hopper_problem].result()
    config = kernels.select_config(hopper_problem)
    assert hopper_problem.arch == "sm_90a"
    assert "wgmma" not in compiled.log, "ptxas serialises wgmma (C7510 and others)"
    # What a block has at its start, evenly shared; setmaxnreg moves registers from the producer to the consumers.
    assert compiled.registers <= {256: 255, 384: 168, 512: 128}[config.threads]
    program = find_disassembler()
    code = disassemble(program, compiled.cubin) if program else to_ptx(render(hopper_problem, config))
    product = "QGMMA" if hopper_problem.input_dtype else "HGMMA"
    for instruction in (product, "UTMALDG") if program else ("wgmma.mma_async", "cp.async.bulk.tensor"):
        assert instruction in code
    stores_by_tma = config.tma_store if isinstance(config, Sm90Config) else not isinstance(config, BackwardWideConfig)
    assert ("UTMASTG" if program else "cp.async.bulk.tensor.4d.global") in code or not stores_by_tma


@pytest.mark.compile
def test_a_kernel_for_codes_multiplies_what_its_config_says(fp8_problem, compilations):
    """Codes of their formats where the hardware does that; a form of ptxas's own, which converts them, is nowhere."""
    compiled = compilations[fp8_problem].result()
    converted, program = kernels.select_config(fp8_problem).converted, find_disassembler()
    source = render(fp8_problem, kernels.select_config(fp8_problem))
    code = disassemble(program, compiled.cubin) if program else to_ptx(source)
    names = ("QMMA.16832", "HMMA.16816") if program else ("m16n8k32", "m16n8k16")
    assert [name in code for name in names] == [not converted, converted]
    q, k, v = fp8_problem.formats
    found = re.findall(r"(?:QMMA\.16832|m16n8k32\.row\.col)\.F32\.(E\dM\d)\.(E\dM\d)", code, re.IGNORECASE)
    assert {(a.lower(), b.lower()) for a, b in found} == (set() if converted else {(q, k), ("e4m3", v)})


@pytest.mark.compile
def test_no_kernel_takes_long_to_compile(compilations):
    """Those that seemed to, beside others, are compiled again alone."""
    seconds = {problem: future.result().seconds for problem, future in compilations.items()}
    limits = {p: BACKWARD_SECONDS if p.task == "backward" else FORWARD_SECONDS for p in seconds}
    suspects = [problem for problem in seconds if seconds[problem] > limits[problem]]
    alone = {problem: seconds_alone(problem, limits[problem]) for problem in suspects}
    assert {label(p): taken for p, taken in alone.items() if taken > limits[p]} == {}


def test_the_subset_meets_every_pair():
    problems = every_problem()
    chosen = pairwise(problems)
    assert set(chain(*map(pairs, chosen))) == set(chain(*map(pairs, problems)))
    assert len(chosen) < len(problems) / 4
    assert {problem.arch for problem in chosen} == set(ARCHES)
    assert set(chosen) <= set(problems)


def test_shipped_problems_are_distinct():
    problems = every_problem()
    assert len(set(problems)) == len(problems)
    assert len({label(problem) for problem in problems}) == len(problems)
    assert {problem.arch for problem in problems} == set(ARCHES)
