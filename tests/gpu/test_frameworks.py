"""CUDA arrays of torch, JAX and plain DLPack producers: the caller's kind, device and stream, and lifetimes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cuflash
from cuflash import kernels
from tests.gpu.support import (
    DTYPES,
    assert_same_bits,
    check_attention,
    draw_qkv,
    host_qkv,
    poisoned,
    run_python,
    spin,
    swap_layout,
    to_device,
    to_host,
)
from tests.oracle import judge, oracle

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def jnp(jax_on_gpu: Any) -> Any:
    return jax_on_gpu.numpy


# --- torch -----------------------------------------------------------------------------------------------------


def _tensors(torch: Any, host: tuple[np.ndarray, ...]) -> list[Any]:
    """CUDA tensors with the bits of NumPy arrays."""
    kinds = {"float16": torch.float16, "bfloat16": torch.bfloat16}
    return [torch.from_numpy(x.view(np.int16).copy()).cuda().view(kinds[x.dtype.name]) for x in host]


def _numpy(tensor: Any, like: np.ndarray) -> np.ndarray:
    import torch

    return tensor.contiguous().view(torch.int16).cpu().numpy().view(like.dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_torch_in_torch_out(torch: Any, dtype: str, layout: str) -> None:
    host = host_qkv((130, 190), (6, 2), (64, 64), dtype, batch=2)
    expected = check_attention(*map(to_device, host), causal=True)
    tensors = _tensors(torch, host)
    if layout == "bhsd":
        tensors = [x.transpose(1, 2) for x in tensors]
    out, lse = cuflash.attention(*tensors, causal=True, layout=layout, return_lse=True)
    assert type(out) is torch.Tensor and out.dtype == tensors[0].dtype and out.device == tensors[0].device
    assert out.shape == tensors[0].shape and out.is_contiguous() and not out.requires_grad
    assert lse.dtype == torch.float32 and lse.shape == (2, 6, 130)
    assert_same_bits(_numpy(out if layout == "bshd" else out.transpose(1, 2), host[0]), expected)
    given = torch.full_like(out, float("nan"))
    assert cuflash.attention(*tensors, causal=True, layout=layout, out=given) is given
    assert torch.equal(given, out)


def test_torch_views_and_packed_slices(torch: Any) -> None:
    host = host_qkv((100, 100), (3, 3), (40, 40), "bfloat16")
    packed = torch.stack(_tensors(torch, host), dim=3)  # (B, N, H, 3, D)
    out = cuflash.attention(*(packed[:, :, :, i] for i in range(3)))
    assert_same_bits(_numpy(out, host[0]), check_attention(*map(to_device, host)))
    key = _tensors(torch, host)[1]
    one = key[:, :, :1].expand(-1, -1, 3, -1)
    with kernels.use_family("forward_sm80"):  # zero strides, which TMA does not take, for both
        same = cuflash.attention(packed[:, :, :, 0], key[:, :, :1], packed[:, :, :1, 2])
        assert torch.equal(cuflash.attention(packed[:, :, :, 0], one, packed[:, :, :1, 2].expand(-1, -1, 3, -1)), same)


def test_torch_current_stream(torch: Any) -> None:
    """Inputs become right on a busy stream of torch; nothing waits on the host."""
    host = host_qkv((200, 200), (4, 2), (64, 64), "bfloat16")
    expected = check_attention(*map(to_device, host), causal=True)
    tensors = _tensors(torch, host)
    late = [torch.full_like(x, float("nan")) for x in tensors]
    cuflash.attention(*tensors, causal=True)
    torch.cuda.synchronize()
    for stream in (torch.cuda.Stream(), torch.cuda.Stream(priority=-1), torch.cuda.default_stream()):
        with torch.cuda.stream(stream):
            torch.cuda._sleep(200_000_000)
            for target, x in zip(late, tensors, strict=True):
                target.copy_(x)
            out = cuflash.attention(*late, causal=True)
            assert not stream.query(), "the call waited for the device"
            stream.synchronize()
        assert_same_bits(_numpy(out, host[0]), expected)
        for target in late:
            target.fill_(float("nan"))
        torch.cuda.synchronize()


def test_torch_graph(torch: Any) -> None:
    host = host_qkv((150, 150), (4, 4), (128, 128), "float16")
    expected = check_attention(*map(to_device, host), causal=True)
    tensors = _tensors(torch, host)
    fixed = [torch.full_like(x, float("nan")) for x in tensors]
    cuflash.warmup(*fixed, causal=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = cuflash.attention(*fixed, causal=True)
    for target, x in zip(fixed, tensors, strict=True):
        target.copy_(x)
    graph.replay()
    torch.cuda.synchronize()
    assert_same_bits(_numpy(out, host[0]), expected)


def test_torch_grad_mode(torch: Any) -> None:
    """Tensors that require grad are ordinary without grad mode; the hot table remembers nothing wrong."""
    q, k, v = _tensors(torch, host_qkv((8, 8), (1, 1), (64, 64), "float16"))
    plain = cuflash.attention(q, k, v)
    k.requires_grad_()
    for _ in range(2):
        out = cuflash.attention(q, k, v)
        assert torch.equal(out, plain) and out.requires_grad
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                out = cuflash.attention(q, k, v)
                assert torch.equal(out, plain) and not out.requires_grad


def test_torch_without_cupy() -> None:
    """torch's path neither needs CuPy nor imports it."""
    code = """
import json, sys, warnings
sys.modules["cupy"] = None
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import torch
import cuflash
q, k, v = (torch.randn(1, 100, 2, 64, device="cuda", dtype=torch.float16) for _ in range(3))
out = cuflash.attention(q, k, v, causal=True)
double = (x.double().transpose(1, 2) for x in (q, k, v))
right = torch.nn.functional.scaled_dot_product_attention(*double, is_causal=True)
print(json.dumps(float((out.double() - right.transpose(1, 2)).abs().max())))
"""
    pytest.importorskip("torch")
    assert run_python(code) < 2e-3


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dim", [32, 64, 80, 96, 128, 160, 192, 256])
def test_error_is_at_most_that_of_flash_attention(torch: Any, dtype: str, causal: bool, dim: int) -> None:
    """Both measures of the error at most 1.5 times those of torch's flash backend on the same inputs."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    for n in (512, 1500):
        host = host_qkv((n, n), (2, 2), (dim, dim), dtype, seed=n)
        tensors = [x.transpose(1, 2) for x in _tensors(torch, host)]
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            theirs = torch.nn.functional.scaled_dot_product_attention(*tensors, is_causal=causal)
        ours = cuflash.attention(*tensors, causal=causal, layout="bhsd")
        reference, _ = oracle(*(swap_layout(x) for x in host), causal="bottom_right" if causal else False)
        judge(_numpy(ours, host[0]), reference, _numpy(theirs, host[0]))


# --- JAX -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_jax_in_jax_out(jnp: Any, dtype: str) -> None:
    import jax

    host = host_qkv((130, 190), (6, 2), (64, 64), dtype, batch=2)
    expected = check_attention(*map(to_device, host), causal=True)
    arrays = [jnp.asarray(x) for x in host]
    out, lse = cuflash.attention(*arrays, causal=True, return_lse=True)
    assert isinstance(out, jax.Array) and out.dtype == arrays[0].dtype and out.devices() == arrays[0].devices()
    assert lse.shape == (2, 6, 130) and lse.dtype == jnp.float32
    assert_same_bits(np.asarray(out), expected)
    assert_same_bits(np.asarray(out + 0), expected)  # JAX's own kernels read it in order


def test_jax_results_of_unfinished_work(jnp: Any) -> None:
    """Inputs that XLA is still computing are waited for on the device."""
    import jax

    host = host_qkv((200, 200), (4, 2), (64, 64), "bfloat16")
    expected = check_attention(*map(to_device, host), causal=True)

    @jax.jit
    def slowly(x: Any, big: Any) -> Any:
        for _ in range(8):
            big = jnp.tanh(big @ big)
        return x + (big[0, 0] * 0).astype(x.dtype)

    big = jnp.full((6000, 6000), 1e-3, jnp.float32)
    slowly(jnp.asarray(host[0]), big).block_until_ready()
    for _ in range(3):
        late = [slowly(jnp.asarray(x), big) for x in host]
        assert_same_bits(np.asarray(cuflash.attention(*late, causal=True)), expected)


def test_jax_arrays_live_as_long_as_the_stream_needs_them(jnp: Any) -> None:
    """Inputs are dropped while the call still waits; JAX must not hand their memory to the arrays made next."""
    import cupy as cp

    host = host_qkv((500, 500), (8, 8), (64, 64), "bfloat16")
    expected = check_attention(*map(to_device, host), causal=True)
    spin(1)
    with cp.cuda.Stream(non_blocking=True) as stream:
        for _ in range(10):
            arrays = [jnp.asarray(x) for x in host]
            for x in arrays:
                x.block_until_ready()
            spin(20_000_000)
            out = cuflash.attention(*arrays, causal=True)
            del arrays, x
            junk = [jnp.full(h.shape, float("nan"), jnp.bfloat16) for h in host for _ in range(4)]
            for block in junk:
                block.block_until_ready()
            stream.synchronize()
            assert_same_bits(np.asarray(out), expected)
            del junk


# --- DLPack ----------------------------------------------------------------------------------------------------


class Producer:
    """An array type that speaks DLPack and nothing else; it remembers the streams that it was asked for."""

    def __init__(self, array: Any) -> None:
        self.array = array
        self.streams: list[Any] = []

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.array.__dlpack_device__()

    def __dlpack__(self, *, stream: Any = None, **options: Any) -> Any:
        self.streams.append(stream)
        return self.array.__dlpack__(stream=stream, **options)


class Namespaced(Producer):
    """The same, saying through the array API how an array of its kind is made."""

    @staticmethod
    def from_dlpack(x: Any) -> Namespaced:
        import cupy as cp

        return Namespaced(cp.from_dlpack(x))

    def __array_namespace__(self, **_: Any) -> type[Namespaced]:
        return Namespaced


@pytest.mark.parametrize("dtype", DTYPES)
def test_dlpack_producer(dtype: str) -> None:
    """B-151: also in bfloat16. The consumer's stream is handed over; without a namespace CuPy arrays come back."""
    import cupy as cp

    q, k, v = draw_qkv((130, 190), (6, 2), (64, 64), dtype)
    expected = check_attention(q, k, v, causal=True)
    with cp.cuda.Stream(non_blocking=True) as stream:
        producers = [Producer(x) for x in (q, k, v)]
        out, lse = cuflash.attention(*producers, causal=True, return_lse=True)
        stream.synchronize()
    assert isinstance(out, cp.ndarray) and isinstance(lse, cp.ndarray)
    assert all(set(producer.streams) == {stream.ptr} for producer in producers)
    assert_same_bits(out, expected)


def test_dlpack_producer_with_a_namespace() -> None:
    import cupy as cp

    q, k, v = draw_qkv((130, 190), (6, 2), (64, 64), "bfloat16")
    expected = check_attention(q, k, v, causal=True)
    out = cuflash.attention(*(Namespaced(x) for x in (q, k, v)), causal=True)
    assert type(out) is Namespaced
    assert_same_bits(out.array, expected)
    given = Namespaced(poisoned(q.shape, q.dtype))
    assert cuflash.attention(*(Namespaced(x) for x in (q, k, v)), causal=True, out=given) is given
    cp.cuda.Device().synchronize()
    assert_same_bits(given.array, expected)


# --- refusals --------------------------------------------------------------------------------------------------


def test_mixed_and_unsupported_arrays_are_refused(torch: Any) -> None:
    import cupy as cp

    host = host_qkv((16, 16), (1, 1), (64, 64), "float16")
    arrays = [to_device(x) for x in host]
    tensors = _tensors(torch, host)
    out = poisoned(arrays[0].shape, np.float16)
    for sources in ((arrays, arrays, tensors), (tensors, arrays, tensors), (arrays, host, host)):
        with pytest.raises(TypeError):
            cuflash.attention(*(source[i] for i, source in enumerate(sources)))
    with pytest.raises(ValueError, match="the CPU"):
        cuflash.attention(tensors[0], tensors[1].cpu(), tensors[2])
    for dtype in (cp.float32, cp.float64):
        with pytest.raises(cuflash.UnsupportedError, match="float16"):
            cuflash.attention(*(x.astype(dtype) for x in arrays))
    with pytest.raises(TypeError):
        cuflash.attention(*(x.view(cp.uint16) for x in arrays), out=out)
    with pytest.raises(ValueError):
        cuflash.attention(arrays[0], arrays[1], arrays[2][:, :5], out=out)
    with pytest.raises(ValueError, match="scale"):
        cuflash.attention(*arrays, scale=float("nan"), out=out)
    assert np.isnan(to_host(out)).all(), "a refused call wrote its output"
