"""The README's examples run as they stand, and say what is true."""

from __future__ import annotations

from typing import Any

import pytest

from tests.readme import example

pytestmark = pytest.mark.gpu


def test_cupy_example() -> None:
    import cupy as cp

    names = example("import cupy")
    assert isinstance(names["out"], cp.ndarray) and names["out"].shape == names["q"].shape


def test_torch_example() -> None:
    torch = pytest.importorskip("torch")
    names = example("import torch")
    theirs, ours = names["a"], names["b"]
    exact = (
        names["F"]
        .scaled_dot_product_attention(*(names[x].double().transpose(1, 2) for x in "qkv"), is_causal=True)
        .transpose(1, 2)
    )
    assert torch.linalg.norm(ours - exact) <= 1.5 * torch.linalg.norm(theirs - exact)


def test_jax_example(jax_on_gpu: Any, gradients_on_gpu: None) -> None:
    names = example("import jax")
    assert all(x.shape == names["q"].shape and x.devices() == names["q"].devices() for x in names["grads"])
