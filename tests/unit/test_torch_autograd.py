"""Gradients for torch: autograd, torch.compile, torch.func, checkpointing; on CPU tensors and as if on a GPU."""

from __future__ import annotations

import subprocess
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cuflash
from cuflash import jit
from tests.gpu.test_readme import check_training
from tests.readme import example
from tests.torch_dense import assert_gradient, dense_attention, dense_gradients
from tests.unit import fake_gpu
from tests.unit.fake_gpu import FakeGpu

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    torch = pytest.importorskip("torch")

import cuflash.torch
from cuflash.arrays import torch_arrays

ROOT = Path(__file__).resolve().parents[2]
CALLS = pytest.mark.parametrize("call", [cuflash.torch.attention, cuflash.attention], ids=["torch", "cuflash"])
DTYPES = ("float16", "bfloat16", "float32", "float64")

Tensor = Any


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGpu]:
    installed = fake_gpu.install_for_torch(monkeypatch)
    yield installed
    fake_gpu.remove(installed)


def draw(dtype: str = "float64", lengths: tuple[int, int] = (7, 9), layout: str = "bshd") -> list[Tensor]:
    """Leaves q, k, v: two key/value heads for four query heads, head dims 5 and 6."""
    generator = torch.Generator().manual_seed(0)
    rows, keys = lengths
    shapes = (2, rows, 4, 5), (2, keys, 2, 5), (2, keys, 2, 6)
    tensors = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    if layout == "bhsd":
        tensors = [x.transpose(1, 2).contiguous() for x in tensors]
    return [x.to(getattr(torch, dtype)).requires_grad_() for x in tensors]


def like(x: Tensor, seed: int = 1) -> Tensor:
    return torch.randn(x.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(x.dtype)


def gradients(call: Callable[..., Tensor], inputs: list[Tensor], **options: Any) -> tuple[Tensor, ...]:
    """Of a loss that weighs every element of the output in its own way."""
    out = call(*inputs, **options)
    return torch.autograd.grad(out, inputs, like(out))  # type: ignore[no-any-return]


def same(xs: Any, ys: Any) -> bool:
    return all(torch.equal(x, y) for x, y in zip(xs, ys, strict=True))


# --- values ----------------------------------------------------------------------------------------------------


@CALLS
@pytest.mark.parametrize("causal", [False, True, "top_left"])
@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_through_output_and_lse(call: Any, causal: Any, layout: str, dtype: str) -> None:
    """B-025: against float64 autograd of dense attention."""
    inputs = draw(dtype, layout=layout)
    out, lse = call(*inputs, causal=causal, scale=-0.4, layout=layout, return_lse=True)
    assert out.requires_grad and lse.requires_grad and out.is_contiguous()
    with torch.no_grad():
        assert same((out, lse), call(*inputs, causal=causal, scale=-0.4, layout=layout, return_lse=True))
    dout, dlse = like(out), like(lse, 2)
    grads = torch.autograd.grad((out, lse), inputs, (dout, dlse))
    swap = (lambda x: x.transpose(1, 2)) if layout == "bhsd" else lambda x: x
    expected = dense_gradients([swap(x) for x in inputs], (swap(dout), dlse), causal=causal, scale=-0.4)
    for grad, x, reference in zip(grads, inputs, expected, strict=True):
        assert type(grad) is torch.Tensor and grad.dtype is x.dtype and grad.shape == x.shape
        assert_gradient(swap(grad), reference)


@CALLS
@pytest.mark.parametrize("causal", [False, True, "top_left"])
@pytest.mark.parametrize("lengths", [(4, 5), (5, 3)])
def test_gradcheck(call: Any, causal: Any, lengths: tuple[int, int]) -> None:
    """Finite differences, also for gradients in batches. Of five queries, the bottom-right mask leaves two no key."""
    inputs = [x.detach()[:1].requires_grad_() for x in draw(lengths=lengths)]
    dead = max(0, lengths[0] - lengths[1]) if causal is True else 0

    def live(*tensors: Tensor) -> Any:
        out, lse = call(*tensors, causal=causal, return_lse=True)
        return out, lse[..., dead:]  # -inf has no finite differences

    assert torch.autograd.gradcheck(live, inputs, check_batched_grad=True)


@CALLS
def test_losses_of_one_result_or_none(call: Any) -> None:
    inputs = draw()
    out, lse = call(*inputs, causal=True, return_lse=True)
    for arriving in ((like(out), None), (None, like(lse))):
        end, grad = next((end, grad) for end, grad in zip((out, lse), arriving, strict=True) if grad is not None)
        grads = torch.autograd.grad(end, inputs, grad, retain_graph=True)
        for grad, reference in zip(grads, dense_gradients(inputs, arriving, causal=True), strict=True):
            assert_gradient(grad, reference)

    class Stop(torch.autograd.Function):
        """Sends no gradient on."""

        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> None:
            return None

    for end in (Stop.apply(out), Stop.apply(lse)):
        grads = torch.autograd.grad(end.sum(), inputs, retain_graph=True)
        assert all((grad == 0).all() and grad.shape == x.shape for grad, x in zip(grads, inputs, strict=True))


@CALLS
@pytest.mark.parametrize("needed", [x for x in product([False, True], repeat=3) if any(x)])
def test_inputs_that_need_no_gradient(call: Any, needed: tuple[bool, ...]) -> None:
    full = gradients(call, draw())
    inputs = [x.requires_grad_(need) for x, need in zip(draw(), needed, strict=True)]
    out = call(*inputs)
    out.backward(like(out))
    for x, need, grad in zip(inputs, needed, full, strict=True):
        assert torch.equal(x.grad, grad) if need else x.grad is None


@CALLS
def test_layouts_of_what_arrives(call: Any) -> None:
    """Expanded, transposed, lazily negated: whatever torch sends."""
    inputs = draw()
    out, lse = call(*inputs, causal=True, return_lse=True)
    dout, dlse = like(out), like(lse)
    moved = dout.permute(3, 1, 0, 2).contiguous().permute(2, 1, 3, 0)
    assert moved.stride() != dout.stride() and torch.equal(moved, dout)
    plain = torch.autograd.grad((out, lse), inputs, (dout, dlse), retain_graph=True)
    for arriving in ((moved, dlse.mT.contiguous().mT), (torch._neg_view(-dout), torch._neg_view(-dlse))):
        for grad, reference in zip(
            torch.autograd.grad((out, lse), inputs, arriving, retain_graph=True), plain, strict=True
        ):
            assert_gradient(grad, reference)
    for grad, reference in zip(
        torch.autograd.grad(out.sum(), inputs),  # one number, expanded
        dense_gradients(inputs, (torch.ones_like(out), None), causal=True),
        strict=True,
    ):
        assert_gradient(grad, reference)


@CALLS
def test_layouts_of_inputs(call: Any) -> None:
    """One tensor in all three roles; parts of a packed tensor; keys expanded over the batch."""
    x = draw()[0]
    keys = draw()[1].detach()[:1].requires_grad_()
    packed = torch.stack([x.detach()] * 3, dim=3).requires_grad_()

    def expanded(function: Any, q: Tensor, k: Tensor) -> Tensor:
        k = k.expand(2, -1, -1, -1)
        return function(q.mT.contiguous().mT, k, k)

    for leaves, attend in (
        ((x,), lambda function, x: function(x, x, x)),
        ((packed,), lambda function, packed: function(*packed.unbind(3))),
        ((x, keys), expanded),
    ):
        grads = gradients(lambda *leaves, attend=attend: attend(call, *leaves), list(leaves))
        exact = gradients(
            lambda *leaves, attend=attend: attend(lambda *qkv: dense_attention(*qkv)[0], *leaves), list(leaves)
        )
        for grad, reference in zip(grads, exact, strict=True):
            assert_gradient(grad, reference)


@CALLS
def test_rows_without_keys(call: Any) -> None:
    """Their gradients are 0, and what arrives there reaches nothing."""
    inputs = draw(lengths=(6, 4))
    out, lse = call(*inputs, causal=True, return_lse=True)
    dout, dlse = like(out), like(lse)
    dout[:, :2], dlse[..., :2] = float("nan"), float("inf")
    grads = torch.autograd.grad((out, lse), inputs, (dout, dlse))
    assert (grads[0][:, :2] == 0).all()
    live = [inputs[0][:, 2:], *inputs[1:]]
    expected = dense_gradients(live, (dout[:, 2:], dlse[..., 2:]), causal=True)
    for grad, reference in zip((grads[0][:, 2:], *grads[1:]), expected, strict=True):
        assert_gradient(grad, reference)


@CALLS
def test_empty(call: Any) -> None:
    for batch, rows, keys, heads in ((0, 3, 4, 2), (1, 0, 4, 2), (1, 3, 0, 2), (1, 3, 4, 0)):
        q, k, v = (torch.ones((batch, n, heads, 8), requires_grad=True) for n in (rows, keys, keys))
        out, lse = call(q, k, v, return_lse=True)
        (out.sum() + lse.nan_to_num(neginf=0).sum()).backward()
        assert all(x.grad.shape == x.shape and (x.grad == 0).all() for x in (q, k, v))


def test_readme_example() -> None:
    assert check_training(torch, example("loss.backward()"))


# --- autograd's rules ------------------------------------------------------------------------------------------


@CALLS
def test_what_is_kept(call: Any) -> None:
    """The inputs themselves, the output and the LSE: nothing of the size of the scores, and no copy."""
    q, k, v = draw()
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        out, lse = call(q, k, v, return_lse=True)
    assert {x.data_ptr() for x in kept} == {x.data_ptr() for x in (q, k, v, out, lse)} and len(kept) == 5
    kept.clear()
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        out = call(q, k, v)
    *tensors, own = kept
    assert [x.data_ptr() for x in tensors] == [x.data_ptr() for x in (q, k, v, out)] and torch.equal(own, lse)


@CALLS
@pytest.mark.parametrize("victim", range(4))
def test_changes_in_place_are_noticed(call: Any, victim: int) -> None:
    tensors = [2 * x for x in draw()]
    out = call(*tensors)
    with torch.no_grad():
        (*tensors, out)[victim].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@CALLS
def test_a_graph_is_used_once_unless_retained(call: Any) -> None:
    inputs = draw()
    out = call(*inputs)
    first = torch.autograd.grad(out, inputs, like(out), retain_graph=True)
    assert same(first, torch.autograd.grad(out, inputs, like(out)))
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(out, inputs, like(out))


@CALLS
def test_second_derivatives_are_refused(call: Any) -> None:
    """When they are computed: ``create_graph`` by itself is fine."""
    inputs = draw()
    plain = gradients(call, inputs)
    out = call(*inputs)
    grads = torch.autograd.grad(out, inputs, like(out), create_graph=True)
    assert same(plain, grads)
    with pytest.raises(cuflash.UnsupportedError, match=r"second derivatives of cuflash attention.*SDPBackend\.MATH"):
        (grads[0] ** 2).sum().backward()


@CALLS
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(call: Any, reentrant: bool) -> None:
    from torch.utils.checkpoint import checkpoint

    def step(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return call(2 * q, k, v, causal=True)

    inputs = draw()
    out = checkpoint(step, *inputs, use_reentrant=reentrant)
    out.backward(like(out))
    assert same(gradients(step, draw()), [x.grad for x in inputs])


@CALLS
def test_tensor_hooks_and_accumulation(call: Any) -> None:
    inputs = draw()
    expected = gradients(call, inputs)
    q = inputs[0]
    q.register_hook(lambda grad: 2 * grad)
    for _ in range(2):
        out = call(*inputs)
        out.backward(like(out))
    assert torch.equal(q.grad, 4 * expected[0]) and torch.equal(inputs[1].grad, 2 * expected[1])


@CALLS
def test_threads(call: Any) -> None:
    """As in DataParallel: forward and backward passes at once."""
    expected = gradients(call, draw())
    results: list[Any] = [None] * 8

    def work(place: int) -> None:
        results[place] = gradients(call, draw())

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(results))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(same(expected, grads) for grads in results)


def test_inference_tensors() -> None:
    """torch saves none of them for a backward pass, and says so."""
    q, k, v = draw()
    with torch.inference_mode():
        inside = k.clone()
    with pytest.raises(RuntimeError, match="Inference tensors cannot be saved for backward"):
        cuflash.torch.attention(q, inside, v)
    with torch.inference_mode():
        assert torch.equal(cuflash.torch.attention(q, inside, v), cuflash.attention(q, k, v))


# --- deterministic gradients, autocast, refusals ---------------------------------------------------------------


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The value of `deterministic` in each backward pass."""
    values: list[Any] = []
    plain = cuflash.torch.gradients

    def record(*arguments: Any) -> Any:
        *_, (*_, deterministic) = arguments
        values.append(deterministic)
        return plain(*arguments)

    monkeypatch.setattr(cuflash.torch, "gradients", record)
    return values


def test_deterministic(recorded: list[Any]) -> None:
    """By argument, or by torch's switch as it stands when the backward pass runs."""
    inputs = draw()
    gradients(cuflash.torch.attention, inputs)
    gradients(cuflash.torch.attention, inputs, deterministic=True)
    out = cuflash.attention(*inputs)
    torch.use_deterministic_algorithms(True)
    try:
        torch.autograd.grad(out, inputs, like(out))
        torch.func.grad(lambda q: cuflash.attention(q, *inputs[1:]).sum())(inputs[0])
    finally:
        torch.use_deterministic_algorithms(False)
    operator = torch.ops.cuflash.attention
    gradients(lambda *qkv: operator(*qkv, "", None, "bshd", True)[0], inputs)
    assert recorded == [False, True, True, True, True]
    for tensors in (inputs, [x.detach() for x in inputs]):
        with pytest.raises(TypeError, match=r"deterministic is 1\.5; accepted are True and False"):
            cuflash.torch.attention(*tensors, deterministic=1.5)


def test_autocast() -> None:
    """cuflash.torch.attention casts as torch's own attention does; cuflash.attention takes dtypes as they are."""
    inputs = draw("float32")
    theirs = torch.nn.functional.scaled_dot_product_attention
    cast = [x.detach().bfloat16().requires_grad_() for x in inputs]
    expected = cuflash.torch.attention(*cast), gradients(cuflash.torch.attention, cast)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = cuflash.torch.attention(*inputs)
        assert out.dtype is torch.bfloat16 is theirs(inputs[0], inputs[0], inputs[0]).dtype
        assert torch.equal(out, expected[0])
        mixed = cuflash.torch.attention(inputs[0], *cast[1:])
        assert torch.equal(mixed, out)
        assert cuflash.attention(*inputs).dtype is torch.float32
        with torch.no_grad():
            assert torch.equal(cuflash.torch.attention(*inputs), out)
            assert cuflash.attention(*inputs).dtype is torch.float32
        with torch.autocast("cpu", enabled=False):
            assert cuflash.torch.attention(*inputs).dtype is torch.float32
        double = draw()[0]
        assert cuflash.torch.attention(double, double, double).dtype is theirs(double, double, double).dtype
    grads = torch.autograd.grad(out, inputs, like(out))
    assert all(grad.dtype is torch.float32 for grad in grads) and same([x.bfloat16() for x in grads], expected[1])
    with pytest.raises(TypeError, match="q has dtype float32 and k bfloat16"):
        cuflash.torch.attention(inputs[0], *cast[1:])


def test_refusals() -> None:
    q, k, v = draw()
    for arguments, options, error, words in (
        ((q.detach().numpy(), k, v), {}, TypeError, r"q is a numpy\.ndarray; cuflash\.torch\.attention takes torch"),
        ((q, k.detach().numpy(), v), {}, TypeError, "q is a torch tensor and k a NumPy array"),
        ((q.detach(), k, 3), {}, TypeError, "v is an int; accepted are"),
        ((q, k, v), {"out": torch.empty(2, 7, 4, 6).double()}, cuflash.UnsupportedError, "leave out= away"),
        ((q, k, v), {"return_lse": "yes"}, TypeError, "return_lse is 'yes'; accepted are True and False"),
        ((q, k, v), {"causal": 2}, ValueError, "causal is 2; accepted are"),
        ((q, k, v), {"layout": "shape"}, ValueError, "layout is 'shape'; accepted are"),
        ((q, k, v[0]), {}, ValueError, "v has shape .* takes four axes"),
        ((q, k.float(), v), {}, TypeError, "q has dtype float64 and k float32"),
        ((torch._neg_view(q), k, v), {}, cuflash.UnsupportedError, r"q\.resolve_neg\(\)"),
        ((q.as_subclass(type("Special", (torch.Tensor,), {})), k, v), {}, TypeError, "q is a Special, a subclass of"),
    ):
        with pytest.raises(error, match=words):
            cuflash.torch.attention(*arguments, **options)
    with torch.no_grad():
        target = torch.empty(2, 7, 4, 6).double()
        assert cuflash.torch.attention(q, k, v, out=target) is target


# --- operators, torch.compile, torch.func ----------------------------------------------------------------------


def test_operators_pass_torchs_own_check() -> None:
    q, k, v = draw()
    operators = torch.ops.cuflash
    torch.library.opcheck(operators.attention.default, (q, k, v, "bottom_right", 0.3, "bshd", False))
    out, lse = (x.detach() for x in cuflash.attention(q, k, v, return_lse=True))
    plain = [x.detach() for x in (q, k, v)]
    for dlse in (None, like(lse)):
        arguments = (like(out), dlse, *plain, out, lse, "", None, "bshd", True)
        torch.library.opcheck(operators.attention_backward.default, arguments)


@CALLS
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_without_a_break(call: Any, dynamic: bool) -> None:
    """One graph, forward and backward; the same bits as without torch.compile."""

    def step(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out, lse = call(2 * q, k, v, causal=True, return_lse=True)
        return out * 3 + lse.mT[..., None]

    torch._dynamo.reset()
    compiled = torch.compile(step, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    for lengths in ((7, 9), (5, 5)):
        inputs = draw(lengths=lengths)
        assert same(gradients(step, inputs), gradients(compiled, inputs))
        with torch.no_grad():
            assert torch.equal(step(*inputs), compiled(*inputs))


@pytest.mark.parametrize("call", ["cuflash.attention", "cuflash.torch.attention"])
def test_the_first_call_of_a_process_is_a_compiled_one(call: str) -> None:
    """Nothing of cuflash is loaded when torch.compile traces it."""
    code = f"""
import warnings
warnings.simplefilter("ignore")
import torch, cuflash
q = torch.randn(1, 4, 2, 8, requires_grad=True)
out = torch.compile(lambda q: {call}(q, q, q), backend="eager", fullgraph=True)(q)
out.sum().backward()
assert torch.equal(out, {call}(q, q, q)) and q.grad is not None
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_compiled_with_autocast() -> None:
    inputs = draw("float32")

    def step(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return cuflash.torch.attention(q, k, v)

    torch._dynamo.reset()
    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    assert compiled(*inputs).dtype is torch.bfloat16 and same(gradients(step, inputs), gradients(compiled, inputs))


@CALLS
def test_compiled_code_that_breaks_elsewhere(call: Any) -> None:
    """What torch.compile leaves to Python calls attention as if nothing was compiled."""

    def step(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return call(q * float(k.detach().sum()), k, v, causal=True)

    torch._dynamo.reset()
    inputs = draw()
    assert same(gradients(step, inputs), gradients(torch.compile(step, backend="aot_eager"), inputs))


def test_errors_while_compiling_keep_their_words() -> None:
    inputs = draw()
    for options, words in (
        ({"layout": "shape"}, "layout is 'shape'"),
        ({"layout": None}, "layout is None; accepted are 'bshd'"),
        ({"scale": float("nan")}, "scale is nan"),
        ({"scale": "x"}, "scale is a str; accepted are real numbers"),
        ({"scale": torch.tensor(0.5)}, "scale is a Tensor; accepted are real numbers"),
    ):
        torch._dynamo.reset()
        compiled = torch.compile(lambda *x, options=options: cuflash.torch.attention(*x, **options), backend="eager")
        with pytest.raises(Exception, match=words):
            compiled(*inputs)


@pytest.mark.parametrize("scale", [np.float32(0.3), np.float64(0.3), np.int64(2), Fraction(1, 4)], ids=repr)
def test_every_kind_of_number_is_a_scale_for_operators(scale: Any) -> None:
    """Under torch.compile, which makes tensors of NumPy's numbers, and under a dispatch mode, as in a plain call."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Pass(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return function(*args, **(kwargs or {}))

    inputs = draw()
    torch._dynamo.reset()
    expected = cuflash.attention(*inputs, scale=float(scale))
    compiled = torch.compile(lambda *x: cuflash.attention(*x, scale=scale), backend="aot_eager")
    assert torch.equal(compiled(*inputs), expected)
    with Pass():
        assert torch.equal(cuflash.attention(*inputs, scale=scale), expected)
        with pytest.raises(TypeError, match="scale is a Tensor"):
            cuflash.attention(*inputs, scale=torch.tensor(0.5))


@CALLS
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
def test_compiled_backward_pass(call: Any) -> None:
    """torch's compiled autograd, which traces `backward` itself."""
    from torch._dynamo import compiled_autograd

    inputs = draw()
    expected = gradients(call, inputs)
    torch._dynamo.reset()
    out = call(*inputs)
    with compiled_autograd._enable(torch.compile(backend="eager", fullgraph=True)):
        out.backward(like(out))
    assert same(expected, [x.grad for x in inputs])


@CALLS
def test_selective_checkpointing(call: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A policy that keeps the operator's results makes the forward pass run once; one that does not, twice."""
    from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

    def step(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return 2 * call(2 * q, k, v)

    runs: list[int] = []
    plain = cuflash.torch.compute
    monkeypatch.setattr(cuflash.torch, "compute", lambda *x, **told: runs.append(0) or plain(*x, **told))
    inputs = draw()
    expected = gradients(step, inputs)
    for kept, times in ((torch.ops.cuflash.attention.default, 1), (torch.ops.aten.mul.Tensor, 2)):
        contexts = partial(create_selective_checkpoint_contexts, [kept])
        runs.clear()
        selective = partial(checkpoint, step, use_reentrant=False, context_fn=contexts)
        assert same(expected, gradients(selective, inputs)) and len(runs) == times


@CALLS
def test_shapes_without_memory(call: Any) -> None:
    from torch._subclasses import FakeTensorMode

    real = call(*draw("float16"), return_lse=True)
    with FakeTensorMode():
        q, k, v = (torch.empty(x.shape, dtype=torch.half, requires_grad=True) for x in draw())
        fake = call(q, k, v, return_lse=True)
        fake[0].sum().backward()
        assert q.grad.shape == q.shape
    for x, y in zip(real, fake, strict=True):
        assert (x.shape, x.dtype, x.stride()) == (y.shape, y.dtype, y.stride())


@CALLS
def test_tracers_see_the_operators(call: Any) -> None:
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.utils._python_dispatch import TorchDispatchMode

    inputs = draw()

    class Record(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    seen: list[str] = []
    plain = gradients(call, inputs)
    with Record():
        assert same(plain, gradients(call, inputs))
    assert {"cuflash.attention.default", "cuflash.attention_backward.default"} <= set(seen)
    out, dout = call(*inputs), like(call(*inputs))
    seen.clear()
    with Record():
        assert same(plain, torch.autograd.grad(out, inputs, dout)) and "cuflash.attention_backward.default" in seen
    traced = make_fx(lambda *x: torch.autograd.grad(call(*x), x, dout))(*inputs)
    assert same(plain, traced(*inputs)) and "cuflash.attention_backward" in traced.code


@CALLS
def test_func_grad_and_vmap(call: Any) -> None:
    """Against a loop, whichever axis is mapped; what is not mapped serves all."""
    q, k, v = (x.detach() for x in draw())
    many = torch.stack([q, 2 * q, -q])

    def loss(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return call(q, k, v, causal=True).square().sum()

    one_by_one = [torch.func.grad(loss, argnums=(0, 1, 2))(x, k, v) for x in many]
    exact = [
        torch.autograd.grad(dense_attention(*leaves, causal=True)[0].square().sum(), leaves)
        for leaves in ([y.clone().requires_grad_() for y in (x, k, v)] for x in many)
    ]
    for ours, theirs in zip(one_by_one, exact, strict=True):
        for grad, reference in zip(ours, theirs, strict=True):
            assert_gradient(grad, reference)
    for axis in (0, 2, -1):
        outs = torch.vmap(call, in_dims=(axis, None, None), out_dims=1)(many.movedim(0, axis), k, v)
        torch.testing.assert_close(outs, torch.stack([call(x, k, v) for x in many], dim=1))
        mapped = torch.vmap(torch.func.grad(loss, argnums=(0, 1, 2)), in_dims=(axis, None, None))(
            many.movedim(0, axis), k, v
        )
        for grad, reference in zip(mapped, zip(*exact, strict=True), strict=True):
            assert_gradient(grad, torch.stack(reference))
    nested = torch.vmap(torch.vmap(lambda x: call(x, k, v)))(many[None])
    torch.testing.assert_close(nested[0], torch.stack([call(x, k, v) for x in many]))
    (total,) = torch.autograd.grad(torch.vmap(loss, in_dims=(0, None, None))(many, k.requires_grad_(), v).sum(), k)
    assert_gradient(total, sum(grads[1] for grads in exact))


@CALLS
def test_a_map_over_nothing(call: Any) -> None:
    """Shapes of results and gradients, as if there were something."""
    q, k, v = (x.detach() for x in draw())
    none = q.new_empty(0, *q.shape)
    outs, lses = torch.vmap(lambda q: call(q, k, v, return_lse=True))(none)
    out, lse = call(q, k, v, return_lse=True)
    assert outs.shape == (0, *out.shape) and lses.shape == (0, *lse.shape)
    mapped = torch.vmap(torch.func.grad(lambda q, k: call(q, k, v).sum(), argnums=(0, 1)), in_dims=(0, None))(none, k)
    assert [grad.shape for grad in mapped] == [(0, *q.shape), (0, *k.shape)]


def test_func_jacobian() -> None:
    q, k, v = (x.detach()[:1, :3] for x in draw())
    ours = torch.func.jacrev(lambda q: cuflash.attention(q, k, v))(q)
    theirs = torch.func.jacrev(lambda q: dense_attention(q, k, v)[0])(q)
    assert_gradient(ours, theirs)
    old = torch.autograd.functional.jacobian(lambda q: cuflash.attention(q, k, v), q, vectorize=True)
    assert_gradient(old, theirs)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_what_torch_func_cannot_have() -> None:
    q, k, v = (x.detach() for x in draw())
    call = lambda q: cuflash.torch.attention(q, k, v).sum()  # noqa: E731
    with pytest.raises(cuflash.UnsupportedError, match="forward-mode differentiation of cuflash attention"):
        torch.func.jvp(call, (q,), (q,))
    operator = torch.ops.cuflash.attention
    with pytest.raises(cuflash.UnsupportedError, match="forward-mode differentiation of cuflash attention"):
        torch.func.jvp(lambda q: operator(q, k, v, "", None, "bshd", False)[0], (q,), (q,))
    for backend in ("eager", "aot_eager"):
        torch._dynamo.reset()
        compiled = torch.compile(lambda q: torch.func.jvp(call, (q,), (q,)), backend=backend)
        with pytest.raises(Exception, match="forward-mode differentiation of cuflash attention"):
            compiled(q)
    with pytest.raises(cuflash.UnsupportedError, match="second derivatives of cuflash attention"):
        torch.func.jacrev(torch.func.jacrev(call))(q)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(q.requires_grad_(), k.new_ones(q.shape))
        with pytest.raises(cuflash.UnsupportedError, match="forward-mode differentiation"):
            call(dual)


# --- on a GPU --------------------------------------------------------------------------------------------------


@CALLS
def test_one_launch_with_the_lse(gpu: FakeGpu, call: Any) -> None:
    """The call of a GPU tensor is the plain one with an LSE, and its gradient the plain `attention_backward`."""
    inputs = [torch.nn.Parameter(torch.randn(1, 16, 2, 8).half()) for _ in range(3)]
    options = {"causal": "top_left", "scale": 0.5}
    for times in (1, 2):
        out = call(*inputs, **options)
        assert len(gpu.launches) == times and len(gpu.compiled) == 1 and gpu.launches[-1].params["lse"]
    grads = torch.autograd.grad(out, inputs, like(out))
    first, main = gpu.launches[2:]  # of a Hopper GPU, whose main kernel makes dQ as well
    plain = [x.detach() for x in inputs]
    expected, lse = cuflash.attention(*plain, **options, return_lse=True)
    assert same((out, *grads), (expected, *cuflash.attention_backward(like(out), *plain, expected, lse, **options)))
    assert [main.params[name] for name in ("q", "k", "v")] == [x.data_ptr() for x in inputs]
    assert first.params["out"] == out.data_ptr() and first.params["dlse"] == 0
    assert [main.params["dq"], main.params["dk"], main.params["dv"]] == [grad.data_ptr() for grad in grads]


def pass_of(inputs: list[Tensor], dout: Tensor | None = None, **options: Any) -> tuple[Tensor, ...]:
    out = cuflash.torch.attention(*inputs, **options)
    return torch.autograd.grad(out, inputs, like(out) if dout is None else dout)  # type: ignore[no-any-return]


def test_an_equal_backward_pass_looks_at_nothing_again(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its plan is found with the forward pass's: no table of backward plans, and only the forward pass makes a key."""
    inputs = draw("float16")
    cases: list[dict[str, Any]] = [{}, {"causal": True}, {"scale": 0.5, "deterministic": True}]
    first = [pass_of(inputs, **case) for case in cases]
    looked: list[Tensor] = []
    one, three = torch_arrays.geometry, torch_arrays.geometries
    monkeypatch.setattr(torch_arrays, "geometry", lambda x: looked.append(x) or one(x))
    monkeypatch.setattr(torch_arrays, "geometries", lambda *qkv: looked.extend(qkv) or three(*qkv))
    for name in ("gradients", "remember_with"):
        monkeypatch.setattr(cuflash.torch, name, None)
    for case, expected in zip(cases, first, strict=True):
        looked.clear()
        assert same(expected, pass_of(inputs, **case))
        assert len(looked) == 3 and all(x is y for x, y in zip(looked, inputs, strict=True))
    assert len(gpu.launches) == 8 * len(cases)


def test_every_difference_to_the_pass_before_is_seen(gpu: FakeGpu) -> None:
    """What arrives, options, torch's switch: each has a plan of its own, and finds it again."""
    inputs = [torch.randn(2, 16, 2, 8).half().requires_grad_() for _ in range(3)]
    dout = like(inputs[0])
    padded = torch.empty(*dout.shape[:-1], 16).half()[..., :8].copy_(dout)
    shifted = torch.empty(dout.numel() + 1).half()[1:].view(dout.shape).copy_(dout)
    launched: dict[Any, Any] = {}
    for _ in range(2):
        for place, arriving in enumerate((dout, padded, shifted, dout[:1].expand_as(dout))):
            for deterministic in (False, True):
                torch.use_deterministic_algorithms(deterministic)
                try:
                    grads = pass_of(inputs, arriving)
                finally:
                    torch.use_deterministic_algorithms(False)
                launches = [launch for launch in gpu.launches if launch.loaded.problem.task == "backward_rows"]
                rows = launches[-1]  # the kernel that reads dO as it lies, in both families
                params, problem = rows.params, rows.loaded.problem
                assert bool(params["turns"]) == deterministic and params["dout"] == arriving.data_ptr()
                kind = problem.access_bytes, params["dout_batch_stride"], params["dout_seq_stride"]
                assert launched.setdefault((place, deterministic), kind) == kind
                for grad, reference in zip(grads, dense_gradients(inputs, (arriving, None)), strict=True):
                    assert_gradient(grad, reference)
    assert len(set(launched.values())) == 4 and len(jit.BACKWARD_PLANS) == 8


def moving(pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]) -> Any:
    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


def test_tensors_that_hooks_have_moved(gpu: FakeGpu) -> None:
    """To other memory, or in the same memory to another order: the plan of the call before is not for them."""
    inputs = [torch.randn(2, 16, 2, 8).half().requires_grad_() for _ in range(3)]
    expected = pass_of(inputs)

    def shifted(x: Tensor) -> Tensor:
        """Of an input, a copy that vectors of two elements cannot load."""
        if x.data_ptr() not in [leaf.data_ptr() for leaf in inputs]:
            return x
        return torch.empty(x.numel() + 1, dtype=x.dtype)[1:].view(x.shape).copy_(x.detach())

    with moving(lambda x: x, shifted):
        assert same(expected, pass_of(inputs))
    assert [launch.loaded.problem.access_bytes for launch in gpu.launches[-3:]] == [2, 2, 2]

    def turned(x: Tensor) -> Tensor:
        """The tensor in another order of its axes, written over the one that was saved."""
        order = list(range(x.dim()))[::-1]
        with torch.no_grad():
            copy = x.detach().clone()
            other = x.detach().as_strided(x.shape, [copy.permute(order).contiguous().stride()[i] for i in order])
            return other.copy_(copy)

    with moving(lambda x: x, turned):
        assert same(expected, pass_of([x.detach().clone().requires_grad_() for x in inputs]))
    assert same(expected, pass_of(inputs))


@pytest.mark.parametrize("moved", range(5), ids=["q", "k", "v", "out", "lse"])
def test_one_tensor_that_a_hook_has_moved(gpu: FakeGpu, moved: int) -> None:
    """To other memory in the same layout, and what it leaves is overwritten: it is read where it is now."""
    inputs = [torch.randn(2, 16, 2, 8).half().requires_grad_() for _ in range(3)]
    expected = pass_of(inputs)
    packed: list[Tensor] = []
    copies: list[Tensor] = []

    def pack(x: Tensor) -> int:
        packed.append(x)
        return len(packed) - 1

    def unpack(place: int) -> Tensor:
        if place != moved:
            return packed[place]
        with torch.no_grad():
            copies.append(packed[place].detach().clone())
            packed[place].detach().fill_(float("nan"))
        return copies[-1]

    with moving(pack, unpack):
        assert same(expected, pass_of(inputs))
    first, main = (launch.params for launch in gpu.launches[-2:])
    assert copies[0].data_ptr() in {main["q"], main["k"], main["v"], first["out"], first["lse"]}


def test_a_dispatch_mode_in_the_backward_pass_alone(gpu: FakeGpu) -> None:
    """It sees the operator, also after an equal pass without it."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Record(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    seen: list[str] = []
    inputs = draw("float16")
    expected = pass_of(inputs)
    out = cuflash.attention(*inputs)
    dout = like(out)
    with Record():
        assert same(expected, torch.autograd.grad(out, inputs, dout))
    assert "cuflash.attention_backward.default" in seen


def test_tensors_whose_data_was_replaced(gpu: FakeGpu) -> None:
    """At the same address, which torch does not notice: a plan for another shape or dtype would write anywhere."""
    whole = torch.randn(2, 16, 2, 8).half()
    for place in range(3):
        for replaced, error in ((whole, ValueError), (whole[:1].view(torch.bfloat16), TypeError)):
            inputs = [torch.randn(1, 16, 2, 8).half().requires_grad_() for _ in range(3)]
            inputs[place] = whole[:1].requires_grad_()
            pass_of(inputs)
            out, launched = cuflash.attention(*inputs), len(gpu.launches)
            inputs[place].data = replaced
            with pytest.raises(error, match=r"batch|dtype"):
                torch.autograd.grad(out, inputs, like(out))
            assert len(gpu.launches) == launched


def test_checkpointing_makes_what_was_saved_anew(gpu: FakeGpu) -> None:
    """At other addresses, and once for each backward pass, which torch insists on: whatever arrives."""
    from torch.utils.checkpoint import checkpoint

    def step(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return cuflash.attention(2 * q, k, v, causal=True)

    inputs = draw("float16")
    expected = gradients(step, inputs)
    for negated in (False, True):
        out = checkpoint(step, *inputs, use_reentrant=False)
        dout = torch._neg_view(-like(out)) if negated else like(out)
        assert same(expected, torch.autograd.grad(out, inputs, dout))


def test_what_arrives_after_an_equal_pass(gpu: FakeGpu) -> None:
    """Negated lazily, which the plan of the same layout does not know; at the LSE as well, or there alone."""
    inputs = draw("float16")
    dout = like(cuflash.attention(*inputs))
    expected = pass_of(inputs, dout)
    for _ in range(2):
        for grad, reference in zip(pass_of(inputs, torch._neg_view(dout)), expected, strict=True):
            assert torch.equal(grad, -reference)
        out, lse = cuflash.attention(*inputs, return_lse=True)
        dlse = like(lse)
        for arriving in ((dout, dlse), (None, dlse)):
            ends, given = zip(
                *[(e, x) for e, x in zip((out, lse), arriving, strict=True) if x is not None], strict=True
            )
            grads = torch.autograd.grad(ends, inputs, given, retain_graph=True)
            for grad, reference in zip(grads, dense_gradients(inputs, arriving), strict=True):
                assert_gradient(grad, reference)
        assert same(expected, torch.autograd.grad(out, inputs, dout))


def test_a_backward_pass_where_forward_mode_may_be(gpu: FakeGpu) -> None:
    inputs = draw("float16")
    expected = pass_of(inputs)
    out = cuflash.attention(*inputs)
    with torch.autograd.forward_ad.dual_level():
        assert same(expected, torch.autograd.grad(out, inputs, like(out)))


def test_another_device_and_stream(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradient is launched on what is current when it is computed, on the device of the tensors."""
    inputs = draw("float16")
    expected = pass_of(inputs)
    out = cuflash.attention(*inputs)
    gpu.device, gpu.streams[0] = 1, 77
    try:
        assert same(expected, torch.autograd.grad(out, inputs, like(out)))
    finally:
        gpu.device = 0
    assert gpu.switches == 1 and [launch.stream for launch in gpu.launches[-3:]] == [77, 77, 77]


def test_nothing_is_kept_of_a_pass(gpu: FakeGpu) -> None:
    """Neither by its plans nor by what is prepared for the next pass at its addresses."""
    inputs = draw("float16")
    tensors = [*inputs, cuflash.attention(*inputs)]
    dout = like(tensors[3])
    tensors += [dout, *torch.autograd.grad(tensors[3], inputs, dout)]
    held = [weakref.ref(x) for x in tensors]
    assert jit.PLANS and jit.BACKWARD_PLANS and jit.prepared
    del inputs, tensors, dout
    assert not any(reference() is not None for reference in held)


def test_another_device_does_not_remember_again(gpu: FakeGpu) -> None:
    inputs = draw("float16")
    pass_of(inputs)
    (plan,) = jit.PLANS.values()
    for _ in range(2):
        out = cuflash.attention(*inputs)
        gpu.device = 1
        try:
            torch.autograd.grad(out, inputs, like(out))
        finally:
            gpu.device = 0
    assert len(plan.backward) == 1 and gpu.switches == 2


def test_layouts_that_a_plan_remembers_are_bounded(gpu: FakeGpu) -> None:
    inputs = draw("float16")
    out = cuflash.attention(*inputs)
    for extra in range(1, jit.MAX_FOLLOWERS + 4):
        dout = torch.empty(*out.shape[:-1], out.shape[-1] + extra).half()[..., : out.shape[-1]].copy_(like(out))
        pass_of(inputs, dout)
    (plan,) = jit.PLANS.values()
    assert len(plan.backward) == jit.MAX_FOLLOWERS


def test_threads_share_plans(gpu: FakeGpu) -> None:
    """First passes and hits of several layouts in all threads at once; every thread has its own gradients."""
    draws = [draw("float16", lengths=(7, keys)) for keys in (9, 10, 11)]
    expected = [gradients(cuflash.attention, inputs) for inputs in draws]
    jit.forget_plans()
    meet = threading.Barrier(8)

    def work(seed: int) -> None:
        meet.wait(10)
        for i in range(12):
            place = (seed + i) % len(draws)
            factor = 2.0 ** ((seed + i) % 3)
            leaves = [x.detach().clone().requires_grad_() for x in draws[place]]
            out = cuflash.torch.attention(*leaves)
            grads = torch.autograd.grad(out, leaves, factor * like(out))
            assert all(
                torch.allclose(x, factor * y, rtol=0.01, atol=0.01) for x, y in zip(grads, expected[place], strict=True)
            )

    with ThreadPoolExecutor(8) as pool:
        for future in [pool.submit(work, seed) for seed in range(8)]:
            future.result()
    assert len(jit.BACKWARD_PLANS) == 3
