"""Kernels of the GPU tests, compiled ahead in processes: those of a whole run, and those that tests make themselves.

A file whose kernels no other takes, as those of 8-bit operands, lists them in a function ``kernels_ahead``, with their
configs. ``--family`` does not choose between these, and so the file has no part in such a run.
"""

from __future__ import annotations

import faulthandler
import math
import multiprocessing
import os
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ProcessPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.conftest import family_asked_for
from tests.gpu.support import CAUSAL, DTYPES, HEAD_DIMS, Variant, compile_variant, target

if TYPE_CHECKING:
    from cuflash.build import Job
    from cuflash.compiled import Compiled
    from cuflash.problem import AttentionProblem

WHOLE_RUN = 200
"""From this many GPU tests on, beside those that make or list their own kernels, it pays to compile ahead."""

MANY = 10
"""From this many tests of a file on it pays to compile ahead what the file lists."""


def _variants(item: pytest.Item) -> list[Variant]:
    """The variants among a test's parameters."""
    params = item.callspec.params if hasattr(item, "callspec") else {}
    return [value for value in params.values() if isinstance(value, Variant)]


def _gradient_problems(index: int, access_bytes: int) -> tuple[AttentionProblem, ...]:
    """What `test_backward.test_head_dims` runs of an entry of HEAD_DIMS."""
    from cuflash import kernels
    from cuflash.backward_kernels import problems_beside
    from cuflash.problem import AttentionProblem

    mask = "causal" if CAUSAL[index % len(CAUSAL)] else "full"
    dtype, arch = DTYPES[index % len(DTYPES)], target()
    forward = AttentionProblem(*HEAD_DIMS[index], dtype, mask, access_bytes, False, arch)  # type: ignore[arg-type]
    if access_bytes == 16 and arch in kernels.TMA_TARGETS and kernels.family_in_use() != "backward_sm80":
        return problems_beside(forward, kernels.TMA_TARGETS[arch])
    return problems_beside(forward, arch)


def _of_common_calls() -> Iterator[AttentionProblem]:
    """What calls take that many files make: all shipped kernels but those of 8 bits, and those of HEAD_DIMS."""
    from cuflash.kernels import device_targets, shipped_problems
    from cuflash.problem import AttentionProblem

    for arch in device_targets(target()):
        for problem in shipped_problems(arch):
            if problem.input_dtype is None and problem.task.startswith(("forward", "backward")):
                yield problem
    for index, (d, dv) in enumerate(HEAD_DIMS):
        access_bytes = min(16, 2 * math.gcd(d, dv, 8))
        arch = device_targets(target(), access_bytes)[-1]
        masks = ("full", "causal") if index % 2 == 0 else ("causal", "full")
        for dtype, mask in zip(DTYPES, masks, strict=True):
            yield AttentionProblem(d, dv, dtype, mask, access_bytes, False, arch)  # type: ignore[arg-type]
        yield from _gradient_problems(index, access_bytes)


def _jobs(items: list[pytest.Item]) -> set[Job]:
    """What is to be compiled before these tests run."""
    from cuflash.kernels import family_in_use, select_config

    tests = Counter(item.module for item in items if not _variants(item))  # type: ignore[attr-defined]
    listing = {module: count for module, count in tests.items() if hasattr(module, "kernels_ahead")}
    jobs: set[Job] = set()
    if not family_in_use():
        jobs.update(job for module, count in listing.items() if count >= MANY for job in module.kernels_ahead())
    if tests.total() - sum(listing.values()) >= WHOLE_RUN:
        jobs |= {(problem, select_config(problem)) for problem in _of_common_calls()}
    return jobs


@pytest.fixture(scope="session", autouse=True)
def _kernels(request: pytest.FixtureRequest, shared_cache: Path) -> None:
    from cuflash.build import build
    from cuflash.settings import read_settings

    if "PYTEST_XDIST_WORKER" in os.environ or not read_settings().jit:
        return
    with family_asked_for(request.config):
        jobs = _jobs([item for item in request.session.items if item.get_closest_marker("gpu")])
    if jobs:
        faulthandler.cancel_dump_traceback_later()  # minutes, where cores are few; not what the first test may take
    # Those that take longest first, so that all processes end at about the same time.
    ordered = sorted(jobs, key=lambda job: -max(job[0].head_dim, job[0].head_dim_v))
    failed = [built for built in build(ordered, shared_cache / "cuflash") if built.error]
    assert not failed, "\n".join(f"{built.symbol}: {built.error}" for built in failed)


@pytest.fixture(scope="module", autouse=True)
def _concerned_by_family(request: pytest.FixtureRequest) -> None:
    if hasattr(request.module, "kernels_ahead") and request.config.getoption("--family"):
        pytest.skip("GPU test: of kernels that are no part of a run with --family")


@pytest.fixture(scope="session")
def compilations(request: pytest.FixtureRequest) -> Iterator[Mapping[Variant, Future[Compiled]]]:
    """The variants that are parameters of selected tests, and their unchanged texts, in the order of the tests."""
    wanted = (variant for item in request.session.items for variant in _variants(item))
    variants = dict.fromkeys(v for variant in wanted for v in (variant.unchanged, variant))
    # Processes: NVRTC compiles one program at a time in each. Spawned: a fork cannot use the parent's CUDA context.
    workers = len(os.sched_getaffinity(0))
    pool = ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn"))
    yield {variant: pool.submit(compile_variant, variant) for variant in variants}
    pool.shutdown(cancel_futures=True)


@pytest.fixture(autouse=True)
def _nothing_pending() -> Iterator[None]:
    """A fault of a kernel is reported by the test that launched it, not by a later one."""
    yield
    import cupy as cp

    cp.cuda.Device().synchronize()


@pytest.fixture(scope="session")
def torch() -> Any:
    """The module `torch`, where it has a CUDA device."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = pytest.importorskip("torch")
    if not module.cuda.is_available():
        pytest.skip("torch without CUDA")
    return module


@pytest.fixture(scope="session")
def jax_on_gpu() -> Any:
    """The module `jax`, where it has a CUDA device."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        jax = pytest.importorskip("jax")
        if not any(device.platform in ("gpu", "cuda") for device in jax.devices()):
            pytest.skip("JAX without CUDA")
    return jax
