"""JAX arrays on the CPU, and through CuPy as if they were on a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cuflash
from tests.oracle import DTYPES, assert_accurate, assert_lse, randn

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    jax = pytest.importorskip("jax")
    import jax.numpy as jnp

ROOT = Path(__file__).resolve().parents[2]
SHAPE = (2, 30, 4, 16)


def host_qkv(dtype: str = "float32") -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [randn(rng, SHAPE, DTYPES[dtype]) for _ in range(3)]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_jax_in_jax_out(dtype: str) -> None:
    host = host_qkv(dtype)
    arrays = [jnp.asarray(x) for x in host]
    out, lse = cuflash.attention(*arrays, causal=True, return_lse=True)
    for result in (out, lse):
        assert isinstance(result, jax.Array) and result.devices() == arrays[0].devices()
    assert out.dtype == arrays[0].dtype and out.shape == SHAPE and lse.dtype == jnp.float32
    bhsd = [x.swapaxes(1, 2) for x in host]
    assert_accurate(np.asarray(out).swapaxes(1, 2), *bhsd, causal="bottom_right")
    assert_lse(np.asarray(lse), *bhsd, causal="bottom_right")
    assert np.array_equal(np.asarray(out), cuflash.attention(*host, causal=True))


def test_float64() -> None:
    with jax.enable_x64(True):
        out, lse = cuflash.attention(*map(jnp.asarray, host_qkv("float64")), return_lse=True)
        assert out.dtype == lse.dtype == jnp.float64
        assert_accurate(np.asarray(out).swapaxes(1, 2), *(x.swapaxes(1, 2) for x in host_qkv("float64")))


def test_agrees_with_dot_product_attention() -> None:
    """The layout bshd is JAX's, the top-left corner too."""
    q, k, v = map(jnp.asarray, host_qkv())
    longer = [jnp.concatenate([x, x], axis=1) for x in (k, v)]
    theirs = jax.nn.dot_product_attention(q, *longer, is_causal=True)
    ours = cuflash.attention(q, *longer, causal="top_left")
    np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)


def test_results_are_of_the_inputs_device() -> None:
    device = jax.devices("cpu")[-1]
    arrays = [jax.device_put(x, device) for x in host_qkv()]
    assert cuflash.attention(*arrays).devices() == {device}


def test_sharded_arrays_are_refused() -> None:
    """In a process whose CPU counts as two devices; single arrays on the second one are served there."""
    code = """
import jax, jax.numpy as jnp, numpy as np, cuflash
from jax.sharding import Mesh, NamedSharding, PartitionSpec
first, second = jax.devices()
x = jnp.ones((2, 8, 2, 16))
assert cuflash.attention(*[jax.device_put(x, second)] * 3).devices() == {second}
mixed = None
try:
    cuflash.attention(x, jax.device_put(x, second), x)
except ValueError as error:
    mixed = str(error)
assert mixed and "one device" in mixed, mixed
spread = jax.device_put(x, NamedSharding(Mesh(np.array([first, second]), ("b",)), PartitionSpec("b")))
try:
    cuflash.attention(spread, spread, spread)
except cuflash.UnsupportedError as error:
    assert "q is sharded over 2 devices" in str(error), error
else:
    raise AssertionError("not refused")
"""
    env = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_refusals() -> None:
    host = host_qkv()
    q, k, v = (jnp.asarray(x) for x in host)
    with pytest.raises(TypeError, match="out is a JAX array, which cannot be written"):
        cuflash.attention(q, k, v, out=jnp.zeros(SHAPE))
    with pytest.raises(
        TypeError, match="q is a JAX array and k a NumPy array; all arrays of a call must be of one kind"
    ):
        cuflash.attention(q, host[1], v)
    with pytest.raises(TypeError, match="q is a NumPy array and k a JAX array"):
        cuflash.attention(host[0], k, v)
    with pytest.raises(TypeError, match="q is a JAX array and out a NumPy array"):
        cuflash.attention(q, k, v, out=host[0].copy())
    with pytest.raises(ValueError, match="q has batch 1"):
        cuflash.attention(q[:1], k, v)
    with pytest.raises(TypeError, match="q has dtype uint16"):
        cuflash.attention(*(x.astype(jnp.uint16) for x in (q, k, v)))
    with pytest.raises(cuflash.UnsupportedError, match="q has dtype float8_e4m3fnuz"):
        cuflash.attention(*(x.astype(jnp.float8_e4m3fnuz) for x in (q, k, v)))


def test_precision_fp8() -> None:
    host = host_qkv()
    out, lse = cuflash.attention(*map(jnp.asarray, host), causal=True, return_lse=True, precision="fp8")
    expected, expected_lse = cuflash.attention(*host, causal=True, return_lse=True, precision="fp8")
    assert isinstance(out, jax.Array) and np.array_equal(out, expected) and np.array_equal(lse, expected_lse)


def test_nothing_is_copied_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """The backend reads JAX's own buffers."""
    seen: list[int] = []

    def spy(q: Any, k: Any, v: Any, **_: Any) -> None:
        seen.extend(x.__array_interface__["data"][0] for x in (q, k, v))

    monkeypatch.setattr("cuflash.cpu.attention_cpu", spy)
    arrays = [jnp.asarray(x) for x in host_qkv()]
    cuflash.attention(*arrays)
    assert seen == [x.unsafe_buffer_pointer() for x in arrays]


def test_empty() -> None:
    q, k = jnp.zeros((1, 3, 2, 8)), jnp.zeros((1, 0, 2, 8))
    out, lse = cuflash.attention(q, k, k, return_lse=True)
    assert (out == 0).all() and jnp.isneginf(lse).all() and out.shape == q.shape
    assert cuflash.attention(q[:, :0], q, q).shape == (1, 0, 2, 8)
    cuflash.warmup(q, q, q)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_backward(dtype: str) -> None:
    """JAX in, JAX out, the same numbers as on NumPy arrays."""
    host = [*host_qkv(dtype)]
    out, lse = cuflash.attention(*host, causal=True, return_lse=True)
    arguments = [np.ascontiguousarray(host[0][::-1]), *host, out, lse]
    dlse = np.random.default_rng(1).standard_normal(lse.shape, np.float32)
    expected = cuflash.attention_backward(*arguments, dlse=dlse, causal=True)
    arrays = [jnp.asarray(x) for x in arguments]
    grads = cuflash.attention_backward(*arrays, dlse=jnp.asarray(dlse), causal=True)
    for grad, wanted in zip(grads, expected, strict=True):
        assert isinstance(grad, jax.Array) and grad.devices() == arrays[0].devices()
        assert grad.dtype == arrays[0].dtype and np.array_equal(np.asarray(grad), wanted)


def test_backward_agrees_with_jax_grad() -> None:
    q, k, v = map(jnp.asarray, host_qkv())
    dout = jnp.flip(q, axis=1)
    out, lse = cuflash.attention(q, k, v, causal=True, return_lse=True)
    _, pull = jax.vjp(lambda q, k, v: jax.nn.dot_product_attention(q, k, v, is_causal=True), q, k, v)
    for ours, theirs in zip(cuflash.attention_backward(dout, q, k, v, out, lse, causal=True), pull(dout), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=1e-5)


def test_backward_refusals() -> None:
    q, k, v = map(jnp.asarray, host_qkv())
    out, lse = cuflash.attention(q, k, v, return_lse=True)
    with pytest.raises(TypeError, match=r"grads\[0\] is a JAX array, which cannot be written"):
        cuflash.attention_backward(out, q, k, v, out, lse, grads=(q, k, v))
    with pytest.raises(cuflash.UnsupportedError, match="q is a JAX tracer"):
        jax.jit(cuflash.attention_backward)(out, q, k, v, out, lse)
