"""`cuflash.jax.attention` on the CPU: under JAX's transformations, and its callbacks on a fake GPU.

How concrete JAX arrays go through the plain calls is in test_jax.py.
"""

from __future__ import annotations

import contextlib
import gc
import os
import subprocess
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cuflash
from tests.gradients import Backward, assert_gradients
from tests.oracle import DTYPES, assert_accurate, assert_lse, randn
from tests.readme import example
from tests.unit import fake_gpu
from tests.unit.fake_gpu import FakeGpu

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    jax = pytest.importorskip("jax")
    import jax.numpy as jnp

    attention = cuflash.jax.attention

ROOT = Path(__file__).resolve().parents[2]
CAUSAL = (False, "bottom_right", "top_left")

Arrays = list[np.ndarray]


@pytest.fixture(autouse=True)
def _float64() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


def draw(
    lengths: tuple[int, int] = (13, 17),
    heads: tuple[int, int] = (4, 2),
    dims: tuple[int, int] = (16, 8),
    dtype: str = "float32",
    batch: int = 2,
    seed: int = 0,
) -> Arrays:
    """NumPy arrays q, k, v in the layout bshd."""
    rng = np.random.default_rng(seed)
    (nq, nk), (hq, hk), (d, dv) = lengths, heads, dims
    shapes = (batch, nq, hq, d), (batch, nk, hk, d), (batch, nk, hk, dv)
    return [randn(rng, shape, dtype) for shape in shapes]


def arriving(host: Arrays, seed: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """Random gradients of output and LSE, bshd."""
    rng = np.random.default_rng(seed)
    q, _, v = host
    dlse = rng.standard_normal((q.shape[0], q.shape[2], q.shape[1]))
    dlse = dlse.astype(np.float64 if q.dtype == np.float64 else np.float32)
    return randn(rng, (*q.shape[:3], v.shape[3]), q.dtype), dlse


def swap(x: Any) -> Any:
    """From the layout bshd to bhsd, and back."""
    return x.swapaxes(1, 2)


def check(
    function: Callable[..., Any], host: Arrays, causal: Any = False, scale: float | None = None, dlse: bool = True
) -> None:
    """Judge a function's output, LSE and gradients, which it gives as `attention` with ``return_lse=True``."""
    results, pull = jax.vjp(function, *map(jnp.asarray, host))
    out, lse = map(np.asarray, results)
    dout, dlse_values = arriving(host)
    if not dlse:
        dlse_values = np.zeros_like(dlse_values)
    grads = pull((jnp.asarray(dout), jnp.asarray(dlse_values)))
    assert all(isinstance(x, jax.Array) for x in grads)
    bhsd = [swap(x) for x in host]
    assert_accurate(swap(out), *bhsd, causal=causal, scale=scale)
    assert_lse(lse, *bhsd, causal=causal, scale=scale)
    call = Backward(swap(dout), *bhsd, swap(out), lse, dlse_values if dlse else None, causal, scale)
    assert_gradients(tuple(swap(np.asarray(x)) for x in grads), call)


def same(actual: Any, expected: Any) -> None:
    """Bit for bit, in all leaves."""
    leaves, wanted = jax.tree.leaves(actual), jax.tree.leaves(expected)
    assert len(leaves) == len(wanted)
    for x, y in zip(leaves, wanted, strict=True):
        assert x.dtype == y.dtype and np.array_equal(np.asarray(x), np.asarray(y))


def loss(function: Callable[..., Any]) -> Callable[..., Any]:
    """A number that depends on output and LSE in a way of its own."""

    def number(*arrays: Any) -> Any:
        out, lse = function(*arrays)
        return (jnp.sin(out) * jnp.arange(out.size).reshape(out.shape)).sum() + (lse**2).sum()

    return number


with_lse = partial(attention, return_lse=True)
wrt_all = partial(jax.grad, argnums=(0, 1, 2))


# --- numbers ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit, jax.checkpoint], ids=["plain", "jit", "checkpoint"])
@pytest.mark.parametrize("causal", CAUSAL)
@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients(dtype: str, causal: Any, transform: Any) -> None:
    check(transform(partial(with_lse, causal=causal)), draw(dtype=dtype), causal)


@pytest.mark.parametrize("heads", [(3, 3), (6, 2), (5, 1)])
@pytest.mark.parametrize("lengths", [(1, 20), (20, 1), (20, 7), (7, 20)])
def test_heads_and_lengths(heads: tuple[int, int], lengths: tuple[int, int]) -> None:
    """Groups, decoding, and queries that see no key."""
    check(jax.jit(partial(with_lse, causal=True)), draw(lengths, heads), "bottom_right")


@pytest.mark.parametrize("scale", [0.0, -0.3, np.float32(0.25), 2])
def test_scales(scale: float) -> None:
    check(partial(with_lse, scale=scale), draw(), scale=float(scale))


def test_layout_bhsd() -> None:
    def function(q: Any, k: Any, v: Any) -> Any:
        out, lse = with_lse(swap(q), swap(k), swap(v), layout="bhsd", causal=True)
        return swap(out), lse

    check(jax.jit(function), draw(), "bottom_right")


def test_a_loss_of_the_output_alone_or_of_the_lse_alone() -> None:
    host = draw()
    arrays = [jnp.asarray(x) for x in host]
    check(lambda *a: (attention(*a), jax.lax.stop_gradient(with_lse(*a)[1])), host, dlse=False)
    of_lse = wrt_all(lambda *a: with_lse(*a)[1].sum())(*arrays)
    out, lse = cuflash.attention(*host, return_lse=True)
    same(of_lse, cuflash.attention_backward(np.zeros_like(out), *host, out, lse, dlse=np.ones_like(lse)))
    assert (of_lse[2] == 0).all()
    of_out = wrt_all(lambda *a: attention(*a).sum())(*arrays)
    same(of_out, cuflash.attention_backward(np.ones_like(out), *host, out, lse))


@pytest.mark.parametrize("causal", CAUSAL)
def test_bits_are_those_of_the_plain_calls(causal: Any) -> None:
    """Also through `cuflash.attention`, which hands tracers over."""
    host = draw(dtype="bfloat16")
    out, lse = cuflash.attention(*host, causal=causal, return_lse=True)
    for function in (attention, jax.jit(attention, static_argnames=("causal", "return_lse")), cuflash.attention):
        same(function(*map(jnp.asarray, host), causal=causal, return_lse=True), (out, lse))
        same(function(*map(jnp.asarray, host), causal=causal), out)
    traced = partial(cuflash.attention, causal=causal, return_lse=True)
    same(jax.jit(traced)(*map(jnp.asarray, host)), (out, lse))
    dout, dlse = arriving(host)
    _, pull = jax.vjp(traced, *map(jnp.asarray, host))
    grads = cuflash.attention_backward(dout, *host, out, lse, dlse=dlse, causal=causal)
    same(pull((jnp.asarray(dout), jnp.asarray(dlse))), grads)


def test_agrees_with_differentiated_dot_product_attention() -> None:
    arrays = [jnp.asarray(x) for x in draw(dims=(16, 16))]
    ours = wrt_all(lambda *a: jnp.sin(attention(*a, causal="top_left")).sum())(*arrays)
    theirs = wrt_all(lambda *a: jnp.sin(jax.nn.dot_product_attention(*a, is_causal=True)).sum())(*arrays)
    for x, y in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-5)


# --- vmap ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("axes", [(0, 0, 0), (0, None, None), (None, 0, 0), (0, 0, None), (1, 2, 4)], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_vmap(axes: tuple[Any, ...], dtype: str) -> None:
    """Values as from a loop, bit for bit; gradients of arrays that are not mapped are sums."""
    members = [draw(dtype=dtype, seed=seed) for seed in range(3)]
    host = [
        xs[0] if axis is None else np.stack(xs, axis)
        for axis, *xs in zip(axes, *members, strict=True)
    ]  # fmt: skip
    picked = [[np.take(x, i, axis) if axis is not None else x for x, axis in zip(host, axes, strict=True)]
              for i in range(3)]  # fmt: skip
    function = partial(with_lse, causal=True)
    arrays = [jnp.asarray(x) for x in host]
    singles = [function(*map(jnp.asarray, one)) for one in picked]
    for transform in (lambda f: f, jax.jit):
        out, lse = transform(jax.vmap(function, in_axes=axes))(*arrays)
        for i, single in enumerate(singles):
            same((out[i], lse[i]), single)
    grads = jax.jit(wrt_all(lambda *a: jax.vmap(loss(function), in_axes=axes)(*a).sum()))(*arrays)
    parts = [wrt_all(loss(function))(*map(jnp.asarray, one)) for one in picked]
    for grad, axis, *xs in zip(grads, axes, *parts, strict=True):
        wanted = jnp.stack(xs, axis) if axis is not None else sum(xs)
        tolerance = float(jnp.finfo(wanted.dtype).eps) * float(sum(abs(x) for x in xs).max())
        np.testing.assert_allclose(grad.astype(float), wanted.astype(float), rtol=0, atol=len(xs) * tolerance)


def test_nested_vmap_of_gradients() -> None:
    q, k, v = map(jnp.asarray, draw(batch=6))
    function = wrt_all(loss(partial(with_lse, causal=True)))
    outer = [x.reshape(2, 3, 1, *x.shape[1:]) for x in (q, k, v)]
    grads = jax.vmap(jax.vmap(function))(*outer)
    for i in range(6):
        wanted = function(*(x[i : i + 1] for x in (q, k, v)))
        same([x.reshape(6, 1, *x.shape[3:])[i] for x in grads], wanted)


# --- control flow, other transformations -----------------------------------------------------------------------


def steps(function: Callable[..., Any], q: Any, k: Any, v: Any) -> Any:
    for _ in range(3):
        q = function(q, k, v)
    return q


def test_control_flow() -> None:
    q, k, v = map(jnp.asarray, draw(dims=(16, 16)))
    function = partial(attention, causal=True)
    wanted = steps(function, q, k, v)
    same(jax.lax.fori_loop(0, 3, lambda i, x: function(x, k, v), q), wanted)
    same(jax.lax.scan(lambda x, _: (function(x, k, v), None), q, None, length=3)[0], wanted)
    same(jax.lax.while_loop(lambda s: s[0] < 3, lambda s: (s[0] + 1, function(s[1], k, v)), (0, q))[1], wanted)
    same(jax.lax.map(lambda x: function(x, k, v), jnp.stack([q, -q]))[0], function(q, k, v))
    same(jax.lax.cond(q.sum() < jnp.inf, lambda x: function(x, k, v), lambda x: x, q), function(q, k, v))
    same(jax.jit(lambda *a: jax.jit(function)(*a))(q, k, v), function(q, k, v))
    loops = jax.grad(lambda x: jax.lax.scan(lambda x, _: (function(x, k, v), None), x, None, length=3)[0].sum())
    same(jax.jit(loops)(q), jax.grad(lambda x: steps(function, x, k, v).sum())(q))


def test_jacobian_is_the_vjps_of_the_unit_vectors() -> None:
    q, k, v = (jnp.asarray(x) for x in draw((2, 3), (1, 1), (4, 2), batch=1))
    rows = jax.jacrev(lambda x: attention(x, k, v).reshape(-1))(q)
    _, pull = jax.vjp(lambda x: attention(x, k, v).reshape(-1), q)
    same(rows, jnp.stack([pull(unit)[0] for unit in jnp.eye(4, dtype=q.dtype)]))


def test_abstract_evaluation_and_compilation_ahead() -> None:
    host = draw(dtype="float16")
    arrays = [jnp.asarray(x) for x in host]
    out, lse = jax.eval_shape(with_lse, *arrays)
    assert (out.shape, out.dtype, lse.shape, lse.dtype) == ((2, 13, 4, 8), jnp.float16, (2, 4, 13), jnp.float32)
    same(jax.jit(with_lse).lower(*arrays).compile()(*arrays), cuflash.attention(*host, return_lse=True))


MESH = """
import jax, jax.numpy as jnp, numpy as np, cuflash
from functools import partial
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
rng = np.random.default_rng(0)
q, k, v = (jnp.asarray(rng.standard_normal((4, 12, heads, 16), np.float32)) for heads in (4, 2, 2))
mesh, spec = Mesh(np.array(jax.devices()).reshape(2, 2), ("b", "h")), P("b", None, "h")
attend = partial(cuflash.jax.attention, causal=True)
loss = lambda function: lambda *arrays: (function(*arrays) ** 2).sum()
wrt_all = partial(jax.grad, argnums=(0, 1, 2))
wanted, grads = attend(q, k, v), wrt_all(loss(attend))(q, k, v)

def near(xs, ys):
    for x, y in zip(xs, ys, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)

for check_vma in (True, False):
    sharded = partial(jax.shard_map, mesh=mesh, in_specs=(spec,) * 3, check_vma=check_vma)
    function = sharded(attend, out_specs=spec)
    out = jax.jit(function)(q, k, v)
    assert out.sharding.spec == spec
    near([out], [wanted])
    near(jax.jit(wrt_all(loss(function)))(q, k, v), grads)
    near(jax.jit(sharded(wrt_all(loss(attend)), out_specs=(spec,) * 3))(q, k, v), grads)
    # Of q each row of the mesh has the same part: its gradient is a sum over the mesh.
    same_q = jax.shard_map(
        attend, mesh=mesh, in_specs=(P(None, None, "h"), spec, spec), out_specs=spec, check_vma=check_vma
    )
    parts = lambda q: loss(attend)(q, k[:2], v[:2]) + loss(attend)(q, k[2:], v[2:])
    near([jax.grad(lambda q: loss(same_q)(q, k, v))(q[:2])], [jax.grad(parts)(q[:2])])
arrays = [jax.device_put(x, NamedSharding(mesh, spec)) for x in (q, k, v)]
near([attend(*arrays), jax.jit(attend)(*arrays)], [wanted] * 2)
near(jax.jit(wrt_all(loss(attend)))(*arrays), grads)
near([jax.pmap(lambda *one: attend(*(x[None] for x in one))[0])(q, k, v)], [wanted])
second = jax.devices()[1]
out = jax.jit(attend)(*(jax.device_put(x, second) for x in (q, k, v)))
assert out.devices() == {second}
try:
    attend(q, jax.device_put(k, second), jax.device_put(v, jax.devices()[2]))
except ValueError as error:
    assert "incompatible devices" in str(error), error
else:
    raise AssertionError("not refused")
"""


def test_several_devices() -> None:
    """shard_map, pmap, sharded arrays, a device that is not the first: in a process whose CPU counts as four."""
    env = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", MESH], cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


# --- edges -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_without_keys(dtype: str) -> None:
    """They are 0, have gradients of 0 and add nothing, whatever arrives there."""
    host = draw((20, 7), dtype=dtype)
    arrays = [jnp.asarray(x) for x in host]
    (out, lse), pull = jax.vjp(jax.jit(partial(with_lse, causal=True)), *arrays)
    assert (out[:, :13] == 0).all() and jnp.isneginf(lse[..., :13]).all() and jnp.isfinite(lse[..., 13:]).all()
    dout, dlse = map(jnp.asarray, arriving(host))
    grads = pull((dout, dlse))
    same(pull((dout.at[:, :13].set(jnp.nan), dlse.at[..., :13].set(jnp.nan))), grads)
    assert (grads[0][:, :13] == 0).all() and all(jnp.isfinite(x).all() for x in grads)


@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize(
    ("shape_q", "shape_k"),
    [((0, 3, 2), (0, 4, 2)), ((1, 0, 2), (1, 4, 2)), ((1, 3, 0), (1, 4, 0)), ((1, 3, 2), (1, 0, 2)),
     ((1, 0, 2), (1, 0, 2))],
)  # fmt: skip
def test_empty(shape_q: tuple[int, ...], shape_k: tuple[int, ...], mapped: bool) -> None:
    q, k = jnp.ones((*shape_q, 8)), jnp.ones((*shape_k, 8))
    function = with_lse
    if mapped:
        function, q = jax.vmap(with_lse, in_axes=(0, None, None)), jnp.stack([q] * 3)
    out, lse = jax.jit(function)(q, k, k)
    assert out.shape == q.shape and lse.shape == (*q.shape[:-3], q.shape[-2], q.shape[-3])
    assert (out == 0).all() and jnp.isneginf(lse).all()
    for grad, x in zip(wrt_all(lambda *a: function(*a)[0].sum())(q, k, k), (q, k, k), strict=True):
        assert grad.shape == x.shape and (grad == 0).all()


def test_no_arrays_of_an_axis_of_no_members() -> None:
    q = jnp.ones((0, 1, 3, 2, 8))
    assert jax.vmap(attention)(q, q, q).shape == q.shape


# --- memory and time -------------------------------------------------------------------------------------------


def test_results_are_written_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """The backend reads and writes JAX's own buffers, and makes no others."""
    seen: list[int] = []

    def spy(*arrays: Any, out: Any = None, lse: Any = None, grads: Any = (), dlse: Any = None, **_: Any) -> None:
        written = [x for x in (out, lse, *grads) if x is not None]
        for x in written:
            x[...] = 0
        seen.extend(x.__array_interface__["data"][0] for x in (*arrays, *written))

    monkeypatch.setattr("cuflash.cpu.attention_cpu", spy)
    monkeypatch.setattr("cuflash.cpu_backward.attention_backward_cpu", spy)
    arrays = [jnp.asarray(x) for x in draw()]
    results, pull = jax.vjp(with_lse, *arrays)
    assert seen == [x.unsafe_buffer_pointer() for x in (*arrays, *results)]
    seen.clear()
    dout = jnp.ones_like(results[0])
    grads = pull((dout, jnp.zeros_like(results[1])))
    assert seen == [x.unsafe_buffer_pointer() for x in (dout, *arrays, *results, *grads)]


def test_equal_calls_are_compiled_once() -> None:
    compiled: list[str] = []

    def listener(event: str, seconds: float, **_: Any) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(event)

    arrays = [jnp.asarray(x) for x in draw(seed=7, dims=(24, 8))]
    calls = attention, wrt_all(lambda *a, **options: attention(*a, **options).sum())
    jax.monitoring.register_event_duration_secs_listener(listener)
    try:
        for call in calls:
            call(*arrays, causal=True, scale=0.5)
        first = len(compiled)
        assert first
        for call in calls:
            for causal in (True, "bottom_right", 1, np.True_):
                for scale in (0.5, np.float32(0.5)):
                    call(*arrays, causal=causal, scale=scale)
        assert len(compiled) == first
        attention(*arrays, causal=True, scale=0.25)
        assert len(compiled) == first + 1
    finally:
        jax.monitoring.unregister_event_duration_listener(listener)


def test_many_calls_in_flight() -> None:
    """Callbacks run on XLA's threads and take the GIL there, whatever the main thread does meanwhile."""
    q, k, v = map(jnp.asarray, draw((200, 200), (4, 4), (64, 64)))

    @jax.jit
    def late(q: Any, big: Any) -> Any:
        return attention(q + (big @ big)[0, 0] * 0, k, v, causal=True)

    big = jnp.ones((400, 400), jnp.float32)
    wanted = late(q, big)
    for _ in range(3):
        flying = [late(q, big) for _ in range(20)]
        sum(range(300_000))
        gc.collect()
        same(flying, [wanted] * 20)
    with ThreadPoolExecutor(8) as pool:
        same(list(pool.map(lambda _: late(q, big), range(40))), [wanted] * 40)


def test_inputs_that_are_donated_or_dropped_at_once() -> None:
    host = draw((100, 100), (4, 4), (64, 64))
    k, v = map(jnp.asarray, host[1:])
    wanted = attention(jnp.asarray(host[0]), k, v)
    donating = jax.jit(attention, donate_argnums=0)
    for _ in range(20):
        q = jnp.array(host[0])
        out = donating(q, k, v)
        assert q.is_deleted()
        dropped = attention(jnp.array(host[0]) * 1, k, v)
        junk = [jnp.full(host[0].shape, jnp.nan, jnp.float32) for _ in range(4)]
        same([out, dropped], [wanted, wanted])
        del junk


# --- refusals --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("function", [attention, cuflash.attention], ids=["cuflash.jax", "cuflash"])
@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (lambda q, k, v: (q, k[:, 1:], v), ValueError, r"k and v differ in batch, seq or heads: q \(2, 13, 4, 16\)"),
        (lambda q, k, v: (q[0], k, v), ValueError, r"q has shape \(13, 4, 16\); layout='bshd' takes four axes"),
        (lambda q, k, v: (q[:, :, :3], k, v), ValueError, "q has 3 heads and k and v have 2"),
        (lambda q, k, v: (q, k.astype(jnp.float16), v), TypeError, "q has dtype float32 and k float16"),
        (lambda q, k, v: [x.astype(jnp.int32) for x in (q, k, v)], TypeError, "q has dtype int32; accepted are"),
        (
            lambda q, k, v: [x.astype(jnp.float8_e5m2) for x in (q, k, v)],
            cuflash.UnsupportedError,
            "8-bit floats (are for cuflash.attention alone|is not for JAX tracers)",
        ),
        (lambda q, k, v: [jnp.zeros((1, 2, 2, 257))] * 3, cuflash.UnsupportedError, "q has head dim 257"),
        (lambda q, k, v: (q, np.ones(k.shape), v), TypeError, "q is a JAX array and k a NumPy array; all arrays of"),
    ],
)
def test_arrays_are_refused_when_jax_traces(change: Any, error: type[Exception], words: str, function: Any) -> None:
    with pytest.raises(error, match=words):
        jax.eval_shape(lambda *a: function(*change(*a)), *map(jnp.asarray, draw()))


@pytest.mark.parametrize(
    ("option", "error", "words"),
    [
        ({"causal": "left"}, ValueError, "causal is 'left'; accepted are False, True"),
        ({"layout": "sbhd"}, ValueError, "layout is 'sbhd'; accepted are"),
        ({"scale": float("inf")}, ValueError, "scale is inf; accepted is any finite number"),
        ({"scale": "1"}, TypeError, "scale is a str"),
        ({"return_lse": 2}, TypeError, "return_lse is 2; accepted are True and False"),
        ({"deterministic": "yes"}, TypeError, "deterministic is 'yes'; accepted are True and False"),
    ],
)
def test_options_are_refused_when_jax_traces(option: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        jax.eval_shape(partial(attention, **option), *map(jnp.asarray, draw()))


def test_a_scale_that_jax_computes() -> None:
    """Refused, with the way to have it; which is right."""
    host = draw()
    q, k, v = map(jnp.asarray, host)
    for function in (
        jax.jit(lambda s: attention(q, k, v, scale=s)),
        lambda s: attention(q, k, v, scale=jnp.asarray(s)),
    ):
        with pytest.raises(TypeError, match=r"scale is a JAX array; .* multiply q by it and pass scale=1\.0"):
            function(0.5)
    same(jax.jit(lambda s: attention(q * s, k, v, scale=1.0))(jnp.float32(0.5)), cuflash.attention(*host, scale=0.5))


def test_arrays_that_are_not_of_jax() -> None:
    host = draw()
    with pytest.raises(
        TypeError, match=r"q is a NumPy array; cuflash\.jax\.attention takes JAX arrays: pass jax\.numpy"
    ):
        attention(*host)
    with pytest.raises(TypeError, match=r"q is a list; accepted are"):
        attention(host[0].tolist(), *map(jnp.asarray, host[1:]))
    with pytest.raises(TypeError, match="q is a NumPy array and k a JAX array"):
        jax.jit(lambda k: cuflash.attention(host[0], k, host[2]))(host[1])


def test_no_second_and_no_forward_mode_derivatives() -> None:
    q, k, v = map(jnp.asarray, draw())

    def number(q: Any) -> Any:
        return jnp.sin(attention(q, k, v)).sum()

    words = r"cuflash\.jax\.attention has first derivatives in reverse mode .* jax\.nn\.dot_product_attention"
    for second in (jax.hessian(number), jax.jit(jax.grad(lambda q: jax.grad(number)(q).sum()))):
        with pytest.raises(cuflash.UnsupportedError, match=words):
            second(q)
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(number, (q,), (q,))


def test_plain_calls_refuse_tracers_by_name() -> None:
    q, k, v = map(jnp.asarray, draw())
    out, lse = with_lse(q, k, v)
    with pytest.raises(cuflash.UnsupportedError, match=r"q is a JAX tracer.*its gradients come from jax\.grad"):
        jax.jit(cuflash.attention_backward)(out, q, k, v, out, lse)
    with pytest.raises(TypeError, match="out is a JAX array, which cannot be written"):
        jax.jit(lambda q, out: cuflash.attention(q, k, v, out=out))(q, out)


def test_what_a_call_meets_when_it_runs_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """JAX's exception has cuflash's message; the next call is as good as ever."""
    arrays = [jnp.asarray(x) for x in draw()]
    wanted = attention(*arrays)

    def broken(*_: Any, **__: Any) -> None:
        raise cuflash.UnsupportedError("this it cannot do: do that")

    functions = (attention, jax.jit(lambda *a: attention(*a) + 1), wrt_all(lambda *a: attention(*a).sum()))
    with monkeypatch.context() as patch:
        patch.setattr("cuflash.cpu.attention_cpu", broken)
        patch.setattr("cuflash.cpu_backward.attention_backward_cpu", broken)
        for function in functions:
            with pytest.raises(
                (jax.errors.JaxRuntimeError, ValueError), match="UnsupportedError: this it cannot do: do"
            ):
                jax.block_until_ready(function(*arrays))
    same(attention(*arrays), wanted)


# --- on a GPU, without one -------------------------------------------------------------------------------------


class Buffer:
    """What XLA hands to a callback: host memory that passes for a GPU's."""

    def __init__(self, array: np.ndarray, device: int) -> None:
        self.array, self.device = array, device
        self.shape, self.dtype = array.shape, array.dtype

    def __dlpack__(self) -> Any:
        return self.array.view(np.uint16 if self.dtype.itemsize == 2 else self.dtype).__dlpack__()

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, self.device


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGpu]:
    installed = fake_gpu.install(monkeypatch)
    from cuflash.arrays import cupy_arrays

    @contextlib.contextmanager
    def on_stream(handle: int, ordinal: int) -> Iterator[None]:
        installed.streams[ordinal] = handle
        with installed.on_device(ordinal):
            yield

    monkeypatch.setattr(cupy_arrays, "on_stream", on_stream)
    yield installed
    fake_gpu.remove(installed)


def forward_callback(*shapes: tuple[int, ...], causal: Any) -> Any:
    """The callback of a call of bfloat16 arrays, as JAX traced it."""
    function = partial(with_lse, causal=causal)
    traced = jax.make_jaxpr(function)(*(jnp.zeros(shape, jnp.bfloat16) for shape in shapes))
    (callback,) = (eqn.params["callback"] for eqn in equations(traced.jaxpr) if "callback" in eqn.params)
    return callback


def equations(jaxpr: Any) -> Iterator[Any]:
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda x: hasattr(x, "jaxpr")):
            if hasattr(inner, "jaxpr"):
                yield from equations(inner.jaxpr)


@pytest.mark.parametrize("mapped", [(), (3,), (2, 3)], ids=str)
@pytest.mark.parametrize("device", [0, 1])
@pytest.mark.parametrize("as_method", [False, True])
def test_a_gpu_callback(gpu: FakeGpu, device: int, mapped: tuple[int, ...], as_method: bool) -> None:
    """One launch on XLA's stream and the buffers' device, straight into the results; mapped axes are batch."""
    host = draw((13, 17), (4, 2), (64, 64), "bfloat16")
    callback = forward_callback(*(x.shape for x in host), causal=True)
    stacked = [np.broadcast_to(x, (*mapped, *x.shape)).copy("C") for x in host]
    results = [np.full((*mapped, 2, 13, 4, 64), np.nan, DTYPES["bfloat16"]), np.full((*mapped, 2, 4, 13), np.nan, "f4")]
    context = types.SimpleNamespace(stream=(lambda: 77) if as_method else 77)
    for _ in range(2):
        callback(context, [Buffer(x, device) for x in results], *(Buffer(x, device) for x in stacked))
    first, second = gpu.launches
    assert first.stream == second.stream == 77 and first.loaded.device == device and gpu.device == 0
    places = [x.view(np.uint8).__array_interface__["data"][0] for x in (*stacked, *results)]
    assert [second.params[name] for name in ("q", "k", "v", "out", "lse")] == places
    bhsd = [swap(x.reshape(-1, *x.shape[-3:])) for x in stacked]
    assert_accurate(swap(results[0].reshape(-1, 13, 4, 64)), *bhsd, causal="bottom_right")
    assert_lse(results[1].reshape(-1, 4, 13), *bhsd, causal="bottom_right")


def test_a_gpu_callback_without_keys(gpu: FakeGpu) -> None:
    shapes = (2, 5, 4, 64), (2, 0, 2, 64), (2, 0, 2, 64)
    callback = forward_callback(*shapes, causal=False)
    results = [np.full(shapes[0], np.nan, DTYPES["bfloat16"]), np.full((2, 4, 5), np.nan, np.float32)]
    inputs = [Buffer(np.ones(shape, DTYPES["bfloat16"]), 0) for shape in shapes]
    callback(types.SimpleNamespace(stream=77), [Buffer(x, 0) for x in results], *inputs)
    assert not gpu.launches and (results[0] == 0).all() and np.isneginf(results[1]).all()


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_gpu_callback_of_gradients(gpu: FakeGpu, deterministic: bool) -> None:
    """Launches straight into the results, in turns where the bits must repeat."""
    host = draw((13, 17), (4, 2), (64, 64), "bfloat16")
    out, lse = cuflash.attention(*host, causal=True, return_lse=True)
    dout, dlse = arriving(host)
    function = partial(with_lse, causal=True, deterministic=deterministic)
    traced = jax.make_jaxpr(lambda *a: jax.vjp(function, *a[:3])[1](a[3:]))(
        *(jnp.asarray(x) for x in (*host, dout, dlse))
    )
    *_, callback = (eqn.params["callback"] for eqn in equations(traced.jaxpr) if "callback" in eqn.params)
    results = [np.full(x.shape, np.nan, x.dtype) for x in host]
    inputs = [Buffer(x, 0) for x in (dout, *host, out, lse, dlse)]
    for _ in range(2):
        callback(types.SimpleNamespace(stream=77), [Buffer(x, 0) for x in results], *inputs)
    assert [launch.stream for launch in gpu.launches] == [77] * 4 and len(gpu.compiled) == 2
    assert all(bool(launch.params["turns"]) == deterministic for launch in gpu.launches if "turns" in launch.params)
    call = Backward(swap(dout), *map(swap, host), swap(out), lse, dlse, "bottom_right", None)
    assert_gradients(tuple(map(swap, results)), call)


def test_an_lse_to_write_on_another_device(gpu: FakeGpu) -> None:
    """`attend` switches devices as `cuflash.attention` does."""
    from cuflash.api import compute

    host = draw(dims=(64, 64), dtype="float16")
    arrays = [gpu.array(x, device=1) for x in host]
    out, lse = np.full(host[0].shape, np.nan, np.float16), np.full((2, 4, 13), np.nan, np.float32)
    given = gpu.array(out, device=1), gpu.array(lse, device=1)
    assert compute(*arrays, False, None, "bshd", True, *given) == given
    assert gpu.device == 0 and gpu.launches[-1].loaded.device == 1
    assert_accurate(swap(out), *map(swap, host))
    assert_lse(lse, *map(swap, host))


def test_devices_that_are_neither_cuda_nor_cpu() -> None:
    from cuflash.arrays import xla_buffers

    foreign = Buffer(np.ones((1, 2, 2, 8), np.float32), 0)
    foreign.__dlpack_device__ = lambda: (10, 0)  # type: ignore[method-assign]
    with pytest.raises(cuflash.UnsupportedError, match="DLPack type 10; cuflash takes CUDA devices and CPUs"):
        xla_buffers.view(foreign, 4)


# --- the package -----------------------------------------------------------------------------------------------


def test_readme_example() -> None:
    names = example("import jax")
    assert all(x.shape == names["q"].shape and x.dtype == jnp.bfloat16 for x in names["grads"])
