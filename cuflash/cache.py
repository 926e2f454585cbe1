"""The disk cache of compiled kernels.

One directory per kernel, ``<root>/v1/<symbol>.<key>.<NVRTC build>/`` with the rendered source, the machine code and
``meta.json``. An entry appears by one rename and is never written again, so that any number of processes share a
cache without locks: a reader sees a whole entry or none. What a crash, a disk or another program damages fails its
digest, is taken away and compiled again.

A cache is a convenience: an unwritable, full or untrustworthy one costs one warning per process, never a failure.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import sys
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import fields
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from . import driver, files, kernels, render
from .compiled import Compiled
from .config import KernelConfig
from .errors import MissingKernelError
from .problem import AttentionProblem
from .settings import Settings

LAYOUT = "v1"
"""Names the layout of entries; a change of it gets a new name, and the old directory can be deleted."""
STALE_SECONDS = 3600
"""Unfinished work older than this belongs to a process that died."""


# --- keys ------------------------------------------------------------------------------------------------------


class CacheKey(NamedTuple):
    """What determines a cubin, except for the NVRTC build, which the cache adds.

    Attributes
    ----------
    symbol : str
    base : str
        Hash of the templates, the parameter block, the problem, the config and the options.
    """

    symbol: str
    base: str


def cache_key(
    problem: AttentionProblem, config: KernelConfig, *, lineinfo: bool = False, ptx: bool = False
) -> CacheKey:
    """The key of a kernel; neither renders nor compiles anything.

    Versions of cuflash, Python or the driver and the model of the GPU do not enter: they change no machine code.
    """
    family = kernels.family_named(config.family)
    identity = {f.name: getattr(config, f.name) for f in fields(config) if f.compare}
    parts = (
        LAYOUT,
        render.template_digest(),
        family.name,
        family.template,
        repr(family.params.fields),
        repr(problem),
        repr(identity),
        repr(render.compile_options(problem.arch, lineinfo=lineinfo)),
        "ptx" if ptx else "cubin",
    )
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode()
        digest.update(len(data).to_bytes(8, "little") + data)
    return CacheKey(kernels.symbol(problem, config), digest.hexdigest()[:32])


# --- entries ---------------------------------------------------------------------------------------------------


def _sealed(content: Mapping[str, Any], cubin: bytes) -> bytes:
    """``meta.json``: the content under a digest of itself and of the cubin."""
    return json.dumps({"sha256": _digest(content, cubin), **content}, indent=1).encode()


def _digest(content: Mapping[str, Any], cubin: bytes) -> str:
    return hashlib.sha256(cubin + json.dumps(content, sort_keys=True).encode()).hexdigest()


def _read_entry(folder: Path, key: CacheKey) -> Compiled:
    """Raises one of `_UNSOUND` on anything but a sound entry of this key."""
    content = json.loads((folder / "meta.json").read_bytes())
    cubin = (folder / "kernel.cubin").read_bytes()
    seal = content.pop("sha256")
    if seal != _digest(content, cubin) or content["base"] != key.base or content["compiled"]["symbol"] != key.symbol:
        raise ValueError("damaged")
    return Compiled(cubin=cubin, **content["compiled"])


_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
_UNSOUND = (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError)


def load_prebuilt(directory: Path, key: CacheKey) -> Compiled | None:
    """Look for a kernel in a directory that was filled elsewhere, whatever NVRTC built it; nothing is written.

    Where several builds of it are there, the newest NVRTC's is taken. The caller names the directory, and so vouches
    for it: a cubin is code.
    """
    prefix = f"{key.symbol}.{key.base}."
    try:
        names = [name for name in os.listdir(directory / LAYOUT) if name.startswith(prefix)]
    except OSError:
        names = []
    for name in sorted(names, key=lambda name: _build_order(name.removeprefix(prefix)), reverse=True):
        with suppress(*_UNSOUND):
            return _read_entry(directory / LAYOUT / name, key)
    return None


def _build_order(build: str) -> tuple[int, ...]:
    return tuple(int(part) for part in build.split(".") if part.isdigit())


# --- the cache -------------------------------------------------------------------------------------------------


class CacheInfo(NamedTuple):
    """What ``cuflash cache info`` shows; sizes in bytes."""

    root: Path
    entries: int
    size: int
    max_bytes: int


_warned: set[str] = set()


def _warn_once(root: Path, problem: str) -> None:
    if str(root) not in _warned:
        _warned.add(str(root))
        warnings.warn(
            f"cuflash's kernel cache {root} {problem}. Kernels are compiled again in every process until that is "
            "mended, or CUFLASH_CACHE_DIR names another directory (CUFLASH_CACHE_SIZE=0 switches the cache off).",
            RuntimeWarning,
            stacklevel=3,
        )


def open_cache(settings: Settings) -> KernelCache | None:
    """The cache that the settings ask for, or None; touches no file."""
    if settings.cache_dir is None or settings.cache_bytes == 0:
        return None
    return KernelCache(settings.cache_dir, settings.cache_bytes)


class KernelCache:
    """A directory of compiled kernels, bounded in size; the least recently used ones go.

    Parameters
    ----------
    root : Path
        Created at the first publication, for its owner only.
    max_bytes : int
        Bound of the sum of all file sizes, kept at every publication.
    """

    def __init__(self, root: Path, max_bytes: int) -> None:
        self.root = root
        self.max_bytes = max_bytes

    @property
    def _folder(self) -> Path:
        return self.root / LAYOUT

    def path(self, key: CacheKey) -> Path:
        """Where the entry of a key is, or would be."""
        return self._entry(key, self.nvrtc_build)

    def _entry(self, key: CacheKey, build: str) -> Path:
        return self._folder / f"{key.symbol}.{key.base}.{build}"

    # - reading

    def load(self, key: CacheKey) -> Compiled | None:
        """A kernel that this machine's NVRTC compiled before, or None; a damaged entry is removed."""
        if not self._is_trusted():
            return None
        try:
            folder = self.path(key)
        except MissingKernelError:  # no NVRTC
            return None
        try:
            compiled = _read_entry(folder, key)
        except _UNSOUND as error:
            # A process that is out of descriptors or memory cannot read a sound entry either: that one stays.
            if getattr(error, "errno", None) not in _EXHAUSTED and os.path.lexists(folder):
                files.remove(folder)
            return None
        with suppress(OSError):
            os.utime(folder / "meta.json")
        return compiled

    def discard(self, key: CacheKey) -> None:
        """Remove the entry of a key: one that the driver refuses, for example."""
        files.remove(self.path(key))

    def _is_trusted(self) -> bool:
        """Whether the root is there and nobody else can have put code into it."""
        try:
            status = os.stat(self.root)
        except OSError:
            return False
        if not hasattr(os, "geteuid"):
            return True
        if status.st_uid != os.geteuid():
            _warn_once(self.root, "belongs to another user and is not used")
            return False
        if status.st_mode & 0o022:
            _warn_once(self.root, "can be written by other users and is not used: chmod go-w it")
            return False
        return True

    # - writing

    def publish(
        self, key: CacheKey, source: render.Source, compiled: Compiled, about: Mapping[str, Any] | None = None
    ) -> bool:
        """Add a kernel; returns whether an entry of this key is there now.

        Parameters
        ----------
        key : CacheKey
        source : Source
            Kept beside the machine code, for people and profilers.
        compiled : Compiled
        about : Mapping, optional
            More for ``meta.json`` (JSON types only).
        """
        record = compiled._asdict()
        cubin = record.pop("cubin")
        content = {"base": key.base, "compiled": record, "options": source.options, "about": dict(about or {})}
        content = json.loads(json.dumps(content))  # as it will be read: tuples become lists
        entry = {"kernel.cu": source.text.encode(), "kernel.cubin": cubin, "meta.json": _sealed(content, cubin)}
        try:
            if not self._prepare():
                return False
            if compiled.nvrtc != self.nvrtc_build:  # the library was exchanged since
                self._forget_build()
            files.write_folder(self._entry(key, compiled.nvrtc), entry)
            self._shrink()
        except OSError as error:
            _warn_once(self.root, f"cannot be written ({error})")
            return False
        return True

    def _prepare(self) -> bool:
        if not self.root.exists():
            self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not self._is_trusted():
            return False
        self._folder.mkdir(mode=0o700, exist_ok=True)
        return True

    def _shrink(self) -> None:
        """Remove what dead processes left, then the least recently used entries until the bound holds."""
        now = time.time()
        for path in self._children(unfinished=True):
            with suppress(OSError):
                if now - path.lstat().st_mtime > STALE_SECONDS:
                    files.delete(path)
        entries = sorted((_last_use(path), path, files.folder_size(path)) for path in self._children())
        excess = sum(size for _, _, size in entries) - self.max_bytes
        for _, path, size in entries:
            if excess <= 0:
                break
            files.remove(path)
            excess -= size

    def _children(self, *, unfinished: bool = False) -> Iterator[Path]:
        try:
            names = os.listdir(self._folder)
        except OSError:
            return
        for name in names:
            if name.startswith(files.UNFINISHED) == unfinished and (unfinished or not name.startswith("nvrtc-")):
                yield self._folder / name

    # - people

    def info(self) -> CacheInfo:
        """How much is in the cache."""
        sizes = [files.folder_size(path) for path in self._children()]
        return CacheInfo(self.root, len(sizes), sum(sizes), self.max_bytes)

    def clear(self) -> int:
        """Remove every entry; returns how many there were."""
        if not self._is_trusted():
            return 0
        entries = list(self._children())
        for path in entries:
            files.remove(path)
        for path in self._children(unfinished=True):
            files.delete(path)
        self._forget_build()
        return len(entries)

    # - the NVRTC build

    @cached_property
    def nvrtc_build(self) -> str:
        """The full NVRTC build, remembered between processes: asking NVRTC itself means to load it (100 ms).

        What is remembered holds for one Python environment, one version of the bindings (they choose the library)
        and one file of one size and date. Should another library be loaded at the next compile all the same, then
        `publish` notices.

        Raises
        ------
        MissingKernelError
            There is no NVRTC.
        """
        try:
            remembered = json.loads(self._build_record().read_bytes())
            if files.stamp(remembered["path"]) == remembered["stamp"]:
                return str(remembered["build"])
        except (*_UNSOUND, ImportError):
            pass
        from . import compiler

        build, path = compiler.nvrtc_build(), compiler.nvrtc_path()
        if path is not None:
            try:
                if self._prepare():
                    record = {"path": path, "stamp": files.stamp(path), "build": build}
                    files.write_file(self._build_record(), json.dumps(record).encode())
            except OSError as error:
                _warn_once(self.root, f"cannot be written ({error})")
        return build

    def _build_record(self) -> Path:
        environment = hashlib.sha256(f"{sys.prefix}\0{driver.bindings_version()}".encode()).hexdigest()[:16]
        return self._folder / f"nvrtc-{environment}.json"

    def _forget_build(self) -> None:
        self.__dict__.pop("nvrtc_build", None)
        with suppress(OSError, ImportError):
            self._build_record().unlink()


def _last_use(entry: Path) -> float:
    with suppress(OSError):
        return (entry / "meta.json").stat().st_mtime
    return 0.0
