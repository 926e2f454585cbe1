"""Versions, devices, compiler, cache, frameworks and environment switches of this machine."""

from __future__ import annotations

import argparse
import os
import platform

from ..errors import DriverError, MissingKernelError, UnsupportedError
from .screen import Screen

PACKAGES = (
    "jinja2",
    "ml_dtypes",
    "cuda-bindings",
    "nvidia-cuda-nvrtc",
    "nvidia-cuda-nvrtc-cu12",
    "nvidia-cuda-runtime",
    "nvidia-cuda-runtime-cu12",
)
FRAMEWORKS = ("cupy-cuda12x", "cupy-cuda13x", "torch", "jax")

SWITCHES = {
    "CUFLASH_CACHE_DIR": "directory of the kernel cache",
    "CUFLASH_CACHE_SIZE": "its bound, such as 512M; 0: no disk cache",
    "CUFLASH_PREBUILT_DIR": "directory of kernels compiled elsewhere, only read",
    "CUFLASH_DISABLE_JIT": "1: never compile",
    "CUFLASH_LINEINFO": "1: compile with source positions for profilers",
}


def configure(parser: argparse.ArgumentParser) -> None:
    """No options."""


def run(args: argparse.Namespace, screen: Screen) -> int:
    from .. import __version__
    from ..bench.environment import package_versions
    from ..settings import read_settings
    from .cache import cache_items

    screen.heading("cuflash")
    screen.pairs({"version": __version__, "python": platform.python_version()} | package_versions(PACKAGES))
    screen.heading("GPU")
    screen.pairs(device_items())
    screen.heading("compiler")
    screen.pairs(compiler_items())
    screen.heading("kernel cache")
    screen.pairs(cache_items(read_settings()))
    screen.heading("array frameworks found")
    screen.pairs(package_versions(("numpy", *FRAMEWORKS)))
    screen.heading("environment switches")
    width = max(len(os.environ.get(name, "not set")) for name in SWITCHES)
    screen.pairs({name: f"{os.environ.get(name, 'not set'):<{width}}  {text}" for name, text in SWITCHES.items()})
    return 0


def device_items() -> dict[str, str]:
    """The devices, each with its compile target."""
    from .. import driver
    from ..text import size

    try:
        count = driver.device_count()
    except DriverError as error:
        return {"none": str(error)}
    items = {}
    for ordinal in range(count):
        found = driver.device_properties(ordinal)
        items[f"cuda:{ordinal}"] = (
            f"{found.name}, compute capability {found.compute_capability[0]}.{found.compute_capability[1]}, "
            f"{found.multiprocessors} SMs at up to {found.clock_hz / 1e6:.0f} MHz, {size(found.memory_bytes)} at "
            f"{found.memory_bytes_per_second / 1e12:.2f} TB/s, {size(found.l2_bytes)} of L2; {target_text(ordinal)}"
        )
    return items or {"none": "the driver reports no device"}


def target_text(ordinal: int) -> str:
    from .. import jit, kernels

    try:
        return f"kernels for {' and '.join(kernels.device_targets(jit.device_arch(ordinal).name))}"
    except UnsupportedError as error:
        return f"not usable: {error}"


def compiler_items() -> dict[str, str]:
    """NVRTC, or what to do about its absence."""
    from .. import compiler

    try:
        return {"NVRTC": compiler.nvrtc_build(), "file": compiler.nvrtc_path() or "unknown"}
    except MissingKernelError as error:
        return {"NVRTC": f"none: {error}"}
