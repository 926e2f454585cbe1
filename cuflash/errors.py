"""The exceptions that cuflash raises beside ValueError (shapes) and TypeError (types)."""

from __future__ import annotations

__all__ = ["CompileError", "DriverError", "MissingKernelError", "UnsupportedError"]

INSTALL_CUDA = (
    "install cuflash with its extra cuda13 (drivers of CUDA 13) or cuda12 (of CUDA 12), in a checkout of it: "
    "pip install '.[cuda13]'"
)
"""What messages advise where a package for the GPU is missing."""


class UnsupportedError(NotImplementedError):
    """A legal request that cuflash does not serve; the message names the rule and what to do instead."""


class MissingKernelError(RuntimeError):
    """No compiled kernel was found and compiling is switched off (``CUFLASH_DISABLE_JIT``) or impossible."""


class DriverError(RuntimeError):
    """A call of the CUDA driver failed, or there is no usable driver."""


class CompileError(RuntimeError):
    """NVRTC refused a kernel.

    Attributes
    ----------
    log : str
        NVRTC's log.
    source_path : str or None
        Where the rendered source was written, if it could be.
    """

    def __init__(self, message: str, log: str = "", source_path: str | None = None) -> None:
        super().__init__(message)
        self.log = log
        self.source_path = source_path
