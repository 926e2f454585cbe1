"""What `cuflash.attention_backward` takes and refuses, and with which words. Its numbers: test_backward_cpu.py."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cuflash
from tests.oracle import DTYPES, poisoned, randn
from tests.unit.fake_gpu import FakeGpu

SHAPE_Q, SHAPE_K, SHAPE_V = (2, 10, 4, 16), (2, 12, 2, 16), (2, 12, 2, 8)


def arguments(dtype: str = "float32", causal: Any = False) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    q, k, v = (randn(rng, shape, dtype) for shape in (SHAPE_Q, SHAPE_K, SHAPE_V))
    out, lse = cuflash.attention(q, k, v, causal=causal, return_lse=True)
    return {"dout": randn(rng, out.shape, dtype), "q": q, "k": k, "v": v, "out": out, "lse": lse}


def empty_grads(dtype: str = "float32") -> list[np.ndarray]:
    return [poisoned(shape, DTYPES[dtype]) for shape in (SHAPE_Q, SHAPE_K, SHAPE_V)]


@pytest.mark.parametrize(
    ("name", "change", "error", "words"),
    [
        (
            "dout",
            lambda x: x[:, :9],
            ValueError,
            r"dout has shape \(2, 9, 4, 8\); this call's output has \(2, 10, 4, 8",
        ),
        ("out", lambda x: x[..., :7], ValueError, r"out has shape \(2, 10, 4, 7\)"),
        ("out", lambda x: x.swapaxes(1, 2), ValueError, r"out has shape \(2, 4, 10, 8\)"),
        ("lse", lambda x: x[..., :9], ValueError, r"lse has shape \(2, 4, 9\); the LSE, .* has \(2, 4, 10\)"),
        ("lse", lambda x: x.swapaxes(1, 2), ValueError, r"lse has shape \(2, 10, 4\)"),
        ("lse", lambda x: x[..., None], ValueError, r"lse has shape \(2, 4, 10, 1\)"),
        ("lse", lambda x: x.astype(np.float64), TypeError, "lse has dtype float64; for q of dtype float32 it must be"),
        ("lse", lambda x: x.astype(np.float16), TypeError, "lse has dtype float16; .* it must be float32"),
        ("lse", lambda x: x.astype(np.int64), TypeError, "lse has dtype int64"),
        (
            "lse",
            lambda x: None,
            TypeError,
            "lse is None; accepted are .*; cuflash.attention gives it with return_lse=True",
        ),
        ("dlse", lambda x: np.zeros((2, 4, 11), np.float32), ValueError, r"dlse has shape \(2, 4, 11\)"),
        ("dlse", lambda x: np.zeros((2, 4, 10)), TypeError, "dlse has dtype float64"),
        ("dlse", lambda x: 0.0, TypeError, "dlse is a float; accepted are"),
        (
            "dout",
            lambda x: x.astype(np.float16),
            TypeError,
            "dout has dtype float16; for q of dtype float32 it must be",
        ),
        ("out", lambda x: x.tolist(), TypeError, "out is a list; accepted are"),
        ("out", lambda x: (x, x), TypeError, "out is a tuple; accepted are .* gives two arrays, out and lse"),
        ("k", lambda x: x[:, :11], ValueError, "k and v differ in batch, seq or heads"),
        ("q", lambda x: x.astype(np.int8), TypeError, "q has dtype int8"),
        ("v", lambda x: x.astype(np.float64), TypeError, "q has dtype float32 and v float64"),
    ],
)
def test_arguments(name: str, change: Any, error: type[Exception], words: str) -> None:
    given = arguments()
    given[name] = change(given.get(name))
    with pytest.raises(error, match=words):
        cuflash.attention_backward(**given)


@pytest.mark.parametrize(
    ("option", "error", "words"),
    [
        ({"causal": "left"}, ValueError, "causal is 'left'"),
        ({"scale": float("nan")}, ValueError, "scale is nan"),
        ({"scale": "1"}, TypeError, "scale is a str"),
        ({"layout": "sbhd"}, ValueError, "layout is 'sbhd'"),
        ({"layout": "bhsd"}, ValueError, "10 heads"),
        ({"deterministic": "yes"}, TypeError, "deterministic is 'yes'; accepted are True and False"),
        ({"grads": np.zeros((3, 4))}, TypeError, r"grads is a ndarray; .* triple of arrays \(dq, dk, dv\)"),
        ({"grads": (1, 2)}, ValueError, "grads has 2 elements; accepted are three"),
        ({"grads": (None, None, None)}, TypeError, r"grads\[0\] is None; accepted are"),
        ({"window": 3}, TypeError, "window"),
    ],
)
def test_options(option: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        cuflash.attention_backward(**arguments(), **option)


def read_only(x: np.ndarray) -> np.ndarray:
    x.flags.writeable = False
    return x


@pytest.mark.parametrize(
    ("which", "change", "error", "words"),
    [
        (0, lambda x: x[:, :9], ValueError, r"grads\[0\] has shape \(2, 9, 4, 16\); the gradient of q has"),
        (1, lambda x: x.swapaxes(1, 2), ValueError, r"grads\[1\] has shape .* the gradient of k has \(2, 12, 2, 16\)"),
        (2, lambda x: x[..., :4], ValueError, r"grads\[2\] has shape .* the gradient of v has \(2, 12, 2, 8\)"),
        (1, lambda x: x.astype(np.float64), TypeError, r"grads\[1\] has dtype float64; .* it must be float32"),
        (2, read_only, ValueError, r"grads\[2\] is read-only"),
        (
            0,
            lambda x: np.lib.stride_tricks.as_strided(x, strides=(0, 0, 64, 4)),
            ValueError,
            r"grads\[0\] .* share mem",
        ),
        (1, lambda x: [1], TypeError, r"grads\[1\] is a list; accepted are"),
    ],
)
def test_arrays_to_write(which: int, change: Any, error: type[Exception], words: str) -> None:
    grads = empty_grads()
    grads[which] = change(grads[which])
    with pytest.raises(error, match=words):
        cuflash.attention_backward(**arguments(), grads=tuple(grads))
    assert all(np.isnan(x).all() for i, x in enumerate(grads) if i != which)


@pytest.mark.parametrize(
    ("which", "shared"), [(0, "q"), (1, "k"), (2, "v"), (2, "lse"), (2, "dlse"), (2, "out"), (2, "dout")]
)
def test_gradients_share_no_memory_with_inputs(which: int, shared: str) -> None:
    given, grads = arguments() | {"dlse": np.zeros((2, 4, 10), np.float32)}, empty_grads()
    memory = np.zeros(4000, np.float32)
    lent = memory[: given[shared].size].reshape(given[shared].shape)
    lent[...] = given[shared]
    given[shared] = lent
    at = given[shared].size - 1  # the last element of one is the first of the other
    grads[which] = memory[at : at + grads[which].size].reshape(grads[which].shape)
    with pytest.raises(ValueError, match=rf"grads\[{which}\] shares memory with {shared}; pass an array of its own"):
        cuflash.attention_backward(**given, grads=grads)
    assert np.array_equal(lent, given[shared])


def test_gradients_share_no_memory_with_each_other() -> None:
    given = arguments()
    one = np.zeros((2, 12, 2, 16), np.float32)
    with pytest.raises(ValueError, match=r"grads\[2\] shares memory with grads\[1\]"):
        cuflash.attention_backward(**given, grads=(empty_grads()[0], one, one[..., ::2]))
    apart = np.zeros((2, 12, 2, 24), np.float32)  # parts of one array, as of a packed gradient, are apart
    grads = cuflash.attention_backward(**given, grads=(empty_grads()[0], apart[..., :16], apart[..., 16:]))
    assert all(map(np.array_equal, grads, cuflash.attention_backward(**given)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_grads_are_filled_and_returned(dtype: str) -> None:
    """Every element of them; new ones otherwise, contiguous and of the inputs' dtype."""
    given, grads = arguments(dtype), empty_grads(dtype)
    plain = cuflash.attention_backward(**given)
    assert type(plain) is tuple and all(x.flags.c_contiguous and x.dtype == DTYPES[dtype] for x in plain)
    result = cuflash.attention_backward(**given, grads=grads)
    assert type(result) is tuple and all(x is y for x, y in zip(result, grads, strict=True))
    assert all(map(np.array_equal, result, plain))


def test_no_dlse_is_a_dlse_of_zeros() -> None:
    given = arguments()
    zeros = np.zeros_like(given["lse"])
    both = cuflash.attention_backward(**given), cuflash.attention_backward(**given, dlse=zeros)
    assert all(map(np.array_equal, *both))


def test_kinds_and_devices_must_not_mix(gpu: FakeGpu) -> None:
    given = {name: gpu.array(x, device=1) for name, x in arguments("float16").items()}
    with pytest.raises(TypeError, match="q is a NumPy array and dout a CuPy array"):
        cuflash.attention_backward(**(arguments("float16") | {"dout": given["dout"]}))
    with pytest.raises(ValueError, match="q is on cuda:1 and lse on cuda:0"):
        cuflash.attention_backward(**given | {"lse": gpu.array(arguments("float16")["lse"])})
    assert not gpu.launches


class Producer:
    """Speaks DLPack; NumPy arrays come back."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array

    def __dlpack__(self, **options: Any) -> Any:
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0


class Namespaced(Producer):
    """One that says how to make its arrays."""

    def __array_namespace__(self) -> Any:
        return Namespaced

    @staticmethod
    def from_dlpack(x: Any) -> Namespaced:
        return Namespaced(np.from_dlpack(x))


def test_dlpack_producers() -> None:
    given = arguments()
    expected = cuflash.attention_backward(**given, causal=True)
    foreign = {name: Namespaced(x) for name, x in given.items()}
    grads = cuflash.attention_backward(**foreign, causal=True)
    assert all(type(x) is Namespaced and np.array_equal(x.array, y) for x, y in zip(grads, expected, strict=True))
    targets = tuple(map(Namespaced, empty_grads()))
    result = cuflash.attention_backward(**foreign, causal=True, grads=targets)
    assert all(x is y for x, y in zip(result, targets, strict=True))
    assert all(np.array_equal(x.array, y) for x, y in zip(targets, expected, strict=True))
    plain = cuflash.attention_backward(**{name: Producer(x) for name, x in given.items()}, causal=True)
    assert all(type(x) is np.ndarray and np.array_equal(x, y) for x, y in zip(plain, expected, strict=True))
    with pytest.raises(TypeError, match=r"q is a .* array and lse a NumPy array; all arrays of a call must be of one"):
        cuflash.attention_backward(**(foreign | {"lse": given["lse"]}))
    with pytest.raises(TypeError, match=r"q is a NumPy array and lse a .* array"):
        cuflash.attention_backward(**(given | {"lse": foreign["lse"]}))
