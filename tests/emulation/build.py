"""From a rendered kernel to a shared library that runs it on the CPU.

The kernel's text and headers are compiled by g++ as they are, except that ``device/ptx.cuh`` is the emulated one of
this folder. Libraries are kept in a folder of the user's temporary directory, under a hash of all that went into them.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from cuflash.render import Source, template_root

KEEP_SECONDS = 3 * 24 * 3600
"""Libraries that were not used for so long are removed."""
HERE = Path(__file__).parent
REPLACED = "device/ptx.cuh"
MACHINE = ("fibers.cpp", "warp.cpp", "memory.cpp", "interface.cpp")
MACHINE_HEADERS = ("machine.h", "state.h")
# _longjmp between stacks is what glibc's fortified one refuses. Unrolling pragmas are for NVRTC.
FLAGS = ("-std=c++17", "-fPIC", "-Wall", "-Wextra", "-Wno-unknown-pragmas", "-U_FORTIFY_SOURCE", "-D_FORTIFY_SOURCE=0")
# NVRTC contracts a * b + c into an fma, too.
KERNEL_FLAGS = (*FLAGS, "-O1", "-march=native", "-ffp-contract=fast")
MACHINE_FLAGS = (*FLAGS, "-O3", "-march=native", "-ffp-contract=off")

ENTRY = """
template <class P> static void call(void (*kernel)(P), const void* block) {{ kernel(*static_cast<const P*>(block)); }}
template <class P> static int size_of(void (*)(P)) {{ return sizeof(P); }}
extern "C" void emulated_kernel(const void* block) {{ call({symbol}, block); }}
extern "C" int emulated_parameter_bytes() {{ return size_of({symbol}); }}
"""


def compiler() -> str | None:
    return shutil.which("g++")


@functools.cache
def _compiler_version() -> str:
    version = subprocess.run([compiler() or "g++", "--version"], capture_output=True, text=True, check=True).stdout
    native = subprocess.run(
        [compiler() or "g++", "-march=native", "-Q", "--help=target"], capture_output=True, text=True, check=True
    ).stdout
    return version + native


def _root() -> Path:
    root = Path(tempfile.gettempdir()) / f"cuflash-emulation-{os.getuid()}"
    root.mkdir(mode=0o700, exist_ok=True)
    if root.stat().st_uid != os.getuid():
        raise PermissionError(f"{root} belongs to somebody else: set TMPDIR to a folder of your own")
    return root


def _run_compiler(arguments: Sequence[str], folder: Path) -> None:
    done = subprocess.run([compiler() or "g++", *arguments], cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"g++ {' '.join(arguments)} in {folder}:\n{done.stderr[-6000:]}")


def _remove_old() -> None:
    for folder in _root().iterdir():
        with contextlib.suppress(OSError):  # another process may do the same
            if time.time() - folder.stat().st_mtime > KEEP_SECONDS:
                shutil.rmtree(folder, ignore_errors=True)


def _publish(staging: Path, final: Path) -> None:
    """Rename a finished folder into place; another process may have done so first."""
    try:
        staging.rename(final)
    except OSError:
        if not final.exists():
            raise
        shutil.rmtree(staging)


def _digest(parts: Sequence[str]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part.encode()).to_bytes(8, "little") + part.encode())
    return digest.hexdigest()[:20]


@functools.cache
def _machine_objects() -> Path:
    """The folder of the compiled machine, which all kernels share."""
    texts = [(HERE / name).read_text() for name in (*MACHINE, *MACHINE_HEADERS)]
    final = _root() / f"machine-{_digest([*texts, *MACHINE_FLAGS, _compiler_version()])}"
    _remove_old()
    if not final.exists():
        staging = Path(tempfile.mkdtemp(dir=_root()))
        _run_compiler([*MACHINE_FLAGS, "-c", *(str(HERE / name) for name in MACHINE)], staging)
        _publish(staging, final)
    os.utime(final)
    return final


def build(source: Source) -> Path:
    """Compile a kernel for the CPU.

    Parameters
    ----------
    source : Source
        As ``cuflash.render.render`` made it.

    Returns
    -------
    Path
        A shared library for ``launch.Emulator``.

    Raises
    ------
    RuntimeError
        g++ refuses the text; the message has its output.
    """
    machine = _machine_objects()
    headers = {**source.headers, REPLACED: (HERE / REPLACED).read_text(), "machine.h": (HERE / "machine.h").read_text()}
    text = source.text + ENTRY.format(symbol=source.symbol)
    key = _digest([text, *headers, *headers.values(), machine.name, *KERNEL_FLAGS])
    final = _root() / f"{source.symbol}-{key}"
    if not final.exists():
        staging = Path(tempfile.mkdtemp(dir=_root()))
        for name, content in {**headers, "kernel.cpp": text}.items():
            path = staging / name
            path.parent.mkdir(exist_ok=True)
            path.write_text(content)
        objects = [str(machine / name.replace(".cpp", ".o")) for name in MACHINE]
        # Each library has a machine of its own: none of its names may bind to another library's.
        link = ["-shared", "-Wl,-Bsymbolic", "-o", "kernel.so"]
        _run_compiler([*KERNEL_FLAGS, "-I.", "-include", "machine.h", "kernel.cpp", *objects, *link], staging)
        _publish(staging, final)
    os.utime(final)
    return final / "kernel.so"


def compile_snippet(text: str, folder: Path) -> Path:
    """A shared library of a few lines that use the device headers, with nothing executed by the machine."""
    (folder / "snippet.cpp").write_text(text)
    paths = [f"-I{HERE}", f"-I{template_root()}"]
    _run_compiler([*FLAGS, *paths, "-include", "machine.h", "-shared", "snippet.cpp", "-o", "snippet.so"], folder)
    return folder / "snippet.so"
