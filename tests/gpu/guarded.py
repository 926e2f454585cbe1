"""Attention on arrays that begin or end at the border of mapped device memory: run in a process of its own."""

from __future__ import annotations

import itertools
import json
from math import prod
from typing import Any

import cupy as cp
from cuda.bindings import driver as cu

import cuflash
from tests.gpu.support import Array, assert_same_bits, assign, draw_qkv


def _check(result: tuple[Any, ...]) -> Any:
    if result[0] != cu.CUresult.CUDA_SUCCESS:
        raise RuntimeError(str(result[0]))
    return result[1] if len(result) == 2 else result[1:]


class Guarded:
    """One mapped granule of device memory between two that are reserved but not mapped."""

    def __init__(self, nbytes: int) -> None:
        prop = cu.CUmemAllocationProp()
        prop.type = cu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        prop.location.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        prop.location.id = 0
        minimum = cu.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        granule = _check(cu.cuMemGetAllocationGranularity(prop, minimum))
        self.size = -(-nbytes // granule) * granule
        base = int(_check(cu.cuMemAddressReserve(self.size + 2 * granule, 0, 0, 0)))
        self.start = base + granule
        handle = _check(cu.cuMemCreate(self.size, prop, 0))
        _check(cu.cuMemMap(self.start, self.size, 0, handle, 0))
        access = cu.CUmemAccessDesc()
        access.location = prop.location
        access.flags = cu.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        _check(cu.cuMemSetAccess(self.start, self.size, [access], 1))

    def place(self, shape: tuple[int, ...], dtype: Any, at_end: bool) -> Array:
        nbytes = prod(shape) * dtype.itemsize
        offset = self.size - nbytes if at_end else 0
        memory = cp.cuda.UnownedMemory(self.start, self.size, self)
        return cp.ndarray(shape, dtype, cp.cuda.MemoryPointer(memory, offset))


def main() -> None:
    cp.zeros(1)  # the primary context is current from here on
    pages = [Guarded(1 << 21) for _ in range(4)]
    lengths = [(1, 1), (65, 63), (130, 131), (300, 77)]
    dims = [(64, 64), (128, 128), (33, 64), (40, 72), (100, 100)]
    calls = 0
    for (nq, nk), d, at_end in itertools.product(lengths, dims, (True, False)):
        arrays = draw_qkv((nq, nk), (3, 1), d, "bfloat16", seed=nk)
        placed = [page.place(x.shape, x.dtype, at_end) for page, x in zip(pages, arrays, strict=False)]
        for target, x in zip(placed, arrays, strict=True):
            assign(target, x)
        expected = cuflash.attention(*placed, causal=True)
        out = pages[3].place(expected.shape, expected.dtype, at_end)
        cuflash.attention(*placed, causal=True, out=out)
        cp.cuda.Device().synchronize()
        assert_same_bits(out, expected)
        calls += 1
    print(json.dumps({"calls": calls}))


if __name__ == "__main__":
    main()
