"""The environment switches, read in this one place."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

DEFAULT_CACHE_BYTES = 1 << 30
_SUFFIXES = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


class Settings(NamedTuple):
    """What the environment asks for.

    Parameters
    ----------
    cache_dir : Path or None
        ``CUFLASH_CACHE_DIR``, else ``$XDG_CACHE_HOME/cuflash``, else ``~/.cache/cuflash``; None where there is no home.
    cache_bytes : int
        ``CUFLASH_CACHE_SIZE``: the bound of the disk cache in bytes, with an optional suffix K, M or G (powers of
        1024); 1G by default. 0 means no disk cache.
    prebuilt_dir : Path or None
        ``CUFLASH_PREBUILT_DIR``: a directory of kernels that were compiled elsewhere; it is only read.
    jit : bool
        False when ``CUFLASH_DISABLE_JIT=1``: a kernel that is in no cache is an error then.
    lineinfo : bool
        ``CUFLASH_LINEINFO=1``: compile with source positions for profilers.
    """

    cache_dir: Path | None
    cache_bytes: int = DEFAULT_CACHE_BYTES
    prebuilt_dir: Path | None = None
    jit: bool = True
    lineinfo: bool = False


def read_settings() -> Settings:
    """Read the environment now.

    Raises
    ------
    ValueError
        A switch has a value that is not accepted; the message names both.
    """
    return Settings(
        cache_dir=_cache_dir(),
        cache_bytes=_byte_size("CUFLASH_CACHE_SIZE", DEFAULT_CACHE_BYTES),
        prebuilt_dir=_directory("CUFLASH_PREBUILT_DIR"),
        jit=not _flag("CUFLASH_DISABLE_JIT"),
        lineinfo=_flag("CUFLASH_LINEINFO"),
    )


def _cache_dir() -> Path | None:
    if named := _directory("CUFLASH_CACHE_DIR"):
        return named
    try:
        xdg = os.environ.get("XDG_CACHE_HOME", "")
        # The XDG specification: a relative path is invalid and to be ignored.
        base = Path(xdg) if os.path.isabs(xdg) else Path.home() / ".cache"
    except RuntimeError:  # no home directory
        return None
    return base / "cuflash"


def _directory(name: str) -> Path | None:
    value = os.environ.get(name)
    try:
        return Path(value).expanduser().absolute() if value else None
    except RuntimeError as error:
        raise ValueError(f"{name} is {value!r}, and there is no such home directory; name the whole path") from error


def _flag(name: str) -> bool:
    value = os.environ.get(name, "")
    if value not in ("", "0", "1"):
        raise ValueError(f"{name} is {value!r}; accepted are 0 and 1")
    return value == "1"


def _byte_size(name: str, default: int) -> int:
    value = os.environ.get(name, "").strip()
    if not value:
        return default
    unit = _SUFFIXES.get(value[-1].upper(), 1)
    digits = value[:-1] if unit > 1 else value
    if not (digits.isascii() and digits.isdigit()):
        raise ValueError(f"{name} is {value!r}; accepted is a number of bytes, or one with a suffix K, M or G: 512M")
    return int(digits) * unit
