"""The CUDA quantizer: bit for bit what the NumPy one computes."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

import cuflash
from cuflash.build import Job
from cuflash.kernels import select_config
from cuflash.problem import AttentionProblem
from cuflash.quantize_kernels import TASKS
from tests.gpu.support import DTYPES, HEAD_DIMS, host_qkv, poison_pool, target, to_device

pytestmark = pytest.mark.gpu

FLOAT8 = ("float8_e4m3fn", "float8_e5m2")
LENGTHS = ((1, 1), (127, 129), (300, 1000), (513, 255))


def kernels_ahead() -> list[Job]:
    """Those of all head dims, and of what the tests below take beside them."""
    calls = [(*dims, DTYPES[i % 2], min(16, 2 * math.gcd(*dims, 8))) for i, dims in enumerate(HEAD_DIMS)]
    calls += [(64, 64, "float16", access_bytes) for access_bytes in (16, 8, 2)]
    calls += [(dim, dim, "bfloat16", 16) for dim in (128, 256)]
    problems = [
        AttentionProblem(d, dv, dtype, "full", access_bytes, False, target(), task)  # type: ignore[arg-type]
        for d, dv, dtype, access_bytes in calls
        for task in TASKS
    ]
    return [(problem, select_config(problem)) for problem in problems]


def assert_same(found: cuflash.QuantizedTensor, expected: cuflash.QuantizedTensor) -> None:
    host = found.to_host()
    for name in ("mean", "scales", "payload"):
        mine, other = getattr(host, name), getattr(expected, name)
        assert (mine is None) == (other is None)
        if mine is not None:
            np.testing.assert_array_equal(mine.view(np.uint8), other.view(np.uint8), err_msg=f"{found.role} {name}")


def check(arrays: Any, **options: Any) -> None:
    poison_pool(1 << 22)
    found = cuflash.quantize_qkv(*map(to_device, arrays), **options)
    for mine, other in zip(found, cuflash.quantize_qkv(*arrays, **options), strict=True):
        assert_same(mine, other)


@pytest.mark.parametrize("index", range(len(HEAD_DIMS)), ids=lambda i: str(HEAD_DIMS[i]))
def test_head_dims(index: int) -> None:
    dtype, lengths = DTYPES[index % 2], LENGTHS[index % len(LENGTHS)]
    q, k, v = host_qkv(lengths, (4, 2), HEAD_DIMS[index], dtype, batch=2, seed=index)
    for hadamard in (False, True):
        check((q, k + k.dtype.type(3), v), hadamard=hadamard, seed=index, dtype=FLOAT8[index % 2])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", FLOAT8)
def test_values_of_every_kind(dtype: str, form: str) -> None:
    """Zeros of both signs, NaNs, infinities, subnormal numbers, tiles of nothing else, all sizes that the dtype has."""
    rng = np.random.default_rng(0)
    for exponent in (-130, -24, -14, 0, 10, 100):
        arrays = []
        for x in host_qkv((300, 400), (2, 2), (64, 64), dtype, seed=exponent + 200):
            with np.errstate(all="ignore"):
                values = np.ldexp(x.astype(np.float64), exponent)
                for value in (np.nan, -np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-40):
                    values[0, rng.integers(300), rng.integers(2), rng.integers(64)] = value
                values[0, 128:256, 1] = rng.choice([0.0, np.nan, np.inf])
                arrays.append(values.astype(x.dtype))
        check(arrays, dtype=form, hadamard=exponent % 4 == 0)


def test_layouts_and_tensors_alone() -> None:
    q, k, v = (np.ascontiguousarray(x.swapaxes(1, 2)) for x in host_qkv((200, 300), (4, 2), (128, 64), "bfloat16"))
    check((q, k, v), layout="bhsd", center=False, hadamard=True)
    for role, x in zip("qkv", (q, k, v), strict=True):
        found = cuflash.quantize(to_device(x), role=role, layout="bhsd")  # type: ignore[arg-type]
        assert_same(found, cuflash.quantize(x, role=role, layout="bhsd"))  # type: ignore[arg-type]


def test_strides() -> None:
    arrays = host_qkv((130, 260), (2, 2), (64, 64), "float16")
    wide = [to_device(x.repeat(2, axis=3))[..., ::2] for x in arrays]
    apart = [to_device(np.pad(x, ((0, 0), (0, 0), (0, 0), (8, 4))))[..., 8:72] for x in arrays]
    expected = cuflash.quantize_qkv(*arrays)
    for strided in (wide, apart):
        for mine, other in zip(cuflash.quantize_qkv(*strided), expected, strict=True):
            assert_same(mine, other)


def test_a_long_call() -> None:
    """More tiles than thread blocks, heads of both ends of the work."""
    arrays = host_qkv((4096, 4096), (8, 8), (128, 128), "bfloat16", batch=2)
    check(arrays, hadamard=True)


def test_means_are_those_of_the_call() -> None:
    """The kernel of the codes begins while that of the means runs; the means' memory may still hold another call's."""
    arrays = host_qkv((1, 5000), (2, 2), (256, 256), "bfloat16")
    calls = [arrays, [x + np.ones((), x.dtype) for x in arrays]]
    expected = [cuflash.quantize_qkv(*each) for each in calls]
    on_gpu = [[to_device(x) for x in each] for each in calls]
    for turn in range(20):
        q8, k8, v8 = cuflash.quantize_qkv(*on_gpu[turn % 2])
        for mine, other in zip((q8, k8, v8), expected[turn % 2], strict=True):
            assert_same(mine, other)
        del q8, k8, v8  # the pool gives their memory to the next call
