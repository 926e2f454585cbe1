"""NumPy arrays: host memory, for the NumPy backend."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import numpy as np

from . import CPU, Operand, dtype_name

LABEL = "NumPy array"
PLAIN_TYPES = (np.ndarray, np.memmap)


def geometry(x: Any, /) -> tuple[tuple[Any, ...], int]:
    raise TypeError("the CPU has no launch plans")


def geometries(q: Any, k: Any, v: Any, /) -> tuple[tuple[tuple[Any, ...], int], ...]:
    return geometry(q), geometry(k), geometry(v)


def operand(name: str, x: Any, /) -> Operand:
    if type(x) not in PLAIN_TYPES:
        advice = f"{name}.filled(...)" if isinstance(x, np.ma.MaskedArray) else f"numpy.asarray({name})"
        raise TypeError(
            f"{name} is a {type(x).__qualname__}, a subclass of numpy.ndarray whose rules cuflash does not know; "
            f"pass a plain array, such as {advice}"
        )
    if not x.dtype.isnative:
        raise TypeError(
            f"{name} has dtype {x.dtype.str}, which is not in the byte order of this machine; "
            f"convert it: {name}.astype({name}.dtype.newbyteorder('='))"
        )
    return Operand(
        name=name,
        array=x,
        kind=sys.modules[__name__],
        address=x.__array_interface__["data"][0],
        shape=x.shape,
        strides=x.strides,
        dtype=dtype_name(name, x.dtype),
        device=CPU,
        writable=x.flags.writeable,
    )


def empty(like: Any, shape: tuple[int, ...], dtype: str | None = None, /) -> tuple[Any, int]:
    return np.empty(shape, like.dtype if dtype is None else dtype), 0


def maker(shape: tuple[int, ...], dtype: str, /) -> Callable[[], Any]:
    return partial(np.empty, shape, dtype)


def address(x: Any, /) -> int:
    return 0


def fill_dead(out: Any, lse: Any, /) -> None:
    raise AssertionError("the CPU backend fills such rows itself")


def copy(to: Any, source: Any, /) -> None:
    raise AssertionError("the CPU backend writes where it is asked to")


def written(x: Any, /) -> None:
    """NumPy keeps no books on writes."""


def numpy(x: Any, /) -> Any:
    return x


def untraced(function: Callable[..., Any], /) -> Callable[..., Any]:
    return function


def follower(q: Any, k: Any, v: Any, /) -> Callable[..., Any] | None:
    return None


def refusal(arrays: Mapping[str, Any], what: str, /) -> str | None:
    return None


def plain(x: Any, /) -> Any:
    return x


def current_device() -> int:
    return CPU


def on_device(ordinal: int, /) -> AbstractContextManager[Any]:
    raise AssertionError("NumPy arrays are never on a GPU")


def stream(ordinal: int, /) -> int:
    raise AssertionError("NumPy arrays are never on a GPU")
