"""Arrays, checks and small tools that the GPU tests share. CuPy is imported when a test runs, never at collection."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from unittest import mock

import ml_dtypes
import numpy as np

import cuflash
from cuflash import kernels
from cuflash.arch import sm90
from cuflash.config import KernelConfig
from cuflash.problem import AttentionProblem, Task
from tests.mutation import Mutation
from tests.operands import shapes_of
from tests.oracle import assert_accurate, assert_lse

if TYPE_CHECKING:
    from cuflash.build import Job
    from cuflash.compiled import Compiled

ROOT = Path(__file__).resolve().parents[2]
DTYPES = ("float16", "bfloat16")
# (D, Dv): every kind of access (16, 8, 4, 2 bytes), padded and exact tiles, Dv below and above D.
HEAD_DIMS = (
    (1, 1), (2, 2), (8, 8), (16, 16), (31, 31), (32, 32), (33, 64), (40, 72), (64, 1), (64, 64), (64, 256), (72, 72),
    (80, 80), (96, 96), (100, 100), (112, 112), (127, 128), (128, 64), (128, 128), (130, 130), (160, 160), (192, 128),
    (192, 192), (224, 224), (256, 64), (255, 255), (256, 256),
)  # fmt: skip
CAUSAL = (False, "bottom_right", "top_left")

Array = Any
"""A CuPy array, or another framework's."""


def numpy_dtype(name: str) -> np.dtype[Any]:
    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)


def to_device(x: np.ndarray) -> Array:
    """A CuPy copy; 16-bit types travel as integers, so that no conversion can touch their bits."""
    import cupy as cp

    return cp.asarray(x.view(np.uint16)).view(x.dtype) if x.dtype.itemsize == 2 else cp.asarray(x)


def to_host(x: Array) -> np.ndarray:
    import cupy as cp

    return cp.asnumpy(x.view(np.uint16)).view(x.dtype) if x.dtype.itemsize == 2 else cp.asnumpy(x)


def assign(target: Array, source: Array) -> None:
    """target[...] = source for CuPy arrays of one 16-bit type, whatever the strides, as integers."""
    target.view(np.uint16)[...] = source.view(np.uint16)


def host_normal(shape: tuple[int, ...], dtype: str, seed: int, spread: float = 1.0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return (spread * rng.standard_normal(shape, dtype=np.float32)).astype(numpy_dtype(dtype))


def normal(shape: tuple[int, ...], dtype: str, seed: int, spread: float = 1.0) -> Array:
    return to_device(host_normal(shape, dtype, seed, spread))


def host_qkv(
    lengths: tuple[int, int],
    heads: tuple[int, int] = (2, 2),
    dims: tuple[int, int] = (64, 64),
    dtype: str = "float16",
    batch: int = 1,
    seed: int = 0,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Normal q, k, v in the layout bshd: lengths are (Nq, Nk), heads (Hq, Hk), dims (D, Dv)."""
    q, k, v = shapes_of(lengths, heads, dims, batch)
    return host_normal(q, dtype, 3 * seed), host_normal(k, dtype, 3 * seed + 1), host_normal(v, dtype, 3 * seed + 2)


def draw_qkv(*args: Any, **kwargs: Any) -> tuple[Array, Array, Array]:
    """The arrays of `host_qkv` on the device. What a test changes in them it changes on the host."""
    q, k, v = host_qkv(*args, **kwargs)
    return to_device(q), to_device(k), to_device(v)


def poisoned(shape: tuple[int, ...], dtype: Any) -> Array:
    """An array of NaN."""
    return to_device(np.full(shape, np.nan, np.dtype(dtype)))


def poison_pool(nbytes: int) -> None:
    """Leaves NaN in memory that CuPy's pool will hand out next for arrays of up to this size."""
    import cupy as cp

    for size in {nbytes, max(nbytes // 2, 512), 512}:
        cp.full(-(-size // 4), np.nan, np.float32)


def bits(x: Array) -> np.ndarray:
    host = to_host(x) if hasattr(x, "__cuda_array_interface__") or hasattr(x, "get") else np.asarray(x)
    return host.view({2: np.uint16, 4: np.uint32}[host.dtype.itemsize])


def assert_same_bits(actual: Array, expected: Array, what: str = "arrays") -> None:
    a, b = bits(actual), bits(expected)
    assert a.shape == b.shape, f"{what}: shape {a.shape} against {b.shape}"
    if different := int(np.count_nonzero(a != b)):
        where = tuple(int(i) for i in np.argwhere(a != b)[0])
        values = f"{a[where]:#x} and {b[where]:#x}"
        raise AssertionError(f"{what}: {different} of {a.size} elements differ, first at {where}: {values}")


def swap_layout(x: Array) -> Array:
    """The bhsd view of a bshd array, and back."""
    return x.swapaxes(1, 2)


def target() -> str:
    """The compile target that names the current device."""
    import cupy as cp

    from cuflash.arch import arch_for

    digits = cp.cuda.Device().compute_capability
    return arch_for((int(digits[:-1]), int(digits[-1]))).name


def tile(d: int, dv: int, dtype: str, causal: object, access_bytes: int = 16) -> tuple[int, int]:
    """(block_m, block_n) of the kernel that such a call takes on this device, if it has few queries."""
    mask = "causal" if causal else "full"
    arch = kernels.device_targets(target(), access_bytes)[-1]
    problem = AttentionProblem(d, dv, dtype, mask, access_bytes, False, arch)  # type: ignore[arg-type]
    config = kernels.select_config(list(kernels.variants_by_length(problem))[-1])
    return config.block_m, config.block_n


def require_hopper(task: Task = "forward") -> None:
    """Skips a test of Hopper kernels where calls take none: on other devices, and under ``--family`` of others."""
    import pytest  # not for the scripts that this module serves, too

    if kernels.device_targets(target(), task=task)[-1] not in kernels.TMA_TARGETS.values():
        pytest.skip("GPU test: of Hopper kernels, which calls do not take in this run")


def jobs_of(explained: cuflash.Explanation) -> list[Job]:
    """The kernels of a call, for `cuflash.build`."""
    return [(kernel.problem, kernel.config) for kernel in explained.kernels]


class Variant(NamedTuple):
    """A kernel with a config of the test's choice and, perhaps, changes in its text."""

    problem: AttentionProblem
    config: KernelConfig
    mutations: tuple[Mutation, ...] = ()

    @property
    def unchanged(self) -> Variant:
        """The kernel as it is rendered."""
        return self._replace(mutations=())


def compile_variant(variant: Variant) -> Compiled:
    from cuflash.compiler import compile_source
    from cuflash.render import render

    source = render(variant.problem, variant.config)
    for mutation in variant.mutations:
        source = mutation.apply(source)
    return compile_source(source)


@contextmanager
def kernel_in_use(variant: Variant, compiled: Compiled) -> Iterator[None]:
    """Inside, calls that need the kernel of the variant's problem, but for their length, take it; at least one must."""
    from cuflash import counters, driver, jit

    problem, config, _ = variant
    device = driver.current_device()
    kernel = driver.load_kernel(compiled, config.smem_bytes(problem), device)
    if jit.takes_counter(config):
        counters.prepare(device)
    loaded = jit.LoadedKernel(kernel, problem, config, compiled, "compiled")
    usual = jit._loaded.get((problem, device))
    is_short = sm90.is_short
    lengths = mock.patch.object(sm90, "is_short", lambda asked, _: problem.short and is_short(asked, 0))
    with kernels.use_family(config.family), lengths:  # the first of which also forgets plans, at both ends
        jit._loaded[problem, device] = loaded
        try:
            yield
            assert any(plan.loaded is loaded for plan in jit.PLANS.values()), "no call took the kernel"
        finally:
            del jit._loaded[problem, device]
            if usual is not None:
                jit._loaded[problem, device] = usual


def check_attention(
    q: Array, k: Array, v: Array, *, causal: bool | str = False, scale: float | None = None, layout: str = "bshd"
) -> Array:
    """Runs into poisoned memory, judges output and LSE against the float64 oracle, and returns the output."""
    out = poisoned((*q.shape[:3], v.shape[3]), q.dtype)
    poison_pool(4 * q.size // max(1, q.shape[3]))
    options = {"causal": causal, "scale": scale, "layout": layout}
    result, lse = cuflash.attention(q, k, v, **options, out=out, return_lse=True)
    assert result is out
    host = [to_host(x if layout == "bhsd" else swap_layout(x)) for x in (out, q, k, v)]
    corner = {False: False, True: "bottom_right"}.get(causal, causal)  # type: ignore[call-overload]
    assert_accurate(*host, causal=corner, scale=scale)
    assert_lse(to_host(lse), *host[1:], causal=corner, scale=scale)
    return out


def spin(cycles: int = 200_000_000) -> None:
    """Keeps the current stream busy: about 0.1 s for the default."""
    import cupy as cp

    code = 'extern "C" __global__ void spin(long long n) { long long t = clock64(); while (clock64() - t < n) {} }'
    cp.RawKernel(code, "spin")((1,), (1,), (np.int64(cycles),))


def run_python(code: str, env: Mapping[str, str] | None = None, timeout: int = 100) -> Any:
    """Runs code in a fresh interpreter, with this one's kernel family, and returns the JSON of its last line."""
    if family := kernels.family_in_use():
        code = f"from cuflash.kernels import use_family\nwith use_family({family!r}):\n    exec({code!r}, globals())"
    full = {**os.environ, "PYTHONPATH": str(ROOT), **(env or {})}
    done = subprocess.run(
        [sys.executable, "-c", code], env=full, cwd=ROOT, capture_output=True, text=True, timeout=timeout, check=False
    )
    assert done.returncode == 0, f"exit {done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return json.loads(done.stdout.splitlines()[-1])
