"""The kinds of kernels for 8-bit operands that a Hopper GPU runs, each for all tests of a file."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from cuflash import jit, kernels
from cuflash.arch import fp8_sm80
from tests.gpu.support import target

PRODUCTS = {"wgmma": "sm_90a", "fp16 by mma.sync": "sm_90", "codes by mma.sync": "sm_89"}
"""What is tested on a Hopper GPU, and the target whose configs it has; elsewhere the device's own kernels are."""


@contextmanager
def kernels_of(request: pytest.FixtureRequest, cache: Path, explained: Callable[[], Iterable[Any]]) -> Iterator[str]:
    """Inside, calls take kernels of the kind that is the fixture's parameter; skips where the run has no such.

    Those of the explained calls are compiled before, in processes: one after the other they would take a minute.
    """
    if request.config.getoption("--family"):
        pytest.skip("GPU test: of kernels that are no part of a run with --family")
    if target() not in kernels.TMA_TARGETS and request.param != "wgmma":
        pytest.skip("GPU test: of the kernels that Hopper GPUs have beside those of the device")
    with _products(request.param):
        _compile_ahead(explained(), cache / "cuflash")
        yield request.param


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


def _compile_ahead(explained: Iterable[Any], cache: Path) -> None:
    from cuflash.build import build

    jobs = {kernel.problem: kernel.config for each in explained for kernel in each.kernels}
    failed = [built for built in build(list(jobs.items()), cache) if built.error]
    assert not failed, "\n".join(f"{built.symbol}: {built.error}" for built in failed)
