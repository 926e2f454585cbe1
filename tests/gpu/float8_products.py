"""The kinds of kernels for 8-bit operands that a Hopper GPU runs, each for all tests of a file."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeAlias
from unittest import mock

import pytest

import cuflash
from cuflash import jit, kernels
from cuflash.arch import fp8_sm80
from tests.gpu.support import jobs_of, target

if TYPE_CHECKING:
    from cuflash.build import Job

Call: TypeAlias = "tuple[Sequence[Any], Mapping[str, Any]]"
"""Q, K and V, which may be on the host, and options of `cuflash.explain`."""

PRODUCTS = {"wgmma": "sm_90a", "fp16 by mma.sync": "sm_90", "codes by mma.sync": "sm_89"}
"""What is tested on a Hopper GPU, and the target whose configs it has; elsewhere the device's own kernels are."""

of_one_kind = pytest.mark.parametrize("kind", list(PRODUCTS)[:1], indirect=True)
"""For tests of what is the same for all kinds, in files whose fixture ``kind`` has PRODUCTS for parameters."""


@contextmanager
def kernels_of(request: pytest.FixtureRequest) -> Iterator[str]:
    """Inside, calls take kernels of the kind that is the fixture's parameter; skips where the device has no such."""
    if request.param not in _kinds():
        pytest.skip("GPU test: of the kernels that Hopper GPUs have beside those of the device")
    with _products(request.param):
        yield request.param


def jobs_of_kinds(calls: Iterable[Call]) -> list[Job]:
    """What these calls take, of all kinds."""
    jobs: list[Job] = []
    calls = list(calls)
    for kind in _kinds():
        with _products(kind):
            jobs += jobs_of_calls(calls)
    return jobs


def jobs_of_calls(calls: Iterable[Call]) -> list[Job]:
    """What these calls take, of the kind that is in use: outside of tests, the first."""
    return [job for arrays, options in calls for job in jobs_of(cuflash.explain(*arrays, arch=target(), **options))]


def _kinds() -> list[str]:
    """Of `PRODUCTS`, those that this device has."""
    return list(PRODUCTS) if target() in kernels.TMA_TARGETS else ["wgmma"]


@contextmanager
def _products(name: str) -> Iterator[None]:
    if name == "wgmma":
        yield
        return
    config_for, arch = fp8_sm80.forward_config, PRODUCTS[name]
    configs = mock.patch.object(fp8_sm80, "forward_config", lambda problem: config_for(replace(problem, arch=arch)))
    code, loaded = (mock.patch.dict(table, clear=True) for table in (jit._code, jit._loaded))
    with configs, code, loaded, kernels.use_family("forward_fp8_sm80"):
        yield
