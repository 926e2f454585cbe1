"""What every test gets: a kernel cache of its own, a watchdog, and a visible count of the GPU tests that did not run.

Test files import the shared helpers as ``from tests.oracle import ...``: the repository's root is on ``sys.path``.
"""

from __future__ import annotations

import faulthandler
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

GPU_SECONDS = 120
"""A GPU test that runs longer hangs; ``@pytest.mark.gpu(timeout=...)`` allows another time."""

CPU_SECONDS = 900
"""The same for all other tests, which share two cores with whatever else runs."""

_stderr = pytest.StashKey[int]()


@lru_cache(maxsize=1)
def gpu_count() -> int:
    """CUDA devices of this machine; 0 without cuda-bindings or without a driver."""
    try:
        from cuda.bindings import driver
    except ImportError:
        return 0
    try:
        if driver.cuInit(0)[0] != driver.CUresult.CUDA_SUCCESS:
            return 0
        return int(driver.cuDeviceGetCount()[1])
    except RuntimeError:  # cuda-bindings found no libcuda
        return 0


def pytest_addoption(parser: pytest.Parser) -> None:
    # Of two families only the one that calls do not prefer by themselves need be asked for.
    parser.addoption(
        "--family",
        choices=("forward_sm80", "backward_sm80"),
        help="GPU tests: all calls of its pass take kernels of this family; on Hopper otherwise those that load by TMA",
    )


def family_asked_for(config: pytest.Config) -> AbstractContextManager[None]:
    """Inside, calls take kernels of the family that ``--family`` names."""
    from cuflash.kernels import use_family

    name = config.getoption("--family")
    return use_family(name) if name else nullcontext()


def pytest_configure(config: pytest.Config) -> None:
    # How long an example takes says something about the machine alone.
    settings.register_profile("cuflash", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("cuflash")
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # else JAX takes most of the GPU's memory
    config.stash[_stderr] = os.dup(2)  # before pytest captures it


def pytest_unconfigure(config: pytest.Config) -> None:
    os.close(config.stash[_stderr])


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not any(item.get_closest_marker("gpu") for item in items) or gpu_count():
        return
    skip = pytest.mark.skip(reason="GPU test: no CUDA device")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


@pytest.fixture(autouse=True)
def _needs_nvrtc(request: pytest.FixtureRequest) -> None:
    """Tests marked ``compile`` are skipped where the bindings are not installed: the plain, CPU-only cuflash."""
    if request.node.get_closest_marker("compile"):
        pytest.importorskip("cuda.bindings", reason="needs an extra: cuda12 or cuda13")


@pytest.fixture(autouse=True)
def _family(request: pytest.FixtureRequest) -> Iterator[None]:
    """GPU tests run under ``--family``; the others, which plan for devices of their own, do not."""
    with family_asked_for(request.config) if request.node.get_closest_marker("gpu") else nullcontext():
        yield


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Ends the run, with every thread's stack on stderr, when a test hangs.

    faulthandler's watchdog needs neither the GIL nor a signal: it also ends a test that waits inside the driver.
    """
    gpu = item.get_closest_marker("gpu")
    seconds = gpu.kwargs.get("timeout", GPU_SECONDS) if gpu else CPU_SECONDS
    faulthandler.dump_traceback_later(seconds, exit=True, file=item.config.stash[_stderr])
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    skipped = terminalreporter.stats.get("skipped", [])
    if skipped:
        terminalreporter.section("tests that did not run", sep="-", yellow=True)
        for reason, count in Counter(report.longrepr[2].removeprefix("Skipped: ") for report in skipped).items():
            terminalreporter.line(f"{count:5}  {reason}", yellow=True)


@pytest.fixture(scope="session")
def shared_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The kernel cache that the GPU tests share, also between processes: each kernel costs a second of compiling."""
    base = tmp_path_factory.getbasetemp()
    root = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "kernels"
    root.mkdir(exist_ok=True)
    return root


@pytest.fixture(autouse=True)
def kernel_cache(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The test's kernel cache directory: never the user's, and shared among the GPU tests alone."""
    name = "shared_cache" if request.node.get_closest_marker("gpu") else "tmp_path"
    root: Path = request.getfixturevalue(name) / "cuflash"
    monkeypatch.setenv("CUFLASH_CACHE_DIR", str(root))
    yield root
