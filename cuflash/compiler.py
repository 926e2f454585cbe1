"""NVRTC: rendered source to machine code, with the figures that ptxas reports about it."""

from __future__ import annotations

import functools
import re
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from .compiled import Compiled
from .driver import bindings_version
from .errors import INSTALL_CUDA, CompileError, MissingKernelError

if TYPE_CHECKING:
    from .render import Source


class BadNvrtc(NamedTuple):
    """Builds from ``first`` up to but not including ``fixed`` that miscompile kernels of one target."""

    first: tuple[int, ...]
    fixed: tuple[int, ...]
    arch: str
    reason: str


KNOWN_BAD_NVRTC = (
    BadNvrtc((12, 8, 0), (12, 9, 86), "sm_90a", "CUDA 12.8.0 to 12.9.0 miscompile causal Hopper kernels"),
)


# --- the library -----------------------------------------------------------------------------------------------


@functools.cache
def _nvrtc() -> Any:
    """The bindings, with NVRTC loaded."""
    try:
        from cuda.bindings import nvrtc
    except ImportError as error:
        raise MissingKernelError(
            f"compiling needs NVRTC and the CUDA bindings for Python, which are not installed: {INSTALL_CUDA}"
        ) from error
    try:
        nvrtc.nvrtcVersion()
    except RuntimeError as error:  # the bindings are there, the library of their major version is not
        version = bindings_version()
        raise MissingKernelError(
            f"compiling needs NVRTC {version.split('.')[0]}.x, to which the installed cuda-bindings {version} belong, "
            f"and it was not found: {INSTALL_CUDA}"
        ) from error
    return nvrtc


def _ok(result: tuple[Any, ...]) -> Any:
    status, *values = result
    if status:
        raise CompileError(f"NVRTC failed: {_nvrtc().nvrtcGetErrorString(status)[1].decode()}")
    return values[0] if values else None


@contextmanager
def _program(text: str, name: str, headers: dict[str, str]) -> Iterator[Any]:
    nvrtc = _nvrtc()
    texts, names = [h.encode() for h in headers.values()], [h.encode() for h in headers]
    program = _ok(nvrtc.nvrtcCreateProgram(text.encode(), name.encode(), len(names), texts, names))
    try:
        yield program
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _read(program: Any, what: str) -> bytes:
    """One of a program's results: ``"CUBIN"``, ``"PTX"`` or ``"ProgramLog"``."""
    nvrtc = _nvrtc()
    size = _ok(getattr(nvrtc, f"nvrtcGet{what}Size")(program))
    # The bindings write into the bytes object. Python shares one object for each single byte: this must be the zero
    # byte's, since an empty log is one zero.
    buffer = bytes(size)
    _ok(getattr(nvrtc, f"nvrtcGet{what}")(program, buffer))
    return buffer


@functools.cache
def nvrtc_build() -> str:
    """The full build of NVRTC, such as ``"13.0.88"``, from what it writes into PTX; its version call ends at 13.0.

    Loads NVRTC: `cuflash.cache.remembered_nvrtc_build` avoids that.

    Raises
    ------
    MissingKernelError
        There is no NVRTC.
    """
    with _program("", "/cuflash/version.cu", {}) as program:
        _ok(_nvrtc().nvrtcCompileProgram(program, 0, []))
        banner = re.search(rb"Cuda compilation tools, release [\d.]+, V([\d.]+)", _read(program, "PTX"))
    if banner:
        return banner[1].decode()
    return ".".join(str(part) for part in _nvrtc().nvrtcVersion()[1:])


@functools.cache
def nvrtc_path() -> str | None:
    """The file that NVRTC was loaded from, if the loader knows it."""
    from cuda.pathfinder import load_nvidia_dynamic_lib

    _nvrtc()
    path: str | None = load_nvidia_dynamic_lib("nvrtc").abs_path
    return path


def _check_build(arch: str) -> None:
    build = nvrtc_build()
    numbers = tuple(int(part) for part in build.split("."))
    for bad in KNOWN_BAD_NVRTC:
        if bad.arch == arch and bad.first <= numbers < bad.fixed:
            raise CompileError(
                f"NVRTC {build} is refused for {arch}: {bad.reason}. Install NVRTC "
                f"{'.'.join(map(str, bad.fixed))} or later: pip install --upgrade {_wheel_name(numbers[0])}"
            )


def _wheel_name(major: int) -> str:
    return "nvidia-cuda-nvrtc-cu12" if major == 12 else "nvidia-cuda-nvrtc"


# --- compiling -------------------------------------------------------------------------------------------------


def compile_source(source: Source, *, ptx: bool = False) -> Compiled:
    """Compile a rendered kernel.

    Parameters
    ----------
    source : Source
    ptx : bool
        Make PTX of the target instead of machine code, for devices of a later generation. A target that this NVRTC
        does not know becomes the PTX of the newest one it does, whatever is asked here.

    Returns
    -------
    Compiled

    Raises
    ------
    CompileError
        NVRTC refused the source, or is a build that miscompiles kernels of this target.
    MissingKernelError
        There is no NVRTC.
    """
    _check_build(source.arch)
    target = _target(source.arch, ptx)
    is_ptx = target.startswith("compute_")
    start = time.thread_time()
    with _compiled(source, target) as (program, log):
        seconds = time.thread_time() - start
        code = _read(program, "PTX" if is_ptx else "CUBIN")
    registers, spill_bytes, stack_bytes, static_smem = _resources(log)
    return Compiled(
        cubin=code,
        symbol=source.symbol,
        arch=target,
        registers=registers,
        spill_bytes=spill_bytes,
        stack_bytes=stack_bytes,
        static_smem=static_smem,
        seconds=seconds,
        log=log,
        nvrtc=nvrtc_build(),
        is_ptx=is_ptx,
    )


def to_ptx(source: Source) -> str:
    """The PTX of a rendered kernel, as text to read."""
    with _compiled(source, _target(source.arch, ptx=True)) as (program, _):
        return _read(program, "PTX").rstrip(b"\0").decode()


def _target(arch: str, ptx: bool) -> str:
    known = [int(number) for number in _ok(_nvrtc().nvrtcGetSupportedArchs())]
    number = int(arch.removeprefix("sm_").rstrip("af"))
    if number in known:
        return arch.replace("sm_", "compute_") if ptx else arch
    earlier = [other for other in known if other < number]
    if earlier and number > max(known):
        return f"compute_{max(earlier)}"
    raise CompileError(
        f"NVRTC {nvrtc_build()} does not know {arch}; it knows {', '.join(f'sm_{other}' for other in known)}. "
        f"For another, {INSTALL_CUDA}"
    )


@contextmanager
def _compiled(source: Source, target: str) -> Iterator[tuple[Any, str]]:
    """A compiled program and its log."""
    options = [option for option in source.options if not option.startswith("-arch=")]
    options.insert(0, f"-arch={target}")
    with _program(source.text, source.program_name, dict(source.headers)) as program:
        (status,) = _nvrtc().nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
        log = _read(program, "ProgramLog").rstrip(b"\0").decode("utf-8", "replace")
        if status:
            raise _compile_error(source, target, log)
        yield program, log


def _resources(log: str) -> tuple[int, int, int, int]:
    """(registers, spill bytes, stack bytes, static shared memory), each the largest of all functions in the log."""
    patterns = (
        r"Used (\d+) registers",
        r"(\d+) bytes spill (?:stores|loads)",
        r"(\d+) bytes stack frame",
        r"(\d+) bytes smem",
    )
    registers, spills, stack, smem = (max(map(int, re.findall(p, log)), default=0) for p in patterns)
    return registers, spills, stack, smem


# --- errors ----------------------------------------------------------------------------------------------------

_ERROR_LINE = re.compile(r"^(?P<file>[^\s()]+)\((?P<line>\d+)\): (?:catastrophic )?error\b.*$", re.MULTILINE)


def _compile_error(source: Source, target: str, log: str) -> CompileError:
    path = _write_out(source)
    where = f"The rendered source is in {path}" if path else "The rendered source could not be written anywhere"
    parts = [f"NVRTC {nvrtc_build()} refused {source.symbol} for {target}. {where}."]
    parts += _excerpts(source, log) or [log.strip() or "(the log is empty)"]
    return CompileError("\n\n".join(parts), log=log, source_path=path)


def _excerpts(source: Source, log: str, limit: int = 3) -> list[str]:
    """The first errors of a log, each once, with the lines around it and a caret."""
    texts = {source.program_name: source.text, **source.headers}
    excerpts: dict[str, None] = {}  # a template refuses once for each of its instances, in the same words
    for match in _ERROR_LINE.finditer(log):
        lines, number = texts.get(match["file"], "").splitlines(), int(match["line"])
        shown = [match[0]]
        for n in range(max(1, number - 2), min(len(lines), number + 1) + 1):
            shown.append(f"{n:6d} | {lines[n - 1]}")
            if n == number and (column := _caret_column(log[match.end() :])) is not None:
                shown.append(" " * 6 + " | " + re.sub(r"[^\t]", " ", lines[n - 1][:column]).ljust(column) + "^")
        excerpts["\n".join(shown)] = None
    return list(excerpts)[:limit]


def _caret_column(after: str) -> int | None:
    """NVRTC prints the line, indented by two, and a caret under it."""
    following = after.splitlines()[1:3]
    return following[1].index("^") - 2 if len(following) == 2 and following[1].strip() == "^" else None


def _write_out(source: Source) -> str | None:
    """Write a refused source with its headers to a new folder, as another compiler would want it."""
    try:
        folder = Path(tempfile.mkdtemp(prefix="cuflash-refused-"))
        for name, text in {f"{source.symbol}.cu": source.text, **source.headers}.items():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text(text, encoding="utf-8")
    except OSError:
        return None
    return str(folder / f"{source.symbol}.cu")
