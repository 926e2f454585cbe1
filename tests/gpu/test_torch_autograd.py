"""torch's autograd on a GPU: values, streams, graphs, compilers, memory."""

from __future__ import annotations

import importlib.util
import shutil
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import cuflash
from tests.torch_dense import assert_gradient, dense_gradients

pytestmark = pytest.mark.gpu

Tensor = Any


def draw(
    torch: Any, dtype: str = "bfloat16", lengths: tuple[int, int] = (200, 264), dim: int = 64, device: str = "cuda"
) -> list[Tensor]:
    """Leaves q, k, v: two key/value heads for six query heads."""
    generator = torch.Generator().manual_seed(0)
    shapes = (2, lengths[0], 6, dim), (2, lengths[1], 2, dim), (2, lengths[1], 2, dim)
    drawn = (torch.randn(shape, generator=generator) for shape in shapes)
    return [x.to(device, getattr(torch, dtype)).requires_grad_() for x in drawn]


def like(torch: Any, x: Tensor) -> Tensor:
    return torch.randn(x.shape, generator=torch.Generator().manual_seed(1)).to(x.device, x.dtype)


def gradients(torch: Any, call: Callable[..., Tensor], inputs: list[Tensor], **options: Any) -> tuple[Tensor, ...]:
    """Repeatable ones, of a loss that weighs every element of the output in its own way."""
    out = call(*inputs, **options)
    return torch.autograd.grad(out, inputs, like(torch, out))  # type: ignore[no-any-return]


def attention(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    return cuflash.torch.attention(q, k, v, causal=True, deterministic=True, **options)


def same(torch: Any, xs: Any, ys: Any) -> bool:
    return all(torch.equal(x, y) for x, y in zip(xs, ys, strict=True))


@pytest.mark.parametrize("dim", [64, 128, 80])
@pytest.mark.parametrize("causal", [False, True, "top_left"])
@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_gradients_through_output_and_lse(torch: Any, dtype: str, layout: str, causal: Any, dim: int) -> None:
    """Against float64 autograd of dense attention, and the very bits of `attention_backward`."""
    swap = (lambda x: x.transpose(1, 2)) if layout == "bhsd" else lambda x: x
    inputs = draw(torch, dtype, dim=dim)
    moved = [swap(x) for x in inputs]
    options = {"causal": causal, "scale": 0.2, "layout": layout}
    out, lse = cuflash.torch.attention(*moved, **options, return_lse=True, deterministic=True)
    dout, dlse = like(torch, out), like(torch, lse)
    grads = torch.autograd.grad((out, lse), inputs, (dout, dlse))
    expected = dense_gradients(inputs, (swap(dout), dlse), causal=causal, scale=0.2)
    with torch.no_grad():
        direct = cuflash.attention_backward(dout, *moved, out, lse, dlse=dlse, deterministic=True, **options)
    assert same(torch, grads, [swap(x) for x in direct])
    for grad, reference in zip(grads, expected, strict=True):
        assert_gradient(grad, reference)


def test_what_torch_sends(torch: Any) -> None:
    """An expanded gradient, as `sum` sends it, one with the heads moved, and a lazily negated one."""
    inputs = draw(torch)
    out = attention(*inputs)
    ones = torch.ones_like(out)
    (total,) = torch.autograd.grad(out.sum(), inputs[:1], retain_graph=True)
    (plain,) = torch.autograd.grad(out, inputs[:1], ones, retain_graph=True)
    (moved,) = torch.autograd.grad(
        out, inputs[:1], ones.transpose(1, 2).contiguous().transpose(1, 2), retain_graph=True
    )
    (negated,) = torch.autograd.grad(out, inputs[:1], torch._neg_view(-ones))
    exact = dense_gradients(inputs, (ones, None), causal=True)[0]
    for grad in (total, plain, moved, negated):
        assert_gradient(grad, exact)


def test_packed_projection_and_expanded_keys(torch: Any) -> None:
    packed = like(torch, torch.empty(2, 150, 3, 4, 64, dtype=torch.bfloat16, device="cuda")).requires_grad_()
    (grad,) = gradients(torch, lambda packed: attention(*packed.unbind(2)), [packed])
    parts = [x.detach().clone().requires_grad_() for x in packed.unbind(2)]
    assert_gradient(grad, torch.stack(dense_gradients(parts, (like(torch, parts[0]), None), causal=True), dim=2))
    q, k, v = draw(torch)
    shared = [x.detach()[:1].requires_grad_() for x in (k, v)]
    grads = gradients(
        torch, lambda q, k, v: attention(q, k.expand(2, -1, -1, -1), v.expand(2, -1, -1, -1)), [q, *shared]
    )
    both = [x.expand(2, -1, -1, -1) for x in shared]
    exact = dense_gradients([q, *both], (like(torch, q), None), causal=True)
    for grad, reference in zip(grads, (exact[0], *(x.sum(0, keepdim=True) for x in exact[1:])), strict=True):
        assert_gradient(grad, reference)


def test_rows_without_keys(torch: Any) -> None:
    inputs = draw(torch, lengths=(300, 140))
    out = attention(*inputs)
    dout = like(torch, out)
    dout[:, :160] = float("nan")
    grads = torch.autograd.grad(out, inputs, dout)
    assert (grads[0][:, :160] == 0).all()
    live = [inputs[0][:, 160:], *inputs[1:]]
    expected = dense_gradients(live, (dout[:, 160:], None), causal=True)
    for grad, reference in zip((grads[0][:, 160:], *grads[1:]), expected, strict=True):
        assert_gradient(grad, reference)


def test_autocast_and_refused_dtypes(torch: Any) -> None:
    inputs = draw(torch, "float32")
    with pytest.raises(cuflash.UnsupportedError, match="float32; the GPU kernels take float16 and bfloat16"):
        cuflash.torch.attention(*inputs)
    for dtype in (torch.float16, torch.bfloat16):
        cast = [x.detach().to(dtype).requires_grad_() for x in inputs]
        with torch.autocast("cuda", dtype):
            grads = gradients(torch, attention, inputs)
        assert all(grad.dtype is torch.float32 for grad in grads)
        assert same(torch, [grad.to(dtype) for grad in grads], gradients(torch, attention, cast))


def test_streams(torch: Any) -> None:
    """Forward and backward on a busy side stream; nothing waits on the host."""
    inputs = draw(torch)
    expected = gradients(torch, attention, inputs)
    dout = like(torch, expected[0])
    late = torch.full_like(inputs[0], float("nan"))
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # "a prototype feature"
            torch.cuda.set_sync_debug_mode("error")  # whatever torch itself knows to wait
        with torch.cuda.stream(stream):
            torch.cuda._sleep(200_000_000)
            late.copy_(inputs[0].detach())
            leaves = [late.requires_grad_(), *inputs[1:]]
            grads = torch.autograd.grad(attention(*leaves), leaves, dout)
            assert not stream.query(), "something waited for the device"
    finally:
        torch.cuda.set_sync_debug_mode("default")
    stream.synchronize()
    assert same(torch, expected, grads)


def test_graph_of_a_training_step(torch: Any) -> None:
    inputs = draw(torch)
    dout = like(torch, inputs[0])
    fixed = [torch.zeros_like(x).requires_grad_() for x in inputs]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.autograd.grad(attention(*fixed), fixed, dout)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        grads = torch.autograd.grad(attention(*fixed), fixed, dout)
    for _ in range(2):
        with torch.no_grad():
            for target, x in zip(fixed, inputs, strict=True):
                target.copy_(x)
        graph.replay()
        torch.cuda.synchronize()
        assert same(torch, gradients(torch, attention, inputs), grads)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, of what its compiler imports
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled(torch: Any, backend: str) -> None:
    """Without a break; inductor hands on layouts as it likes."""
    if backend == "inductor" and not (importlib.util.find_spec("triton") and shutil.which("gcc")):
        pytest.skip("inductor needs triton and gcc")

    def step(packed: Tensor, weight: Tensor) -> Tensor:
        q, k, v = (packed * weight).unbind(2)
        return attention(q, k, v).transpose(1, 2).float() * 2

    torch._dynamo.reset()
    packed = like(torch, torch.empty(2, 130, 3, 4, 64, dtype=torch.bfloat16, device="cuda")).requires_grad_()
    weight = torch.full((64,), 0.5, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        grads = gradients(torch, torch.compile(step, backend=backend, fullgraph=True), [packed, weight])
    for grad, plain in zip(grads, gradients(torch, step, [packed, weight]), strict=True):
        assert_gradient(grad, plain.double())


def test_vmap_and_checkpointing(torch: Any) -> None:
    from torch.utils.checkpoint import checkpoint

    inputs = draw(torch)
    plain = gradients(torch, attention, inputs)
    again = gradients(torch, lambda *qkv: checkpoint(attention, *qkv, use_reentrant=False), inputs)
    assert same(torch, plain, again)
    mapped = gradients(torch, lambda *qkv: torch.vmap(attention)(*(x[:, None] for x in qkv))[:, 0], inputs)
    for grad, reference in zip(mapped, plain, strict=True):
        assert_gradient(grad, reference.double())


# torch warns once in a process, in whichever thread is first, that a leaf is on two streams at once; it waits for both.
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream does not match:UserWarning")
@pytest.mark.parametrize("shared", [True, False])
def test_threads_on_streams_of_their_own(torch: Any, shared: bool) -> None:
    """With leaves that all threads share, or with leaves of their own."""
    inputs = draw(torch)
    expected = gradients(torch, attention, inputs)
    torch.cuda.synchronize()
    meet = threading.Barrier(6)

    def work() -> list[tuple[Tensor, ...]]:
        leaves = inputs if shared else [x.detach().requires_grad_() for x in inputs]
        with torch.cuda.stream(torch.cuda.Stream()):
            meet.wait(60)
            results = [gradients(torch, attention, leaves) for _ in range(5)]
            torch.cuda.current_stream().synchronize()
        return results

    with ThreadPoolExecutor(meet.parties) as pool:
        for future in [pool.submit(work) for _ in range(meet.parties)]:
            assert all(same(torch, expected, grads) for grads in future.result())


def test_another_device(torch: Any) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    here, there = (gradients(torch, attention, draw(torch, device=f"cuda:{i}")) for i in range(2))
    assert torch.cuda.current_device() == 0 and all(x.device.index == 1 for x in there)
    assert same(torch, here, [x.to("cuda:0") for x in there])


def test_memory(torch: Any) -> None:
    """Kept for the backward pass: inputs, output and LSE; at no time anything of the size of the scores."""
    q, k, v = (torch.randn(1, 16384, 4, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    gradients(torch, attention, [q, k, v])
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = attention(q, k, v)
    tensor, lse = q.nbytes, 4 * 4 * 16384
    assert torch.cuda.memory_allocated() - before <= tensor + lse + 1024
    out.backward(torch.ones_like(out))
    scores = 2 * 4 * 16384**2
    assert torch.cuda.max_memory_allocated() - before <= 16 * tensor < scores // 8
