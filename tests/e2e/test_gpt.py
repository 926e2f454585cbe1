"""A small language model trained on real text: with torch, and in plain arrays with `attention_backward`."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.e2e.gpt import Adam, PlainGpt, Shape, alphabet, batches, pair_entropy, torch_loss

pytestmark = pytest.mark.e2e

TINY = Shape(layers=2, width=32, heads=4, kv_heads=2, length=40)


@pytest.fixture(scope="module")
def torch() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip("torch")


def math_attention(q: Any, k: Any, v: Any) -> Any:
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    with sdpa_kernel(SDPBackend.MATH):
        heads_first = (x.transpose(1, 2) for x in (q, k, v))
        return scaled_dot_product_attention(*heads_first, is_causal=True, enable_gqa=True).transpose(1, 2)


def cuflash_attention(q: Any, k: Any, v: Any) -> Any:
    import cuflash.torch

    return cuflash.torch.attention(q, k, v, causal=True)


# --- torch -----------------------------------------------------------------------------------------------------


def train(
    torch: Any,
    shape: Shape,
    attention: Callable[..., Any],
    *,
    steps: int,
    batch: int,
    dtype: str,
    device: str,
    seed: int,
) -> np.ndarray[Any, Any]:
    """The loss of each step; on a GPU with bfloat16 where torch's autocast says so."""
    make = {"dtype": getattr(torch, dtype), "device": device}
    weights = {name: torch.tensor(x, **make).requires_grad_() for name, x in shape.initial(seed).items()}
    optimizer = torch.optim.Adam(weights.values(), lr=2e-3, betas=(0.9, 0.95))
    losses = []
    for tokens in torch.from_numpy(batches(steps, batch, shape.length, seed)).to(device):
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            loss = torch_loss(weights, shape, tokens, attention)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses).double().cpu().numpy()  # type: ignore[no-any-return]


def test_torch_on_the_cpu_step_for_step(torch: Any) -> None:
    """In float32 as close to the float64 run as with torch's own attention in float32."""
    options = {"steps": 8, "batch": 4, "device": "cpu", "seed": 0}
    exact = train(torch, TINY, math_attention, dtype="float64", **options)
    theirs, ours = (train(torch, TINY, x, dtype="float32", **options) for x in (math_attention, cuflash_attention))
    assert np.abs(ours - exact).max() <= 2 * np.abs(theirs - exact).max()
    double = train(torch, TINY, cuflash_attention, dtype="float64", **options)
    assert np.abs(double - exact).max() <= 16 * np.finfo(np.float64).eps * exact.max()
    assert exact[-1] < exact[0] - 0.1


@pytest.mark.gpu
def test_torch_on_the_gpu_within_the_spread_of_seeds(torch: Any) -> None:
    """Another attention changes the loss curve less than another seed does, and the model learns."""
    if not torch.cuda.is_available():
        pytest.skip("torch without CUDA")
    options = {"steps": 300, "batch": 16, "dtype": "float32", "device": "cuda"}
    theirs = np.stack([train(torch, Shape(), math_attention, seed=seed, **options) for seed in range(3)])
    ours = train(torch, Shape(), cuflash_attention, seed=0, **options)
    curves = np.vstack([theirs, ours]).reshape(4, 12, 25).mean(axis=2)
    spread = np.ptp(curves[:3], axis=0).mean()
    apart = np.abs(curves[3] - curves[0]).max()
    assert apart <= spread, f"mean losses of 25 steps: {curves[3]}; torch's of seeds 0, 1, 2: {curves[:3]}"
    assert curves[:, -1].max() < pair_entropy(), curves


# --- plain arrays ----------------------------------------------------------------------------------------------


def plain_case(dtype: Any, shape: Shape = TINY) -> tuple[dict[str, Any], Any]:
    """Weights that are nowhere special, and a batch shorter than the positions."""
    rng = np.random.default_rng(1)
    weights = {name: x + 0.1 * rng.standard_normal(x.shape) for name, x in shape.initial(0).items()}
    return {name: x.astype(dtype) for name, x in weights.items()}, batches(1, 3, shape.length - 5, 0)[0]


def test_plain_gradients_by_finite_differences() -> None:
    """In float64, for every weight along a random direction."""
    weights, tokens = plain_case(np.float64)
    _, grads = PlainGpt(weights, TINY).loss_and_gradients(tokens)
    rng, step = np.random.default_rng(2), 1e-5
    for name, grad in grads.items():
        direction = rng.standard_normal(grad.shape)
        direction /= np.linalg.norm(direction)
        ends = [
            PlainGpt(weights | {name: weights[name] + sign * step * direction}, TINY).loss_and_gradients(tokens)[0]
            for sign in (1, -1)
        ]
        slope = (ends[0] - ends[1]) / (2 * step)
        assert abs(slope - (grad * direction).sum()) < 1e-8 * max(1, np.linalg.norm(grad)), name
        assert grad.any(), name


def test_plain_gradients_by_autograd(torch: Any) -> None:
    weights, tokens = plain_case(np.float64)
    loss, grads = PlainGpt(weights, TINY).loss_and_gradients(tokens)
    tensors = {name: torch.from_numpy(x).requires_grad_() for name, x in weights.items()}
    expected = torch_loss(tensors, TINY, torch.from_numpy(tokens), math_attention)
    expected.backward()
    assert abs(loss - expected.item()) < 1e-13
    assert grads.keys() == tensors.keys()
    for name, tensor in tensors.items():
        reference = tensor.grad.numpy()
        assert np.linalg.norm(grads[name] - reference) <= 1e-12 * np.linalg.norm(reference), name


def train_plain(model: PlainGpt, steps: int, batch: int) -> list[float]:
    optimizer, losses = Adam(model.weights), []
    for tokens in model.xp.asarray(batches(steps, batch, model.shape.length, 0)):
        loss, grads = model.loss_and_gradients(tokens)
        optimizer.step(grads)
        losses.append(loss)
    return [float(loss) for loss in losses]


def test_plain_training_on_the_cpu() -> None:
    weights = {name: x.astype(np.float32) for name, x in TINY.initial(0).items()}
    losses = train_plain(PlainGpt(weights, TINY), steps=60, batch=8)
    assert abs(losses[0] - np.log(len(alphabet()))) < 0.5, "a model that knows nothing"
    assert np.mean(losses[-10:]) < np.mean(losses[:10]) - 0.5


@pytest.mark.gpu
def test_plain_training_on_the_gpu() -> None:
    """On CuPy arrays, attention in float16: gradients as on the CPU in float64, and the loss falls."""
    cp = pytest.importorskip("cupy")
    shape = Shape(layers=2)
    weights, tokens = plain_case(np.float64, shape)
    _, expected = PlainGpt(weights, shape).loss_and_gradients(tokens)
    on_device = {name: cp.asarray(x, cp.float32) for name, x in weights.items()}
    _, grads = PlainGpt(on_device, shape, cp, np.float16).loss_and_gradients(cp.asarray(tokens))
    for name, reference in expected.items():
        error = np.linalg.norm(grads[name].get() - reference)
        assert error <= 8 * np.finfo(np.float16).eps * np.linalg.norm(reference), name
    fresh = {name: cp.asarray(x, cp.float32) for name, x in shape.initial(0).items()}
    losses = train_plain(PlainGpt(fresh, shape, cp, np.float16), steps=60, batch=8)
    assert np.mean(losses[-10:]) < np.mean(losses[:10]) - 0.5
