"""Where a measurement was made: machine, clocks, versions, commit."""

from __future__ import annotations

import datetime
import importlib.metadata
import platform
import shutil
import subprocess
from pathlib import Path
from typing import Any

PACKAGES = (
    "cuflash",
    "numpy",
    "cupy-cuda12x",
    "cupy-cuda13x",
    "cuda-bindings",
    "nvidia-cuda-nvrtc",
    "nvidia-cuda-nvrtc-cu12",
    "torch",
    "dew-flash-attn-cu13",
    "jax",
    "jinja2",
    "ml_dtypes",
)

SMI_FIELDS = (
    "driver_version",
    "clocks.sm",
    "clocks.max.sm",
    "clocks.mem",
    "power.draw",
    "power.limit",
    "temperature.gpu",
)


def package_versions(names: tuple[str, ...] = PACKAGES) -> dict[str, str]:
    """Versions of those distributions that are installed; nothing is imported."""
    versions = {}
    for name in names:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def run_quietly(*command: str, cwd: Path | None = None) -> str | None:
    """A program's output, or None if it is absent or fails."""
    if shutil.which(command[0]) is None:
        return None
    try:
        done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=20, check=True)
    except (subprocess.SubprocessError, OSError):
        return None
    return done.stdout.strip()


def commit() -> str | None:
    """The commit of the checkout that this package lies in, with ``-dirty`` if files differ; None elsewhere."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None
    return run_quietly("git", "describe", "--always", "--abbrev=12", "--dirty", "--exclude=*", cwd=root)


def smi(ordinal: int) -> dict[str, str]:
    """What nvidia-smi says about a device now: driver, clocks in MHz, power in W."""
    out = run_quietly(
        "nvidia-smi", f"--id={ordinal}", f"--query-gpu={','.join(SMI_FIELDS)}", "--format=csv,noheader,nounits"
    )
    if out is None:
        return {}
    return dict(zip(SMI_FIELDS, (field.strip() for field in out.splitlines()[0].split(",")), strict=False))


def software() -> dict[str, Any]:
    """Commit, date and versions."""
    from .. import compiler

    return {
        "commit": commit(),
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "nvrtc": compiler.nvrtc_build(),
        "python": platform.python_version(),
        "packages": package_versions(),
    }


def describe(ordinal: int) -> dict[str, Any]:
    """Everything about this machine that a reader of the numbers needs."""
    from .. import driver, jit
    from ..explanation import device_model

    properties = driver.device_properties(ordinal)
    model = device_model(ordinal, jit.device_arch(ordinal))
    found = software() | {
        "device": properties.name,
        "compute_capability": list(properties.compute_capability),
        "multiprocessors": properties.multiprocessors,
        "clock_mhz": properties.clock_hz / 1e6,
        "peak_tflops": model.peak_flops / 1e12,
        "bandwidth_gb_s": properties.memory_bytes_per_second / 1e9,
        "l2_bytes": properties.l2_bytes,
        "nvidia_smi": smi(ordinal),
    }
    if "torch" in found["packages"]:
        import torch

        found["torch_cuda"] = torch.version.cuda
        found["cudnn"] = torch.backends.cudnn.version()
    return found
