"""The GPUs that kernels are built for: limits that a config must keep, and which target a device takes."""

from __future__ import annotations

from typing import NamedTuple

from ..errors import UnsupportedError

KIB = 1024


class Arch(NamedTuple):
    """A compile target and its limits (CUDA C++ Programming Guide, compute capabilities)."""

    name: str
    smem_per_block: int
    smem_per_sm: int
    registers_per_sm: int = 65536
    registers_per_thread: int = 255

    @property
    def compute_capability(self) -> tuple[int, int]:
        digits = self.name.removeprefix("sm_").rstrip("a")
        return int(digits[:-1]), int(digits[-1])

    @property
    def adds_vectors(self) -> bool:
        """Whether ``red.global.add`` takes four fp32 numbers at once."""
        return self.compute_capability >= (9, 0)

    @property
    def overlaps_launches(self) -> bool:
        """Whether a kernel can begin before the one before it is done."""
        return self.compute_capability >= (9, 0)

    @property
    def converts_float8(self) -> bool:
        """Whether an instruction rounds to 8-bit floats."""
        return self.compute_capability >= (8, 9)

    @property
    def multiplies_float8(self) -> bool:
        """Whether ``mma.sync`` of 8-bit floats is hardware's: on 9.0 and 10.x ptxas converts and takes that of fp16."""
        return self.compute_capability == (8, 9) or self.compute_capability >= (12, 0)

    @property
    def specific(self) -> bool:
        """Whether its code uses instructions of one compute capability, and so runs on no other."""
        return self.name.endswith("a")


ARCHES = {
    arch.name: arch
    for arch in (
        Arch("sm_80", 163 * KIB, 164 * KIB),
        Arch("sm_86", 99 * KIB, 100 * KIB),
        Arch("sm_89", 99 * KIB, 100 * KIB),
        Arch("sm_90", 227 * KIB, 228 * KIB),
        Arch("sm_90a", 227 * KIB, 228 * KIB),
        Arch("sm_100", 227 * KIB, 228 * KIB),
        Arch("sm_120", 99 * KIB, 100 * KIB),
    )
}


def arch_for(compute_capability: tuple[int, int]) -> Arch:
    """The target whose code runs on a device, and which names the device: never one with an ``a``.

    Cubins run on later minor revisions of their major one, so 8.7 takes sm_86's code, 10.3 sm_100's, 12.1 sm_120's.
    A device of a later major revision takes the newest target, as PTX.

    Raises
    ------
    UnsupportedError
        Below compute capability 8.0.
    """
    if compute_capability < (8, 0):
        major, minor = compute_capability
        raise UnsupportedError(
            f"the GPU has compute capability {major}.{minor}; cuflash's kernels need 8.0 (Ampere) or later: "
            "use a newer GPU, or pass NumPy arrays to run on the CPU"
        )
    return [a for a in ARCHES.values() if a.compute_capability <= compute_capability and not a.specific][-1]


def needs_ptx(arch: Arch, compute_capability: tuple[int, int]) -> bool:
    """Whether a device can only run the target's PTX, because its major revision is later."""
    return arch.compute_capability[0] != compute_capability[0]
