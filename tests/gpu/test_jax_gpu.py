"""`cuflash.jax.attention` on a GPU: under JAX's transformations, on XLA's stream, in XLA's memory."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import pytest

import cuflash
from tests.conftest import gpu_count
from tests.gpu.support import (
    CAUSAL,
    DTYPES,
    assert_same_bits,
    check_attention,
    host_normal,
    host_qkv,
    swap_layout,
    to_device,
    to_host,
)
from tests.gradients import Backward, assert_gradients

pytestmark = pytest.mark.gpu


@pytest.fixture
def jax(jax_on_gpu: Any) -> Any:
    return jax_on_gpu


def on_device(jax: Any, host: Any) -> list[Any]:
    return [jax.numpy.asarray(x) for x in host]


def with_lse(*arrays: Any, **options: Any) -> Any:
    return cuflash.jax.attention(*arrays, return_lse=True, **options)


def same(results: Any, expected: Any) -> None:
    """JAX arrays against CuPy's, bit for bit."""
    for result, wanted in zip(results, expected, strict=True):
        assert_same_bits(np.asarray(result), wanted)


def slow_zero(jax: Any, big: Any) -> Any:
    """A zero that takes XLA some tenths of a second."""
    for _ in range(12):
        big = jax.numpy.tanh(big @ big)
    return big[0, 0] * 0


def big_matrix(jax: Any) -> Any:
    return jax.numpy.full((6000, 6000), 1e-3, jax.numpy.float32)


# --- forward ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("causal", CAUSAL)
@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_are_those_of_cupy(jax: Any, dtype: str, layout: str, causal: Any) -> None:
    host = host_qkv((130, 190), (6, 2), (64, 64), dtype, batch=2)
    if layout == "bhsd":
        host = tuple(np.ascontiguousarray(swap_layout(x)) for x in host)
    arrays, options = [to_device(x) for x in host], {"causal": causal, "layout": layout}
    expected = check_attention(*arrays, **options)
    lse = cuflash.attention(*arrays, **options, return_lse=True)[1]
    for function in (partial(with_lse, **options), partial(cuflash.attention, return_lse=True, **options)):
        same(jax.jit(function)(*on_device(jax, host)), (expected, lse))
    same(with_lse(*on_device(jax, host), **options), (expected, lse))
    same([cuflash.jax.attention(*on_device(jax, host), **options)], [expected])


@pytest.mark.parametrize("dims", [(1, 1), (31, 31), (40, 72), (64, 256), (128, 128), (192, 128), (256, 256)], ids=str)
def test_head_dims(jax: Any, dims: tuple[int, int]) -> None:
    host = host_qkv((70, 90), (2, 1), dims, "bfloat16")
    expected = check_attention(*map(to_device, host), causal=True)
    same([jax.jit(partial(cuflash.jax.attention, causal=True))(*on_device(jax, host))], [expected])


def test_on_the_stream_of_xla(jax: Any) -> None:
    """Between XLA's own kernels, in order with both, and nothing waits on the host."""
    host = host_qkv((200, 200), (4, 2), (64, 64), "bfloat16")
    expected = check_attention(*map(to_device, host), causal=True)

    @jax.jit
    def function(q: Any, k: Any, v: Any, big: Any) -> Any:
        zero = slow_zero(jax, big)
        q, k, v = (x + zero.astype(x.dtype) for x in (q, k, v))
        return jax.numpy.where(zero == 0, cuflash.jax.attention(q, k, v, causal=True), 7)

    arrays, big = on_device(jax, host), big_matrix(jax)
    function(*arrays, big).block_until_ready()
    for _ in range(3):
        out = function(*arrays, big)
        assert not out.is_ready(), "the call waited for the device"
        same([out], [expected])


def test_each_run_computes_anew(jax: Any) -> None:
    """XLA may put its own kernels into CUDA graphs, but must not replay the callback's with old addresses."""
    function = jax.jit(lambda q, k, v: jax.numpy.sin(cuflash.jax.attention(jax.numpy.sin(q) * 2, k, v) + 1) * 2)
    for seed in range(12):
        host = host_qkv((100, 100), (2, 2), (64, 64), "float16", seed=seed)
        q, k, v = on_device(jax, host)
        alone = cuflash.jax.attention(jax.numpy.sin(q) * 2, k, v)
        wanted = jax.numpy.sin(alone + 1) * 2
        np.testing.assert_allclose(function(q, k, v), wanted, rtol=0, atol=4 * float(jax.numpy.finfo(q.dtype).eps))


def test_results_are_written_in_place(jax: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    real = cuflash.jax.compute

    def spy(q: Any, k: Any, v: Any, causal: Any, scale: Any, layout: Any, return_lse: Any, out: Any, lse: Any) -> Any:
        seen.extend(x.data.ptr for x in (q, k, v, out, lse))
        return real(q, k, v, causal, scale, layout, return_lse, out, lse)

    monkeypatch.setattr(cuflash.jax, "compute", spy)
    arrays = on_device(jax, host_qkv((50, 50), (2, 2), (64, 64), "bfloat16"))
    results = jax.block_until_ready(with_lse(*arrays))
    assert seen == [x.unsafe_buffer_pointer() for x in (*arrays, *results)]


def test_many_in_flight_dropped_and_donated(jax: Any) -> None:
    host = host_qkv((500, 500), (8, 8), (64, 64), "bfloat16")
    expected = check_attention(*map(to_device, host), causal=True)
    plain = jax.jit(partial(cuflash.jax.attention, causal=True))
    donating = jax.jit(partial(cuflash.jax.attention, causal=True), donate_argnums=(0,))
    slowly, big = jax.jit(partial(slow_zero, jax)), big_matrix(jax)
    slowly(big).block_until_ready()
    for function in (plain, donating):
        slowly(big)
        flying = [function(*on_device(jax, host)) for _ in range(20)]
        junk = [jax.numpy.full(x.shape, np.nan, jax.numpy.bfloat16) for x in host for _ in range(8)]
        same(flying, [expected] * 20)
        del junk


def test_threads(jax: Any) -> None:
    """Also the first calls, which compile."""
    cases = []
    for dim in (24, 48, 56, 88):
        host = host_qkv((100, 100), (2, 2), (dim, dim), "float16")
        cases.append((jax.jit(cuflash.jax.attention), on_device(jax, host), host))
    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda case: [case[0](*case[1]) for _ in range(5)], cases * 3))
    for (_, _, host), outs in zip(cases * 3, results, strict=True):
        same(outs, [check_attention(*map(to_device, host))] * 5)


def test_vmap_and_scan(jax: Any) -> None:
    host = host_qkv((100, 150), (4, 2), (64, 64), "bfloat16", batch=6)
    expected, lse = cuflash.attention(*map(to_device, host), causal=True, return_lse=True)
    outer = [x.reshape(2, 3, 1, *x.shape[1:]) for x in on_device(jax, host)]
    function = partial(with_lse, causal=True)
    mapped = jax.jit(jax.vmap(jax.vmap(function)))(*outer)
    same([x.reshape(6, *x.shape[3:]) for x in mapped], (expected, lse))
    first = [x[0] for x in outer]
    shared = jax.vmap(function, in_axes=(0, None, None))(first[0], *(x[0] for x in first[1:]))
    alone = [function(q, first[1][0], first[2][0]) for q in first[0]]
    for i, result in enumerate(alone):
        same([x[i] for x in shared], map(np.asarray, result))
    _, scanned = jax.lax.scan(lambda _, one: (None, function(*one)), None, tuple(first))
    same([x[:, 0] for x in scanned], (expected[:3], lse[:3]))


@pytest.mark.parametrize(
    ("shape_q", "shape_k"),
    [((0, 3, 2), (0, 4, 2)), ((1, 0, 2), (1, 4, 2)), ((1, 3, 0), (1, 4, 0)), ((1, 3, 2), (1, 0, 2))],
)
def test_empty(jax: Any, shape_q: tuple[int, ...], shape_k: tuple[int, ...]) -> None:
    q, k = (jax.numpy.ones((*shape, 64), jax.numpy.bfloat16) for shape in (shape_q, shape_k))
    out, lse = jax.jit(with_lse)(q, k, k)
    assert out.shape == q.shape and (out == 0).all() and jax.numpy.isneginf(lse).all()


def test_rows_without_keys(jax: Any) -> None:
    out, lse = jax.jit(partial(with_lse, causal=True))(*on_device(jax, host_qkv((150, 60), dtype="bfloat16")))
    assert (out[:, :90] == 0).all() and jax.numpy.isneginf(lse[..., :90]).all()
    assert jax.numpy.isfinite(lse[..., 90:]).all()


def test_what_only_a_gpu_refuses_is_told(jax: Any) -> None:
    arrays = [x.astype(jax.numpy.float32) for x in on_device(jax, host_qkv((16, 16)))]
    for function in (cuflash.jax.attention, jax.jit(cuflash.jax.attention)):
        with pytest.raises((jax.errors.JaxRuntimeError, ValueError), match="the GPU kernels take float16 and bfloat16"):
            jax.block_until_ready(function(*arrays))
    host = host_qkv((16, 16))
    same([cuflash.jax.attention(*on_device(jax, host))], [check_attention(*map(to_device, host))])


@pytest.mark.skipif(gpu_count() < 2, reason="GPU test: fewer than two CUDA devices")
def test_several_devices(jax: Any) -> None:
    from jax.sharding import Mesh, NamedSharding
    from jax.sharding import PartitionSpec as P

    host = host_qkv((100, 150), (4, 2), (64, 64), "bfloat16", batch=4)
    expected = check_attention(*map(to_device, host), causal=True)
    function = partial(cuflash.jax.attention, causal=True)
    for device in jax.devices()[:2]:
        out = jax.jit(function)(*jax.device_put(host, device))
        assert out.devices() == {device}
        same([out], [expected])
    mesh = Mesh(np.array(jax.devices()[:2]), ("b",))
    sharded = [jax.device_put(x, NamedSharding(mesh, P("b"))) for x in host]
    mapped = jax.jit(jax.shard_map(function, mesh=mesh, in_specs=(P("b"),) * 3, out_specs=P("b")))
    for _ in range(3):
        same([mapped(*sharded)], [expected])
    same([jax.jit(function)(*sharded)], [expected])


# --- gradients -------------------------------------------------------------------------------------------------


def check_gradients(
    jax: Any, function: Callable[..., Any], host: tuple[np.ndarray, ...], causal: Any, dlse: bool = True
) -> None:
    """Judge the gradients of a function with the results of `with_lse` against the float64 oracle; layout bshd."""
    q, _, v = host
    dout = host_normal((*q.shape[:3], v.shape[3]), q.dtype.name, 11)
    results, pull = jax.vjp(function, *on_device(jax, host))
    out, lse = map(np.asarray, results)
    arriving = np.random.default_rng(12).standard_normal(lse.shape).astype(lse.dtype) * dlse
    grads = pull((jax.numpy.asarray(dout), jax.numpy.asarray(arriving)))
    arrays = (swap_layout(x) for x in (dout, *host, out))
    call = Backward(*arrays, lse, arriving if dlse else None, causal)
    assert_gradients(tuple(swap_layout(np.asarray(x)) for x in grads), call)


@pytest.mark.parametrize("transform", ["jit", "checkpoint"])
@pytest.mark.parametrize("causal", CAUSAL)
@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients(jax: Any, dtype: str, causal: Any, transform: str) -> None:
    function = getattr(jax, transform)(partial(with_lse, causal=causal))
    check_gradients(jax, function, host_qkv((130, 190), (6, 2), (64, 64), dtype, batch=2), causal)
    check_gradients(jax, function, host_qkv((150, 60), (2, 2), (128, 128), dtype), causal, dlse=False)


def test_gradients_are_those_of_the_plain_call(jax: Any) -> None:
    host = host_qkv((130, 130), (2, 2), (64, 64), "bfloat16")
    dout = host_normal(host[0].shape, "bfloat16", 11)
    arrays = [to_device(x) for x in host]
    out, lse = cuflash.attention(*arrays, causal=True, return_lse=True)
    plain = cuflash.attention_backward(to_device(dout), *arrays, out, lse, causal=True, deterministic=True)
    for deterministic in (False, True):
        function = jax.jit(partial(cuflash.jax.attention, causal=True, deterministic=deterministic))
        _, pull = jax.vjp(function, *on_device(jax, host))
        grads = pull(jax.numpy.asarray(dout))
        for ours, theirs in zip(grads, map(to_host, plain), strict=True):
            tolerance = 2**-7 * float(np.abs(theirs.astype(np.float32)).max())
            np.testing.assert_allclose(
                np.asarray(ours).astype(np.float32), theirs.astype(np.float32), rtol=2**-7, atol=tolerance
            )
    same(grads, plain)


def test_a_training_step(jax: Any) -> None:
    """Layers, a loss and a step under one jit; many steps in flight; the loss falls."""
    jnp = jax.numpy
    x, target = on_device(jax, host_qkv((128, 128), (4, 4), (64, 64), "bfloat16", batch=2)[:2])
    keys = jax.random.split(jax.random.key(0), 6)
    weights = [jax.random.normal(key, (64, 64), jnp.bfloat16) / 8 for key in keys]

    def loss(weights: Any) -> Any:
        y = x
        for i in (0, 3):
            y = y + cuflash.attention(*(y @ w for w in weights[i : i + 3]), causal=True)
        return jnp.square((y - target).astype(jnp.float32)).mean()

    @jax.jit
    def step(weights: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(weights)
        return value, [w - 0.5 * g for w, g in zip(weights, grads, strict=True)]

    values = []
    for _ in range(30):
        value, weights = step(weights)
        values.append(value)
    values = [float(value) for value in values]
    assert all(np.isfinite(values)) and values[-1] < values[0]


def test_vmap_of_gradients(jax: Any) -> None:
    """Of arrays that are not mapped the gradient is a sum."""
    q, k, v = on_device(jax, host_qkv((100, 150), (4, 2), (64, 64), "float16", batch=3))
    number = lambda q, k, v: cuflash.jax.attention(q, k, v, causal=True).astype(jax.numpy.float32).sum()  # noqa: E731
    mapped = jax.vmap(number, in_axes=(0, None, None))
    grads = jax.jit(jax.grad(lambda *a: mapped(*a).sum(), argnums=(0, 1, 2)))(q[:, None], k[:1], v[:1])
    parts = [jax.grad(number, argnums=(0, 1, 2))(q[i : i + 1], k[:1], v[:1]) for i in range(3)]
    sums = [sum(part[i].astype(jax.numpy.float32) for part in parts) for i in (1, 2)]
    wanted = [jax.numpy.stack([part[0] for part in parts]), *sums]
    for grad, want in zip(grads, wanted, strict=True):
        np.testing.assert_allclose(grad, want, rtol=2**-8, atol=2**-8 * float(abs(want).max()))
