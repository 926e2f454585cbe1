"""The README's examples run as they stand, and say what is true."""

from __future__ import annotations

from typing import Any

import pytest

from tests.readme import example
from tests.torch_dense import dense_attention

pytestmark = pytest.mark.gpu


def test_cupy_example() -> None:
    import cupy as cp

    names = example("import cupy")
    assert isinstance(names["out"], cp.ndarray) and names["out"].shape == names["q"].shape


def test_torch_example() -> None:
    torch = pytest.importorskip("torch")
    names = example("scaled_dot_product_attention")
    theirs, ours = names["a"], names["b"]
    exact = (
        names["F"]
        .scaled_dot_product_attention(*(names[x].double().transpose(1, 2) for x in "qkv"), is_causal=True)
        .transpose(1, 2)
    )
    assert torch.linalg.norm(ours - exact) <= 1.5 * torch.linalg.norm(theirs - exact)


def test_jax_example(jax_on_gpu: Any) -> None:
    names = example("import jax")
    assert all(x.shape == names["q"].shape and x.devices() == names["q"].devices() for x in names["grads"])


def test_training_example() -> None:
    torch = pytest.importorskip("torch")
    names = example("loss.backward()")
    assert names["loss"].is_cuda and check_training(torch, names)


def check_training(torch: Any, names: dict[str, Any]) -> bool:
    """The gradient of the projection's weights, against float64 autograd of dense attention."""
    exact = torch.nn.Linear(256, 3 * 256).double().requires_grad_()
    exact.load_state_dict(names["project"].state_dict())
    q, k, v = exact(names["x"].cpu().double()).view(2, 128, 3, 4, 64).unbind(2)
    dense_attention(q, k, v, causal=True)[0].square().mean().backward()
    error = torch.linalg.norm(names["project"].weight.grad.cpu() - exact.weight.grad)
    return bool(error <= 4 * torch.finfo(torch.bfloat16).eps * torch.linalg.norm(exact.weight.grad))
