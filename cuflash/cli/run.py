"""Attention on .npy files: reads Q, K and V, writes the result in the same type.

    cuflash run q.npy k.npy v.npy --causal -o out.npy
    cuflash run q.npy k.npy v.npy --device cuda --dtype bfloat16 -o out.npy --lse lse.npy

NumPy writes bfloat16 arrays as raw 2-byte values ("V2"), so such a file does not say what it holds: --dtype bfloat16
does. The result has the same form: load it with np.load(...).view(ml_dtypes.bfloat16).
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import INSTALL_CUDA
from ..text import duration
from .screen import Screen


def configure(parser: argparse.ArgumentParser) -> None:
    for name in ("q", "k", "v"):
        parser.add_argument(name, type=Path, metavar=f"{name}.npy")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="out.npy")
    parser.add_argument(
        "--causal", nargs="?", const="bottom_right", default=False, choices=("bottom_right", "top_left"), type=mask,
        help="mask; with Nq != Nk bottom_right (the default) lets query i see keys j <= i + Nk - Nq, top_left j <= i",
    )  # fmt: skip
    parser.add_argument("--scale", type=float, help="default: 1/sqrt(head dim)")
    parser.add_argument("--layout", choices=("bshd", "bhsd"), default="bshd", help="axis order (default: bshd)")
    parser.add_argument("--lse", type=Path, metavar="lse.npy", help="also write the log-sum-exp of each row")
    parser.add_argument("--device", default="cpu", metavar="cpu|cuda|cuda:N", help="default: cpu; cuda needs CuPy")
    parser.add_argument("--dtype", choices=("bfloat16",), help="what raw 2-byte values in the files mean")


def mask(text: str) -> str:
    """The value of ``--causal``; argparse takes a file name that follows the option for one."""
    if text.endswith(".npy"):
        raise argparse.ArgumentTypeError(f"{text} is no mask: name the files before --causal")
    return text


def run(args: argparse.Namespace, screen: Screen) -> int:
    import cuflash

    for path in filter(None, (args.output, args.lse)):
        if not path.parent.is_dir():
            raise ValueError(f"{path} cannot be written: there is no directory {path.parent}")
        if path.exists() and not path.is_file():
            raise ValueError(f"{path} cannot be written: it is there and is no ordinary file")
    if args.lse and args.lse.resolve() == args.output.resolve():
        raise ValueError(f"--output and --lse both name {args.output}; the results need a file each")
    arrays = [load(path, args.dtype) for path in (args.q, args.k, args.v)]
    options = {"causal": args.causal, "scale": args.scale, "layout": args.layout}
    ordinal = parse_device(args.device)
    start = time.perf_counter()
    if ordinal is None:
        out, lse = cuflash.attention(*arrays, **options, return_lse=True)
    else:
        out, lse = on_gpu(arrays, ordinal, options)
    seconds = time.perf_counter() - start
    results = {args.output: out} | ({args.lse: lse} if args.lse else {})
    for path, array in results.items():
        save(path, array)
        screen.line(f"{path}: {array.dtype} {array.shape}")
    screen.line(
        f"{args.device}, {duration(seconds)}" + ("" if ordinal is None else " with the copies to the GPU and back")
    )
    return 0


def load(path: Path, dtype: str | None) -> np.ndarray[Any, Any]:
    """An array from a .npy file.

    Raises
    ------
    ValueError
        The file is no .npy file, or it holds raw values and nothing says what they are.
    """
    try:
        array = np.load(path, allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise ValueError(f"{path} is no .npy file that can be read: {error}") from error
    if not isinstance(array, np.ndarray):
        raise ValueError(f"{path} is an archive of arrays; name a .npy file with one array")
    raw = array.dtype.kind == "V" and array.dtype.itemsize == 2
    if dtype and (raw or array.dtype in (np.uint16, np.int16)):
        import ml_dtypes

        return array.view(ml_dtypes.bfloat16)
    if dtype:
        raise ValueError(f"{path} holds {array.dtype}; --dtype {dtype} is for files of raw 2-byte values")
    if raw:
        raise ValueError(f"{path} holds raw 2-byte values, as NumPy writes bfloat16: say so with --dtype bfloat16")
    return array


def parse_device(text: str) -> int | None:
    """The CUDA ordinal; None for the CPU.

    Raises
    ------
    ValueError
        The text names no device.
    """
    kind, colon, number = text.partition(":")
    if text == "cpu":
        return None
    if kind == "cuda" and (number.isascii() and number.isdigit() if colon else True):
        return int(number or 0)
    raise ValueError(f"--device is {text!r}; accepted are cpu, cuda and cuda:N")


def on_gpu(arrays: list[np.ndarray[Any, Any]], ordinal: int, options: dict[str, Any]) -> tuple[Any, Any]:
    """Copy to a GPU, run there, copy back.

    Raises
    ------
    ImportError
        CuPy is not installed.
    ValueError
        There is no such device.
    """
    import cuflash

    from .. import driver

    try:
        import cupy
    except ImportError as error:
        raise ImportError(f"--device cuda needs CuPy: {INSTALL_CUDA}") from error
    count = driver.device_count()
    if ordinal >= count:
        raise ValueError(f"--device cuda:{ordinal}: this machine has {count} CUDA devices")
    with cupy.cuda.Device(ordinal):
        out, lse = cuflash.attention(*(cupy.asarray(array) for array in arrays), **options, return_lse=True)
        return out.get(), lse.get()


def save(path: Path, array: np.ndarray[Any, Any]) -> None:
    """Write a .npy file in one step: a reader sees the old file or the whole new one. A link's target is written.

    Raises
    ------
    OSError
        The file cannot be written; nothing is left behind.
    """
    path = path.resolve()
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    try:
        with os.fdopen(descriptor, "wb") as file:
            np.save(file, array, allow_pickle=False)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, 0o666 & ~current_umask())
        os.replace(name, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(name)
        raise


def current_umask() -> int:
    """The permissions that new files do without; it can only be read by setting it."""
    mask = os.umask(0o077)
    os.umask(mask)
    return mask
