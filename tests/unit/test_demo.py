"""`cuflash demo`: both of its ways, on small sizes."""

from __future__ import annotations

import io
import sys

import numpy as np
import pytest

from cuflash import demo, explanation
from cuflash.bench.inputs import Case
from cuflash.cli.screen import Screen
from cuflash.compiled import Compiled
from cuflash.driver import DeviceProperties
from cuflash.errors import INSTALL_CUDA, DriverError, MissingKernelError, UnsupportedError
from tests.unit import fake_cupy

FAKE_GPU = DeviceProperties("Fake GPU", (9, 0), 132, 1.98e9, 4.8e12, 1 << 37, 60 << 20, 232448, 233472)


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch):
    """Runs the demonstration on small sizes and returns what it showed."""
    monkeypatch.setattr(demo, "CPU_CASE_SHAPE", (1, 64, 2, 16))
    monkeypatch.setattr(
        demo,
        "GPU_CASES",
        (Case.of(64, False, 64, "bfloat16", batch=1, heads=2), Case.of(128, True, 64, "bfloat16", batch=1, heads=1)),
    )
    monkeypatch.setattr(demo, "PLANNED", ((32, "full"),))

    def run() -> str:
        out = io.StringIO()
        assert demo.run_demo(Screen(out)) == 0
        return out.getvalue()

    return run


def no_driver() -> int:
    raise DriverError("no CUDA driver")


def no_nvrtc() -> str:
    raise MissingKernelError("install NVRTC by pip")


def test_without_a_gpu_numpy_runs_and_says_why(shown, monkeypatch):
    monkeypatch.setattr(demo.driver, "device_count", no_driver)
    monkeypatch.setattr("cuflash.compiler.nvrtc_build", no_nvrtc)
    text = shown()
    for words in ("not used: no CUDA driver", "NumPy backend", "cuflash.attention", "stored scores", "install NVRTC"):
        assert words in text


@pytest.mark.compile
def test_without_a_gpu_kernels_are_compiled(shown, monkeypatch):
    monkeypatch.setattr(demo.driver, "device_count", no_driver)
    first, second = shown(), shown()
    for arch, family in (("sm_80", "sm80"), ("sm_90a", "sm90")):
        (line,) = (line for line in first.splitlines() if line.strip().startswith(arch))
        assert "D 32, full" in line and " s " in line
        assert f"{arch} cuflash_fwd_{family}_d32" in first
    assert second.count("  cached") == 2
    assert max(map(len, first[first.index("compiling") :].splitlines())) <= 80  # a narrow terminal


def test_an_old_gpu_or_no_cupy_is_named(monkeypatch):
    def too_old(device: int) -> None:
        raise UnsupportedError("compute capability 7.5")

    monkeypatch.setattr(demo.driver, "device_count", lambda: 1)
    monkeypatch.setattr(demo.jit, "device_arch", too_old)
    assert "7.5" in str(demo.gpu_obstacle())
    monkeypatch.setattr(demo.jit, "device_arch", lambda device: None)
    monkeypatch.setattr(demo.importlib.util, "find_spec", lambda name: None)
    assert f"CuPy is not installed: {INSTALL_CUDA}" == demo.gpu_obstacle()
    monkeypatch.setattr(demo.driver, "device_count", lambda: 0)
    assert "no device" in str(demo.gpu_obstacle())


def test_stored_scores_are_attention():
    from cuflash.api import attention

    q, k, v = np.random.default_rng(0).standard_normal((3, 2, 20, 3, 8)).astype(np.float32)
    np.testing.assert_allclose(demo.stored_scores(q, k, v), attention(q, k, v), rtol=1e-5, atol=1e-5)


def test_memory_of_stored_scores_is_measured():
    q = np.zeros((1, 256, 2, 8), np.float32)
    peaks = [demo.timed_on_cpu(lambda f=f: f(q, q, q))[2] for f in (demo.stored_scores, lambda *a: a[0].copy())]
    assert peaks[0] > 4 * 2 * 256**2 > peaks[1]


def test_with_a_gpu_every_case_is_shown(shown, monkeypatch):
    """The GPU's way, with NumPy for CuPy and kernels that are only planned."""
    code = Compiled(b"", "", "sm_90", 168, 0, 0, 0, 1.25, "", "13.0.88")
    states = iter(["no", "memory", "disk", "memory"])

    def explain(q, k, v, causal):
        e = explanation.explain(q, k, v, causal=causal, arch="sm_90")
        assert e.kernel is not None
        state = next(states)
        kernel = explanation.dataclasses.replace(e.kernel, cached=state, compiled=None if state == "no" else code)
        return explanation.dataclasses.replace(e, kernels=(kernel,))

    cupy = fake_cupy.module()
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setattr(demo, "gpu_obstacle", lambda: None)
    monkeypatch.setattr(demo, "explain", explain)
    monkeypatch.setattr(demo.driver, "device_properties", lambda ordinal: FAKE_GPU)
    monkeypatch.setattr(demo.driver, "device_compute_capability", lambda ordinal: (9, 0))
    text = shown()
    kernels, results = text.split("results")
    for words in ("Fake GPU", "d64_bf16_full", "compiled, 1.25 s", "d128_bf16_causal", "disk cache", "168"):
        assert words in kernels
    for words in ("D 64, full, H 2", "D 128, causal, H 1"):
        assert words in kernels
    for words in ("D 64, full", "D 128, causal", "x\n", "KiB", "%"):
        assert words in results
    assert max(map(len, text.splitlines())) <= 80
