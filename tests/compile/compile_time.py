"""How long a kernel takes to compile, in CPU seconds of a core that nothing else slows down.

The second thread of a shared core, or a neighbour's virtual machine, makes the same work take up to twice the CPU
time, for minutes at a time. So a text that never changes is compiled before and after a kernel, and the kernel's time
is divided by how many times as long as on a core of its own that took.
"""

from __future__ import annotations

from cuflash.compiler import compile_source
from cuflash.problem import AttentionProblem
from cuflash.render import Source, compile_options
from tests.compile.shipped import compile_shipped

YARDSTICK_SECONDS = 0.39
"""CPU time of the yardstick on such a core: a Xeon of 2.8 GHz, NVRTC 13.0. Faster ones are not held to less."""
YARDSTICK = """
extern "C" __global__ void yardstick(const float* a, const float* b, float* c) {
    __shared__ float tile[32][32];
    float sums[32] = {};
    for (int k = 0; k < 1024; k += 16) {
        for (int i = 0; i < 32; i++) tile[i][threadIdx.x % 32] = a[k * 32 + i * 32 + threadIdx.x];
        __syncthreads();
        #pragma unroll
        for (int i = 0; i < 16; i++) {
            const float x = b[k + i];
            #pragma unroll
            for (int j = 0; j < 32; j++) sums[j] = fmaf(tile[j][i], x, sums[j]);
        }
        __syncthreads();
    }
    for (int j = 0; j < 32; j++) c[j * 32 + threadIdx.x] = sums[j];
}
"""


def slowness() -> float:
    """How many times as long as on a core of its own a compilation takes at present; at least 1."""
    source = Source(YARDSTICK, {}, "yardstick", compile_options("sm_90a"), "sm_90a")
    return max(1.0, compile_source(source).seconds / YARDSTICK_SECONDS)


def seconds_alone(problem: AttentionProblem, limit: float) -> float:
    """CPU seconds of compiling a shipped kernel on a core of its own, the least of up to four times.

    It is enough that one of them keeps within a limit.
    """
    least = float("inf")
    for _ in range(4):
        before = slowness()
        seconds = compile_shipped(problem).seconds
        least = min(least, seconds / ((before + slowness()) / 2))
        if least <= limit:
            break
    return least
