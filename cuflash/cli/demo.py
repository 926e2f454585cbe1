"""What this machine can do: kernels, speed, accuracy and memory traffic; without a GPU on the CPU.

Without a GPU the NumPy backend runs, and the GPU kernels are compiled, which needs NVRTC but no GPU.
"""

from __future__ import annotations

import argparse

from .screen import Screen


def configure(parser: argparse.ArgumentParser) -> None:
    """No options."""


def run(args: argparse.Namespace, screen: Screen) -> int:
    from ..demo import run_demo

    return run_demo(screen)
