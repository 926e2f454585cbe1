"""What a compilation gives and the disk cache keeps; apart from the compiler, which a kernel in the cache needs not."""

from __future__ import annotations

import re
from typing import NamedTuple


class Compiled(NamedTuple):
    """A compiled kernel.

    Attributes
    ----------
    cubin : bytes
        Machine code, or PTX text when `is_ptx`.
    symbol : str
        The kernel's name in it.
    arch : str
        The target it was compiled for; a ``compute_`` one when `is_ptx`.
    registers : int
        Per thread; 0 when `is_ptx`, like the three figures that follow.
    spill_bytes, stack_bytes, static_smem : int
        Spilled registers (the larger of stores and loads), stack frame, static shared memory.
    seconds : float
        CPU time of the compiling thread, in which NVRTC does all its work.
    log : str
        NVRTC's log.
    nvrtc : str
        The NVRTC build, for example ``"13.0.88"``.
    is_ptx : bool
        The driver makes the machine code, because NVRTC does not know the device.
    """

    cubin: bytes
    symbol: str
    arch: str
    registers: int
    spill_bytes: int
    stack_bytes: int
    static_smem: int
    seconds: float
    log: str
    nvrtc: str
    is_ptx: bool = False

    @property
    def warnings(self) -> tuple[str, ...]:
        """The lines of the log in which NVRTC or ptxas warns; (C75xx) are ptxas's notes on serialised instructions."""
        return tuple(line.strip() for line in self.log.splitlines() if re.search(r"warning *[#:]|\(C75\d\d\)", line))
