"""The README's examples run as they stand, and say what is true."""

from __future__ import annotations

import re
import warnings
from typing import Any

import pytest

from tests.gpu.support import ROOT

pytestmark = pytest.mark.gpu


def _example(word: str) -> dict[str, Any]:
    """Runs the README's Python block that contains a word; returns its names."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    (block,) = [block for block in blocks if word in block]
    names: dict[str, Any] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what frameworks say when they are imported
        exec(compile("import cuflash\n" + block, "README.md", "exec"), names)
    return names


def test_cupy_example() -> None:
    import cupy as cp

    names = _example("import cupy")
    assert isinstance(names["out"], cp.ndarray) and names["out"].shape == names["q"].shape


def test_torch_example() -> None:
    torch = pytest.importorskip("torch")
    names = _example("import torch")
    theirs, ours = names["a"], names["b"]
    exact = (
        names["F"]
        .scaled_dot_product_attention(*(names[x].double().transpose(1, 2) for x in "qkv"), is_causal=True)
        .transpose(1, 2)
    )
    assert torch.linalg.norm(ours - exact) <= 1.5 * torch.linalg.norm(theirs - exact)
