"""A whole run of the GPU tests takes some hundred kernels: they are compiled ahead, in processes."""

from __future__ import annotations

import faulthandler
import math
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.gpu.support import DTYPES, HEAD_DIMS, target

WHOLE_RUN = 200
"""From this many GPU tests on, it pays to compile ahead."""


@pytest.fixture(scope="session", autouse=True)
def _kernels(request: pytest.FixtureRequest, shared_cache: Path) -> None:
    from cuflash.build import build
    from cuflash.kernels import device_targets, select_config, shipped_problems
    from cuflash.problem import AttentionProblem
    from cuflash.settings import read_settings

    running = [item for item in request.session.items if item.get_closest_marker("gpu")]
    if len(running) < WHOLE_RUN or "PYTEST_XDIST_WORKER" in os.environ or not read_settings().jit:
        return
    faulthandler.cancel_dump_traceback_later()  # minutes, where cores are few; not what the first test may take
    problems = {problem for arch in device_targets(target()) for problem in shipped_problems(arch)}
    for index, (d, dv) in enumerate(HEAD_DIMS):
        access_bytes = min(16, 2 * math.gcd(d, dv, 8))
        arch = device_targets(target(), access_bytes)[-1]
        masks = ("full", "causal") if index % 2 == 0 else ("causal", "full")
        for dtype, mask in zip(DTYPES, masks, strict=True):
            problems.add(AttentionProblem(d, dv, dtype, mask, access_bytes, False, arch))  # type: ignore[arg-type]
    failed = [
        built for built in build([(p, select_config(p)) for p in problems], shared_cache / "cuflash") if built.error
    ]
    assert not failed, "\n".join(f"{built.symbol}: {built.error}" for built in failed)


@pytest.fixture(autouse=True)
def _nothing_pending() -> Iterator[None]:
    """A fault of a kernel is reported by the test that launched it, not by a later one."""
    yield
    import cupy as cp

    cp.cuda.Device().synchronize()
