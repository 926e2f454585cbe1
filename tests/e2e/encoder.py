"""A sentence encoder in plain arrays: all-MiniLM-L6-v2, six BERT layers, on NumPy or on CuPy arrays.

NumPy's functions hand CuPy arrays on to CuPy, so one text serves both. Layer norms, GELU and pooling are computed in
float32 or wider; everything else in the dtype of the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

import cuflash

Array = Any
"""A NumPy or CuPy array."""

LAYERS = 6
HEADS = 12


@dataclass(frozen=True)
class Encoder:
    """Sentences in, unit vectors out; `weights` by their names in the model's file."""

    weights: Mapping[str, Array]
    attention: Callable[[Array, Array, Array], Array] = cuflash.attention

    def __call__(self, tokens: Array) -> Array:
        """Embed token ids (batch, seq) of sentences of one length; returns (batch, 384)."""
        x = self.embed(tokens)
        for i in range(LAYERS):
            x = self.layer(x, f"encoder.layer.{i}.")
        mean = wide(x).mean(axis=1)  # without padding every token counts
        return mean / np.linalg.norm(mean, axis=1, keepdims=True)

    def embed(self, tokens: Array) -> Array:
        words, positions, types = (
            self.weights[f"embeddings.{name}_embeddings.weight"] for name in ("word", "position", "token_type")
        )
        return self.layer_norm(words[tokens] + positions[: tokens.shape[1]] + types[0], "embeddings.")

    def layer(self, x: Array, name: str) -> Array:
        batch, seq, width = x.shape
        q, k, v = (
            self.linear(x, f"{name}attention.self.{role}").reshape(batch, seq, HEADS, width // HEADS)
            for role in ("query", "key", "value")
        )
        heads = self.attention(q, k, v).reshape(batch, seq, width)
        x = self.layer_norm(x + self.linear(heads, f"{name}attention.output.dense"), f"{name}attention.output.")
        hidden = gelu(self.linear(x, f"{name}intermediate.dense"))
        return self.layer_norm(x + self.linear(hidden, f"{name}output.dense"), f"{name}output.")

    def linear(self, x: Array, name: str) -> Array:
        return x @ self.weights[f"{name}.weight"].T + self.weights[f"{name}.bias"]

    def layer_norm(self, x: Array, name: str) -> Array:
        y = wide(x)
        y = y - y.mean(axis=-1, keepdims=True)
        y = y / np.sqrt((y * y).mean(axis=-1, keepdims=True) + 1e-12)
        return (y * self.weights[f"{name}LayerNorm.weight"] + self.weights[f"{name}LayerNorm.bias"]).astype(x.dtype)


def wide(x: Array) -> Array:
    return x.astype(np.promote_types(x.dtype, np.float32))


def gelu(x: Array) -> Array:
    y = wide(x)
    return (y * (1 + erf(y / 2**0.5)) / 2).astype(x.dtype)


def erf(x: Array) -> Array:
    """The error function within 1.5e-7: Abramowitz and Stegun, Handbook of Mathematical Functions, 7.1.26."""
    t = 1 / (1 + 0.3275911 * np.abs(x))
    series = t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429))))
    return np.sign(x) * (1 - series * np.exp(-x * x))
