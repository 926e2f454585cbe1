"""A character-level GPT, twice on the same weights: for torch's autograd, and in plain arrays with a backward pass.

Pre-norm layers with RMS norms, grouped-query causal attention and squared ReLU (So et al., Primer, 2021); the output
shares the embedding's weights. The text is the language reference that ships with Python.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

import cuflash

Array = Any
"""A NumPy or CuPy array."""
Tensor = Any

EPSILON = 1e-6


@dataclass(frozen=True)
class Shape:
    """The sizes of a model: 2.2 million parameters by default."""

    layers: int = 3
    width: int = 256
    heads: int = 4
    kv_heads: int = 2
    length: int = 256

    @property
    def head_dim(self) -> int:
        return self.width // self.heads

    @property
    def packed_heads(self) -> tuple[int, int, int]:
        """Of a packed projection, how many heads are queries, keys and values."""
        return self.heads, self.kv_heads, self.kv_heads

    def initial(self, seed: int) -> dict[str, np.ndarray[Any, Any]]:
        """Weights in float64, by name."""
        rng = np.random.default_rng(seed)

        def normal(rows: int, columns: int, gain: float = 1.0) -> np.ndarray[Any, Any]:
            return gain * rows**-0.5 * rng.standard_normal((rows, columns))

        weights = {"tokens": 0.1 * rng.standard_normal((len(alphabet()), self.width))}
        weights["positions"] = 0.1 * rng.standard_normal((self.length, self.width))
        for i in range(self.layers):
            weights[f"{i}.attention_norm"] = np.ones(self.width)
            weights[f"{i}.qkv"] = normal(self.width, sum(self.packed_heads) * self.head_dim)
            weights[f"{i}.mix"] = normal(self.width, self.width, (2 * self.layers) ** -0.5)
            weights[f"{i}.mlp_norm"] = np.ones(self.width)
            weights[f"{i}.up"] = normal(self.width, 4 * self.width)
            weights[f"{i}.down"] = normal(4 * self.width, self.width, (2 * self.layers) ** -0.5)
        weights["norm"] = np.ones(self.width)
        return weights


# --- the text --------------------------------------------------------------------------------------------------


@lru_cache(maxsize=1)
def text() -> str:
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics))


@lru_cache(maxsize=1)
def alphabet() -> str:
    return "".join(sorted(set(text())))


@lru_cache(maxsize=1)
def encoded() -> np.ndarray[Any, Any]:
    places = {character: i for i, character in enumerate(alphabet())}
    return np.array([places[character] for character in text()])


def batches(count: int, batch: int, length: int, seed: int) -> np.ndarray[Any, Any]:
    """Random pieces of the text, (count, batch, length + 1)."""
    starts = np.random.default_rng(seed).integers(len(encoded()) - length, size=(count, batch, 1))
    return encoded()[starts + np.arange(length + 1)]


def pair_entropy() -> float:
    """The loss, in nats, of the best predictor that knows the character before, on all of the text."""
    pairs = np.zeros((len(alphabet()),) * 2)
    np.add.at(pairs, (encoded()[:-1], encoded()[1:]), 1)
    conditional = pairs / np.maximum(pairs.sum(axis=1, keepdims=True), 1)
    return float(-(pairs * np.log(np.maximum(conditional, 1e-300))).sum() / pairs.sum())


# --- torch -----------------------------------------------------------------------------------------------------


def torch_loss(weights: Mapping[str, Tensor], shape: Shape, tokens: Tensor, attention: Callable[..., Tensor]) -> Tensor:
    """The mean loss over a batch (batch, length + 1); `attention` takes q, k, v in bshd and is causal."""
    import torch.nn.functional as F

    def norm(x: Tensor, name: str) -> Tensor:
        return x * (x.square().mean(dim=-1, keepdim=True) + EPSILON).rsqrt() * weights[name]

    x = weights["tokens"][tokens[:, :-1]] + weights["positions"][: tokens.shape[1] - 1]
    for i in range(shape.layers):
        packed = norm(x, f"{i}.attention_norm") @ weights[f"{i}.qkv"]
        q, k, v = packed.unflatten(-1, (-1, shape.head_dim)).split(shape.packed_heads, dim=2)
        x = x + attention(q, k, v).flatten(2) @ weights[f"{i}.mix"]
        hidden = (norm(x, f"{i}.mlp_norm") @ weights[f"{i}.up"]).relu().square()
        x = x + hidden @ weights[f"{i}.down"]
    logits = norm(x, "norm") @ weights["tokens"].mT
    return F.cross_entropy(logits.flatten(0, 1).to(x.dtype), tokens[:, 1:].flatten())


# --- plain arrays ----------------------------------------------------------------------------------------------


class Saved(NamedTuple):
    """What the backward pass of a layer needs: norms as (normalized, inverse root mean square)."""

    attention_norm: tuple[Array, Array]
    attention: tuple[Array, ...]
    mlp_norm: tuple[Array, Array]
    hidden: Array


class PlainGpt:
    """Loss and gradients in NumPy or CuPy; attention runs in a dtype of its own.

    Gradients are those of the summed loss until the end, so that none is too small for float16.
    """

    def __init__(self, weights: Mapping[str, Array], shape: Shape, xp: Any = np, attention_dtype: Any = None) -> None:
        self.weights, self.shape, self.xp = weights, shape, xp
        self.dtype = weights["norm"].dtype
        self.attention_dtype = attention_dtype or self.dtype

    def loss_and_gradients(self, tokens: Array) -> tuple[Array, dict[str, Array]]:
        """The mean loss over a batch (batch, length + 1), and its gradient for each weight."""
        given, wanted = tokens[:, :-1], tokens[:, 1:]
        x = self.weights["tokens"][given] + self.weights["positions"][: given.shape[1]]
        saved = []
        for i in range(self.shape.layers):
            x, kept = self.layer(x, i)
            saved.append(kept)
        last = normalize(x)
        y = last[0] * self.weights["norm"]
        logits = y @ self.weights["tokens"].T
        shifted = logits - logits.max(axis=-1, keepdims=True)
        log_p = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
        identity = self.xp.eye(log_p.shape[-1], dtype=self.dtype)
        loss = -(log_p * identity[wanted]).sum() / wanted.size

        grads: dict[str, Array] = {}
        dlogits = np.exp(log_p) - identity[wanted]
        dy, grads["tokens"] = dlogits @ self.weights["tokens"], contract(dlogits, y)
        dx = self.norm_backward(dy, last, "norm", grads)
        for i in reversed(range(self.shape.layers)):
            dx = self.layer_backward(dx, i, saved[i], grads)
        grads["tokens"] = grads["tokens"] + contract(identity[given], dx)
        grads["positions"] = self.xp.zeros_like(self.weights["positions"])
        grads["positions"][: given.shape[1]] = dx.sum(axis=0)
        return loss, {name: grad / wanted.size for name, grad in grads.items()}

    def layer(self, x: Array, i: int) -> tuple[Array, Saved]:
        weights, shape = self.weights, self.shape
        attention_norm = normalize(x)
        packed = (attention_norm[0] * weights[f"{i}.attention_norm"]) @ weights[f"{i}.qkv"]
        q, k, v = self.split(packed.astype(self.attention_dtype))
        out, lse = cuflash.attention(q, k, v, causal=True, return_lse=True)
        x = x + out.astype(self.dtype).reshape(x.shape) @ weights[f"{i}.mix"]
        mlp_norm = normalize(x)
        hidden = np.maximum((mlp_norm[0] * weights[f"{i}.mlp_norm"]) @ weights[f"{i}.up"], 0)
        assert out.shape[2] == shape.heads
        return x + (hidden * hidden) @ weights[f"{i}.down"], Saved(
            attention_norm, (q, k, v, out, lse), mlp_norm, hidden
        )

    def layer_backward(self, dx: Array, i: int, saved: Saved, grads: dict[str, Array]) -> Array:
        weights, hidden = self.weights, saved.hidden
        grads[f"{i}.down"] = contract(hidden * hidden, dx)
        dhidden = 2 * hidden * (dx @ weights[f"{i}.down"].T)
        grads[f"{i}.up"] = contract(saved.mlp_norm[0] * weights[f"{i}.mlp_norm"], dhidden)
        dx = dx + self.norm_backward(dhidden @ weights[f"{i}.up"].T, saved.mlp_norm, f"{i}.mlp_norm", grads)

        out = saved.attention[3]
        grads[f"{i}.mix"] = contract(out.astype(self.dtype).reshape(dx.shape), dx)
        dout = (dx @ weights[f"{i}.mix"].T).astype(self.attention_dtype).reshape(out.shape)
        dpacked = self.xp.empty((*dx.shape[:2], weights[f"{i}.qkv"].shape[1]), self.attention_dtype)
        cuflash.attention_backward(dout, *saved.attention, causal=True, grads=self.split(dpacked))
        dpacked = dpacked.astype(self.dtype)
        grads[f"{i}.qkv"] = contract(saved.attention_norm[0] * weights[f"{i}.attention_norm"], dpacked)
        dy = dpacked @ weights[f"{i}.qkv"].T
        return dx + self.norm_backward(dy, saved.attention_norm, f"{i}.attention_norm", grads)

    def split(self, packed: Array) -> tuple[Array, Array, Array]:
        """Views of the queries, keys and values in a packed projection."""
        heads = packed.reshape(*packed.shape[:2], -1, self.shape.head_dim)
        first, second = self.shape.heads, self.shape.heads + self.shape.kv_heads
        return heads[:, :, :first], heads[:, :, first:second], heads[:, :, second:]

    def norm_backward(self, dy: Array, saved: tuple[Array, Array], name: str, grads: dict[str, Array]) -> Array:
        normalized, inverse = saved
        grads[name] = (dy * normalized).sum(axis=(0, 1))
        dy = dy * self.weights[name]
        return inverse * (dy - normalized * (dy * normalized).mean(axis=-1, keepdims=True))


def normalize(x: Array) -> tuple[Array, Array]:
    inverse = 1 / np.sqrt((x * x).mean(axis=-1, keepdims=True) + EPSILON)
    return x * inverse, inverse


def contract(x: Array, y: Array) -> Array:
    """The gradient of w in y = x w, summed over batch and sequence."""
    return x.reshape(-1, x.shape[-1]).T @ y.reshape(-1, y.shape[-1])


class Adam:
    """Kingma and Ba, Adam: A Method for Stochastic Optimization, 2015; changes the weights in place."""

    def __init__(self, weights: Mapping[str, Array], rate: float = 2e-3) -> None:
        self.weights, self.rate, self.steps = weights, rate, 0
        self.means = {name: 0 * x for name, x in weights.items()}
        self.squares = {name: 0 * x for name, x in weights.items()}

    def step(self, grads: Mapping[str, Array]) -> None:
        self.steps += 1
        for name, grad in grads.items():
            self.means[name] = mean = 0.9 * self.means[name] + 0.1 * grad
            self.squares[name] = square = 0.95 * self.squares[name] + 0.05 * grad * grad
            unbiased = np.sqrt(square / (1 - 0.95**self.steps))
            self.weights[name][...] -= self.rate / (1 - 0.9**self.steps) * mean / (unbiased + 1e-8)
