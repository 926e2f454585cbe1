"""torch tensors: on the CPU for real, and as if they were on a GPU, through plans and launches."""

from __future__ import annotations

import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cuflash
from cuflash import jit
from tests.oracle import oracle
from tests.torch_dense import assert_gradient, dense_gradients
from tests.unit import fake_gpu
from tests.unit.fake_gpu import FakeGpu

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    torch = pytest.importorskip("torch")

ROOT = Path(__file__).resolve().parents[2]
SHAPE = (2, 30, 4, 16)
DTYPES = ("float16", "bfloat16", "float32", "float64")


@pytest.fixture(params=["cpu", "gpu"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGpu | None]:
    gpu = fake_gpu.install_for_torch(monkeypatch) if request.param == "gpu" else None
    yield gpu
    if gpu:
        fake_gpu.remove(gpu)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGpu]:
    installed = fake_gpu.install_for_torch(monkeypatch)
    yield installed
    fake_gpu.remove(installed)


def qkv(dtype: str = "float16", shape: tuple[int, ...] = SHAPE) -> list[Any]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).to(getattr(torch, dtype)) for _ in range(3)]


def check(out: Any, q: Any, k: Any, v: Any, causal: Any = False) -> None:
    """All in bshd; against the float64 oracle, within a few roundings of the output."""
    double = [x.detach().double().numpy().swapaxes(1, 2) for x in (q, k, v)]
    expected, _ = oracle(*double, causal=causal)
    unit = torch.finfo(out.dtype).eps
    np.testing.assert_allclose(out.double().numpy().swapaxes(1, 2), expected, rtol=2 * unit, atol=4 * unit)


@pytest.mark.parametrize("dtype", DTYPES)
def test_cpu_tensors(dtype: str) -> None:
    q, k, v = qkv(dtype)
    out, lse = cuflash.attention(q, k, v, causal=True, return_lse=True)
    assert type(out) is torch.Tensor and out.dtype is q.dtype and out.device == q.device and not out.requires_grad
    assert lse.dtype is (torch.float64 if dtype == "float64" else torch.float32) and lse.shape == (2, 4, 30)
    check(out, q, k, v, "bottom_right")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_tensors_on_a_gpu(gpu: FakeGpu, dtype: str) -> None:
    q, k, v = qkv(dtype)
    gpu.streams[0] = 4321
    for _ in range(2):
        out, lse = cuflash.attention(q, k, v, causal=True, return_lse=True)
        assert type(out) is torch.Tensor and out.dtype is q.dtype and out.is_contiguous()
        assert lse.dtype is torch.float32 and lse.shape == (2, 4, 30)
        check(out, q, k, v, "bottom_right")
    assert [launch.stream for launch in gpu.launches] == [4321, 4321]
    assert gpu.launches[0].loaded.problem.dtype == dtype and len(gpu.compiled) == 1


def test_agrees_with_scaled_dot_product_attention(backend: FakeGpu | None) -> None:
    """The layout bhsd and the top-left corner are torch's conventions."""
    q, k, v = (x.transpose(1, 2) for x in qkv())
    longer = [torch.cat([x, x], dim=2) for x in (k, v)]
    for keys, values in ((k, v), longer):
        theirs = torch.nn.functional.scaled_dot_product_attention(
            q.double(), keys.double(), values.double(), is_causal=True
        )
        ours = cuflash.attention(q, keys, values, causal="top_left", layout="bhsd")
        torch.testing.assert_close(ours.double(), theirs, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_views(backend: FakeGpu | None, dtype: str) -> None:
    """Packed slices, transposed, padded and expanded tensors; no copies."""
    q, k, v = qkv(dtype)
    packed = torch.stack([q, k, v], dim=3)
    check(cuflash.attention(*packed.unbind(3)), q, k, v)
    moved = [x.permute(3, 0, 2, 1).contiguous().permute(1, 3, 2, 0) for x in (q, k, v)]
    assert moved[0].stride() != q.stride()
    check(cuflash.attention(*moved), q, k, v)
    one = k[:, :, :1]
    spread = one.expand(-1, -1, 4, -1)
    check(cuflash.attention(q, spread, v), q, spread, v)
    padded = torch.zeros(2, 30, 4, 24, dtype=q.dtype)
    padded[..., :16] = q
    check(cuflash.attention(padded[..., :16], k, v), q, k, v)


def test_out(backend: FakeGpu | None) -> None:
    q, k, v = qkv()
    for target in (torch.full_like(q, float("nan")), torch.full((2, 4, 30, 16), float("nan")).half().transpose(1, 2)):
        for _ in range(2):
            assert cuflash.attention(q, k, v, out=target) is target
            check(target, q, k, v)
    for shared in (q, k[:, :, :, :], q.view(-1).view(SHAPE)):
        with pytest.raises(ValueError, match="out shares memory with"):
            cuflash.attention(q, k, v, out=shared)
    with pytest.raises(ValueError, match="share memory"):
        cuflash.attention(q, k, v, out=torch.zeros(1, dtype=torch.half).expand(SHAPE))
    with pytest.raises(TypeError, match="q has dtype float16 and out float32"):
        cuflash.attention(q, k, v, out=torch.empty(SHAPE))


def test_autograd_notices_that_out_was_written(backend: FakeGpu | None) -> None:
    q, k, v = qkv()
    out = torch.ones_like(q)
    weight = torch.ones_like(q, requires_grad=True)
    product = (weight * out).sum()
    cuflash.attention(q, k, v, out=out)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


def test_tensors_that_require_grad_are_ordinary_without_grad_mode(backend: FakeGpu | None) -> None:
    """B-152: whatever was called before."""
    q, k, v = qkv()
    plain = cuflash.attention(q, k, v)
    k.requires_grad_()
    for _ in range(2):
        out = cuflash.attention(q, k, v)
        assert torch.equal(out, plain) and out.requires_grad
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                out = cuflash.attention(q, k, v)
                assert torch.equal(out, plain) and not out.requires_grad
    with torch.inference_mode():
        inside = torch.empty_like(q)
        assert torch.equal(cuflash.attention(q, k, v, out=inside), plain)


def test_out_and_gradients(backend: FakeGpu | None) -> None:
    """What is written into a tensor cannot be followed; the refusal comes before anything is written."""
    q, k, v = qkv()
    target = torch.full_like(q, float("nan"))
    with pytest.raises(cuflash.UnsupportedError, match=r"out is given, and torch follows.*leave out= away"):
        cuflash.attention(q, torch.nn.Parameter(k), v, out=target)
    assert target.isnan().all()
    with pytest.raises(cuflash.UnsupportedError, match=r"out requires grad.*out\.detach\(\)"):
        cuflash.attention(q, k, v, out=target.requires_grad_())
    assert torch.equal(cuflash.attention(q, k, v, out=target.detach()), cuflash.attention(q, k, v))


def test_parameters_are_tensors(backend: FakeGpu | None) -> None:
    q, k, v = qkv()
    frozen = torch.nn.Parameter(k, requires_grad=False)
    check(cuflash.attention(q, frozen, v), q, k, v)
    check(cuflash.attention(torch.nn.Parameter(q), k, v).detach(), q, k, v)


def test_warmup_and_explain_take_tensors_that_require_grad(backend: FakeGpu | None) -> None:
    """They compute nothing."""
    q, k, v = (torch.nn.Parameter(x) for x in qkv())
    assert len(cuflash.warmup(q, k, v, return_lse=True)) == (1 if backend else 0)
    assert "requires grad" not in str(cuflash.explain(q, k, v))


def test_other_tensors_are_refused(backend: FakeGpu | None) -> None:
    q, k, v = qkv()
    cuflash.attention(q, k, v)

    class Special(torch.Tensor):
        pass

    negated = torch.complex(q.float(), k.float()).conj().imag.half()
    flipped = torch.view_as_complex(torch.stack([q.float(), k.float()], -1)).conj().imag
    assert not negated.is_neg() and flipped.is_neg()
    meta = [torch.empty(SHAPE, dtype=torch.half, device="meta") for _ in range(3)]
    for operands, error, words in (
        ((q, k.as_subclass(Special), v), TypeError, r"k is a .*Special, a subclass of torch\.Tensor"),
        ((q, k, v.to_sparse()), TypeError, "v is a sparse or nested tensor"),
        (meta, cuflash.UnsupportedError, "q is on device meta"),
        ((q.to(torch.uint16), k, v), TypeError, r"q has dtype uint16.*q\.view\(torch\.bfloat16\)"),
        ((q.to(torch.float8_e4m3fn), k, v), TypeError, "k has dtype float16; accepted are q, k and v of float8_e4m3fn"),
        (
            (q, k.to(torch.float8_e4m3fn), v),
            cuflash.UnsupportedError,
            "float8_e4m3fn; 8-bit floats are for cuflash.att",
        ),
        ((flipped, flipped, flipped), cuflash.UnsupportedError, r"q is a lazily negated view; pass q\.resolve_neg\(\)"),
    ):
        with pytest.raises(error, match=words):
            cuflash.attention(*operands)


def test_one_look_at_three_sees_what_three_looks_see(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every part of each, and all that makes a look fail, at each place."""
    from torch.autograd import forward_ad
    from torch.utils._python_dispatch import TorchDispatchMode

    from cuflash.arrays import torch_arrays

    x = torch.zeros(1, 8, 2, 16).half()
    others = (
        x,
        x[:, :4],
        x.mT,
        x.float(),
        torch._neg_view(x),
        torch.nn.Parameter(x, requires_grad=False),
        x.to("meta"),
    )
    monkeypatch.setattr(torch_arrays, "_seen", {})
    looks = [torch_arrays.geometry(other) for other in others]
    for _ in range(2):  # the second time by what the first one has left
        for place in range(3):
            for other, look in zip(others, looks, strict=True):
                three, expected = [x.clone(), x.clone(), x.clone()], [looks[0]] * 3
                three[place], expected[place] = other, look
                addresses = [one.data_ptr() for one in three]
                assert torch_arrays.geometries(*three) == (sum((key for key, _ in expected), ()), *addresses)
    known = sum(map(len, torch_arrays._seen.values()))
    assert known == 3 * (len(others) - 1) + 1
    monkeypatch.setattr(torch_arrays, "_seen", {})
    for _ in range(2):  # one tensor at two places or three, which torch's check would refuse
        for places in ("xxx", "xyx", "xyy", "xxy", "xyz", "zzz"):
            three = [x if place == "x" else others[5] if place == "y" else others[0].clone() for place in places]
            expected = tuple(torch_arrays.geometry(one) for one in three)
            addresses = [at for _, at in expected]
            assert torch_arrays.geometries(*three) == (sum((key for key, _ in expected), ()), *addresses)
    for place in range(3):
        three = [x, x, x]
        three[place] = torch.nn.Parameter(x)
        with pytest.raises(TypeError, match="followed by torch"):
            torch_arrays.geometries(*three)
        with torch.no_grad():
            torch_arrays.geometries(*three)
    for follower in (TorchDispatchMode, forward_ad.dual_level):
        with follower():
            for look in (lambda: torch_arrays.geometry(x), lambda: torch_arrays.geometries(x, x, x)):
                with pytest.raises(TypeError, match="followed by torch"):
                    look()


@pytest.mark.parametrize(
    "make",
    [None, lambda *x, **sizes: Anything(), lambda *x: Anything(), lambda *x, **sizes: object()],
    ids=["none", "careless", "other arguments", "another method"],
)
def test_without_a_check_of_torch_that_can_be_trusted(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch, make: Any) -> None:
    """A build without one, or with one that takes anything or is another: nothing is known by it, and all is right."""
    from cuflash.arrays import torch_arrays

    monkeypatch.setattr(torch._C._dynamo.guards, "TensorGuards", make)
    monkeypatch.setattr(torch_arrays, "_maker_of_checks", torch_arrays._maker_of_checks.__wrapped__)
    monkeypatch.setattr(torch_arrays, "_seen", {})
    for _ in range(2):
        q, k, v = (x.requires_grad_() for x in qkv())
        out = cuflash.attention(q, k, v)
        torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
        check(out.detach(), q.detach(), k.detach(), v.detach())
    (plan,) = jit.PLANS.values()
    assert not torch_arrays._seen and not plan.backward and len(jit.BACKWARD_PLANS) == 1 and len(gpu.launches) == 6


class Anything:
    """A check that refuses nothing."""

    def check(self, *tensors: Any) -> bool:
        return True


@pytest.mark.parametrize("shape", [(2, 8, 3, 16), (1, 1, 1, 1), (4, 0, 2, 8), (3, 1, 0), (7,), ()], ids=str)
def test_new_tensors_on_a_gpu(monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...]) -> None:
    """Like torch's own; by the function that a build for CUDA has, of which every build has one for the CPU."""
    from cuflash.arrays import torch_arrays

    class OnGpu:
        is_cuda, dtype = True, torch.bfloat16

    monkeypatch.setattr(torch_arrays, "empty_on_gpu", torch._C._dynamo.guards._empty_strided_cpu)
    for dtype, expected in ((None, torch.bfloat16), ("float32", torch.float32), ("uint8", torch.uint8)):
        x, address = torch_arrays.empty(OnGpu, shape, dtype)
        made = torch_arrays.maker(torch.Size(shape), str(expected).removeprefix("torch."))()
        assert (made.shape, made.stride(), made.dtype) == (x.shape, x.stride(), x.dtype)
        assert torch_arrays.address(made) == made.data_ptr()
        plain = torch.empty(shape, dtype=expected)
        assert (x.shape, x.stride(), x.dtype) == (plain.shape, plain.stride(), expected) and x.data_ptr() == address
        assert not x.requires_grad and x.is_contiguous()
    with torch.inference_mode():
        assert torch_arrays.empty(OnGpu, shape)[0].is_inference()


def test_lazy_negation_is_not_forgotten(gpu: FakeGpu) -> None:
    """The same strides with and without the bit: only one of them is in the table."""
    q, k, v = qkv("float16", (1, 8, 2, 16))
    view = torch._neg_view(q)
    cuflash.attention(q, k, v)
    with pytest.raises(cuflash.UnsupportedError, match="resolve_neg"):
        cuflash.attention(view, k, v)
    check(cuflash.attention(view.resolve_neg(), k, v), -q, k, v)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_what_cannot_follow_is_refused_by_name(backend: FakeGpu | None) -> None:
    """They would take the result for a constant; none of them needs requires_grad."""
    from torch.autograd import forward_ad

    q, k, v = qkv("float16", (1, 8, 2, 16))

    def call(x: Any) -> Any:
        return cuflash.attention(x, k, v)

    def dual() -> None:
        with forward_ad.dual_level():
            check(call(q), q, k, v)  # an equal call but for the tangent
            call(forward_ad.make_dual(q, q))

    for function, words in (
        (lambda: torch.jit.trace(call, (q,)), "q is watched by torch.jit.trace, .*call cuflash.attention outside"),
        (dual, "q is watched by forward-mode differentiation, .*call cuflash.attention outside"),
        (lambda: torch.func.jvp(call, (q,), (q,)), "forward-mode differentiation of cuflash attention"),
    ):
        with pytest.raises(cuflash.UnsupportedError, match=words):
            function()
    check(call(q), q, k, v)


def test_mixed_kinds() -> None:
    q, k, v = qkv()
    with pytest.raises(
        TypeError, match="q is a torch tensor and k a NumPy array; all arrays of a call must be of one kind"
    ):
        cuflash.attention(q, k.numpy(), v)
    with pytest.raises(TypeError, match="q is a NumPy array and v a torch tensor"):
        cuflash.attention(q.numpy(), k.numpy(), v)
    with pytest.raises(TypeError, match="q is a torch tensor and k a NumPy array"):
        cuflash.attention(q, k.numpy(), v.requires_grad_())


def test_empty(backend: FakeGpu | None) -> None:
    for shape_q, shape_k in (((0, 3, 2, 8), (0, 4, 2, 8)), ((1, 0, 2, 8), (1, 4, 2, 8)), ((1, 3, 2, 8), (1, 0, 2, 8))):
        q = torch.zeros(shape_q).half()
        k = torch.zeros(shape_k).half()
        out, lse = cuflash.attention(q, k, k, return_lse=True, out=torch.full_like(q, float("nan")))
        assert out.shape == shape_q and (out == 0).all() and (lse == float("-inf")).all()
        assert lse.shape == (shape_q[0], 2, shape_q[1])


def test_another_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """B-143: switched to for the call, and back."""
    gpu = fake_gpu.install_for_torch(monkeypatch, device=1)
    gpu.streams[1] = 55
    q, k, v = qkv()
    for _ in range(2):
        check(cuflash.attention(q, k, v), q, k, v)
    assert gpu.device == 0 and gpu.switches == 2
    assert [(launch.stream, launch.loaded.device) for launch in gpu.launches] == [(55, 1), (55, 1)]
    fake_gpu.remove(gpu)


def test_inside_a_compiled_function(backend: FakeGpu | None) -> None:
    """The first time and later; with ``out=``, which no operator takes, torch.compile leaves the call alone."""
    q, k, v = qkv()
    compiled = torch.compile(lambda q, k, v: cuflash.attention(2 * q, k, v) + 1, backend="eager", fullgraph=True)
    filling = torch.compile(lambda q, k, v, out: cuflash.attention(2 * q, k, v, out=out) + 1, backend="eager")
    for _ in range(3):
        check(compiled(q, k, v) - 1, 2 * q, k, v)
        out = torch.full_like(q, float("nan"))
        filling(q, k, v, out)
        check(out, 2 * q, k, v)


class Producer:
    """Speaks DLPack and nothing else."""

    def __init__(self, tensor: Any) -> None:
        self.tensor = tensor

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0

    def __dlpack__(self, **options: Any) -> Any:
        return self.tensor.__dlpack__(**options)


def test_bfloat16_of_any_producer() -> None:
    """NumPy cannot read it; strides, offsets and lifetimes are right all the same."""
    q, k, v = qkv("bfloat16")
    packed = torch.stack([q, k, v], dim=3)
    expected, expected_lse = cuflash.attention(q, k, v, causal=True, return_lse=True)
    producers = [Producer(x) for x in packed.unbind(3)]
    out, lse = cuflash.attention(*producers, causal=True, return_lse=True)
    assert type(out) is np.ndarray and out.dtype.name == "bfloat16"
    assert np.array_equal(out.view(np.int16), expected.view(torch.int16).numpy())
    assert np.array_equal(lse, expected_lse.numpy())
    target = torch.full_like(packed, float("nan"))
    cuflash.attention(*producers, causal=True, out=Producer(target[:, :, :, 1]))
    assert torch.equal(target[:, :, :, 1], expected) and target[:, :, :, 0].isnan().all()
    with pytest.raises(TypeError, match=r"k: NumPy cannot view this .*Producer by DLPack"):
        cuflash.attention(producers[0], Producer(k.to(torch.float8_e8m0fnu)), producers[2])


def test_memory_of_other_producers_is_kept_and_given_back() -> None:
    from cuflash.arrays.capsule import bfloat16_view

    tensor = torch.ones(3, 4, dtype=torch.bfloat16)
    before = tensor._use_count()
    view = bfloat16_view(Producer(tensor))
    assert view.shape == (3, 4) and (view == 1).all() and tensor._use_count() > before
    del view
    assert tensor._use_count() == before
    assert bfloat16_view(Producer(torch.ones(2))) is None and bfloat16_view(Producer(tensor[:0])).shape == (0, 4)


def test_no_other_framework_is_loaded() -> None:
    """torch's path needs neither CuPy nor ml_dtypes' own tables of it."""
    code = """
import sys, warnings
sys.modules["cupy"] = sys.modules["jax"] = None
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import torch
import cuflash
q = torch.ones(1, 8, 2, 16)
assert torch.equal(cuflash.attention(q, q, q), q)
assert torch.equal(cuflash.attention(q.bfloat16(), q.bfloat16(), q.bfloat16()), q.bfloat16())
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_another_thread_may_call_while_the_first_call_still_imports() -> None:
    """What serves torch's autograd is found without a lock: so it is put there when its module is whole."""
    code = """
import builtins, threading
import torch, cuflash

q = torch.randn(1, 8, 2, 16, requires_grad=True)
seen = []

def call():
    try:
        cuflash.attention(q, q, q).sum().backward()
        seen.append("fine")
    except Exception as error:
        seen.append(repr(error))

def build_class(body, name, *bases, **options):
    if name == "_Gradients" and threading.current_thread() is threading.main_thread():
        other = threading.Thread(target=call)
        other.start()
        other.join(2)  # it waits for this import, or is through
    return build(body, name, *bases, **options)

build, builtins.__build_class__ = builtins.__build_class__, build_class
call()
while len(seen) < 2:
    pass
print(seen)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0 and done.stdout.strip() == "['fine', 'fine']", done.stdout + done.stderr


# --- gradients -------------------------------------------------------------------------------------------------


def backward_case(dtype: str, causal: Any) -> tuple[list[Any], list[Any]]:
    """q, k, v; what arrives at the output and the LSE. Every query sees a key."""
    generator = torch.Generator().manual_seed(1)
    shapes = (2, 20, 6, 16), (2, 33, 2, 16), (2, 33, 2, 24), (2, 20, 6, 24), (2, 6, 20)
    *arrays, dlse = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    arrays = [x.to(getattr(torch, dtype)) for x in arrays]
    return arrays[:3], [arrays[3], dlse if dtype == "float64" else dlse.float()]


@pytest.mark.parametrize("causal", [False, "bottom_right", "top_left"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_backward_agrees_with_autograd_of_dense_attention(dtype: str, causal: Any) -> None:
    """Against float64 autograd on the same inputs, through the output and the LSE."""
    inputs, (dout, dlse) = backward_case(dtype, causal)
    out, lse = cuflash.attention(*inputs, causal=causal, scale=-0.3, return_lse=True)
    grads = cuflash.attention_backward(dout, *inputs, out, lse, dlse=dlse, causal=causal, scale=-0.3)
    expected = dense_gradients(inputs, (dout, dlse), causal=causal, scale=-0.3)
    for grad, like, reference in zip(grads, inputs, expected, strict=True):
        assert type(grad) is torch.Tensor and grad.dtype is like.dtype and grad.is_contiguous()
        assert_gradient(grad, reference)


def test_backward_writes_grads_and_tells_autograd() -> None:
    inputs, (dout, dlse) = backward_case("bfloat16", True)
    out, lse = cuflash.attention(*inputs, causal=True, return_lse=True)
    plain = cuflash.attention_backward(dout, *inputs, out, lse, dlse=dlse, causal=True)
    grads = tuple(torch.full_like(x, float("nan")) for x in inputs)
    versions = [x._version for x in grads]
    result = cuflash.attention_backward(dout, *inputs, out, lse, dlse=dlse, causal=True, grads=grads)
    assert all(x is y and torch.equal(x, z) for x, y, z in zip(result, grads, plain, strict=True))
    assert all(x._version > before for x, before in zip(grads, versions, strict=True))


def test_backward_follows_no_tensor(backend: FakeGpu | None) -> None:
    """It is a plain function: whoever would follow it is refused, before anything else is looked at."""
    from torch.fx.experimental.proxy_tensor import make_fx

    q, k, v = qkv("float32", (1, 8, 2, 16))
    out, lse = q, torch.zeros(1, 2, 8)
    call = lambda q: cuflash.attention_backward(out, q, k, v, out, lse)[0]  # noqa: E731
    for transform, words in (
        (torch.vmap, "a transformation of torch.func"),
        (torch.func.functionalize, "a transformation of torch.func"),
        (make_fx, "make_fx"),
    ):
        with pytest.raises(cuflash.UnsupportedError, match=f"q is watched by {words}"):
            transform(call)(q[None] if transform is torch.vmap else q)


def test_backward_refusals(backend: FakeGpu | None) -> None:
    q, k, v = qkv()
    out, lse = cuflash.attention(q, k, v, return_lse=True)
    with pytest.raises(cuflash.UnsupportedError, match="k requires grad"):
        cuflash.attention_backward(out, q, k.requires_grad_(), v, out, lse)
    with pytest.raises(TypeError, match="q is a torch tensor and dout a NumPy array"):
        cuflash.attention_backward(out.numpy(), q, k.detach(), v, out, lse)
    with pytest.raises(ValueError, match=r"grads\[0\] .*share memory"):
        cuflash.attention_backward(
            out, q, k.detach(), v, out, lse, grads=(q[:1].expand(q.shape), torch.empty_like(k), torch.empty_like(v))
        )
