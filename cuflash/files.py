"""Files and folders that appear and vanish in one step, for directories that many processes share without locks.

What is on its way in or out has a name that begins with `UNFINISHED`.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

UNFINISHED = ".unfinished-"


def stamp(path: str) -> list[int]:
    """Size and date of a file: while they stay, it is taken to be the same file."""
    status = os.stat(path)
    return [status.st_size, status.st_mtime_ns]


def _unfinished_name(folder: Path) -> Path:
    return folder / f"{UNFINISHED}{os.getpid()}-{os.urandom(8).hex()}"


def _write_synced(path: Path, data: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o600)
    with open(descriptor, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(descriptor)


def _sync_folder(folder: Path) -> None:
    with suppress(OSError):  # not every system can
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def write_file(target: Path, data: bytes) -> None:
    """Replace a file in one step."""
    staging = _unfinished_name(target.parent)
    try:
        _write_synced(staging, data)
        os.replace(staging, target)
    except OSError:
        delete(staging)
        raise


def write_folder(target: Path, files: Mapping[str, bytes]) -> None:
    """Make a folder with its files appear in one step, unless it is there already: then another process won."""
    staging = _unfinished_name(target.parent)
    try:
        staging.mkdir(mode=0o700)
        for name, data in files.items():
            _write_synced(staging / name, data)
        _sync_folder(staging)
        try:
            os.rename(staging, target)
        except OSError as error:
            # By number first: what was in the way may be gone again. Windows has a number of its own.
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY) and not target.is_dir():
                raise
            delete(staging)
        _sync_folder(target.parent)
    except OSError:
        delete(staging)
        raise


def remove(path: Path) -> None:
    """Take a file or folder away in one step, then delete it; never fails."""
    doomed = _unfinished_name(path.parent)
    with suppress(OSError):
        os.rename(path, doomed)
        delete(doomed)


def delete(path: Path) -> None:
    """Delete a file or folder, as far as possible; never fails."""
    from shutil import rmtree

    if path.is_dir() and not path.is_symlink():
        rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink()


def folder_size(folder: Path) -> int:
    """Bytes in a folder's files; 0 for one that is going away."""
    with suppress(OSError), os.scandir(folder) as files:
        return sum(file.stat().st_size for file in files)
    return 0
