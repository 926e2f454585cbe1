"""A kernel of a few lines for tests of the compiler and the cache: what NVRTC makes of it takes milliseconds."""

from __future__ import annotations

import pytest

from cuflash.compiler import nvrtc_build
from cuflash.errors import MissingKernelError
from cuflash.render import Source, compile_options

SYMBOL = "tiny_kernel"

TEXT = """\
#include "device/scale.cuh"
extern "C" __global__ void tiny_kernel(float* x) {
    __shared__ float staged[64];
    staged[threadIdx.x] = x[threadIdx.x];
    __syncthreads();
    x[threadIdx.x] = scaled(staged[63 - threadIdx.x]);
}
"""

HEADERS = {
    "device/scale.cuh": '#pragma once\n#include "device/factor.cuh"\nfloat scaled(float x) { return kFactor * x; }\n',
    "device/factor.cuh": "#pragma once\nconstexpr float kFactor = 3.0f;  // Ω: any text\n",
}


def source(text: str = TEXT, arch: str = "sm_80", *, lineinfo: bool = False, **headers: str) -> Source:
    """The tiny kernel, or another text under its name; ``headers`` replace those of ``device/``."""
    changed = {f"device/{name}.cuh": header for name, header in headers.items()}
    return Source(text, {**HEADERS, **changed}, SYMBOL, compile_options(arch, lineinfo=lineinfo), arch)


def require_nvrtc() -> str:
    """NVRTC's build; skips the test where there is none."""
    try:
        return nvrtc_build()
    except MissingKernelError as error:
        pytest.skip(str(error))
