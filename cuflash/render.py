"""From a problem and a config to CUDA source: the templates, and what NVRTC is told beside them."""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Mapping
from dataclasses import fields
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from . import kernels
from .arch import ARCHES
from .config import KernelConfig
from .problem import AttentionProblem

if TYPE_CHECKING:
    from jinja2 import Environment

HEADER_FOLDER = "device"


class Source(NamedTuple):
    """Everything NVRTC needs for one kernel.

    Attributes
    ----------
    text : str
        The rendered translation unit.
    headers : Mapping[str, str]
        Text of each device header under the name by which it is included (``"device/ptx.cuh"``).
    symbol : str
        The kernel's name.
    options : tuple of str
        NVRTC options, the target among them.
    arch : str
        The target, for example ``"sm_90"``.
    """

    text: str
    headers: Mapping[str, str]
    symbol: str
    options: tuple[str, ...]
    arch: str

    @property
    def program_name(self) -> str:
        """The file name that messages and profilers show; absolute, so that it is the same in every directory."""
        return f"/cuflash/{self.symbol}.cu"


def template_root() -> Path:
    """Where the templates are: inside the package in a wheel, beside it in a checkout.

    Raises
    ------
    FileNotFoundError
        Neither folder exists: the installation is broken.
    """
    package = Path(__file__).parent
    for root in (package / "templates", package.parent / "templates"):
        if (root / HEADER_FOLDER).is_dir():
            return root
    raise FileNotFoundError(f"cuflash's templates are neither in {package} nor beside it: reinstall cuflash")


@functools.cache
def _tree() -> Mapping[str, bytes]:
    """All templates and headers by name, read once: what is rendered is what the digest, and so the cache, names."""
    root = str(template_root())  # strings: paths as objects would take most of the time
    paths = [os.path.join(folder, name) for folder, _, names in os.walk(root) for name in names]
    found = {path[len(root) + 1 :].replace(os.sep, "/"): path for path in paths if path.endswith((".j2", ".cuh"))}
    return {name: _bytes(found[name]) for name in sorted(found)}


def _bytes(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()


@functools.cache
def template_digest() -> str:
    """SHA-256 of the names and bytes of all templates and headers."""
    digest = hashlib.sha256()
    for part in chain.from_iterable((name.encode(), text) for name, text in _tree().items()):
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()


@functools.cache
def _headers() -> Mapping[str, str]:
    return {name: text.decode() for name, text in _tree().items() if name.startswith(f"{HEADER_FOLDER}/")}


@functools.cache
def _environment() -> Environment:
    """Jinja with delimiters that neither CUDA nor inline PTX contains and that editors take for comments."""
    from jinja2 import DictLoader, Environment, StrictUndefined

    return Environment(
        loader=DictLoader({name: text.decode() for name, text in _tree().items()}),
        undefined=StrictUndefined,
        variable_start_string="${",
        variable_end_string="}",
        block_start_string="/*%",
        block_end_string="%*/",
        comment_start_string="/*#",
        comment_end_string="#*/",
        line_statement_prefix="//%",
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )


def compile_options(arch: str, *, lineinfo: bool = False) -> tuple[str, ...]:
    """NVRTC's options for a target."""
    options = (f"-arch={arch}", "-std=c++17", "-default-device", "--ptxas-options=-v")
    return (*options, "-lineinfo") if lineinfo else options


def dump_command(problem: AttentionProblem, config: KernelConfig) -> str:
    """The command line that renders a kernel again."""
    table = kernels.select_config(problem)
    changed = [
        f"{field.name}={getattr(config, field.name)}"
        for field in fields(config)
        if field.compare and getattr(config, field.name) != getattr(table, field.name)
    ]
    words = [
        "cuflash dump",
        f"--head-dim {problem.head_dim}",
        f"--head-dim-v {problem.head_dim_v}",
        f"--dtype {problem.dtype}",
        f"--access-bytes {problem.access_bytes}",
        f"--arch {problem.arch}",
    ]
    words += [f"--task {problem.task}"] if problem.task != "forward" else []
    words += ["--causal"] if problem.mask == "causal" else []
    words += ["--scale-first"] if problem.scale_first else []
    words += ["--short"] if problem.short else []
    words += [f"--input-dtype {problem.input_dtype}"] if problem.input_dtype else []
    words += [f"--k-dtype {problem.k_dtype}"] if problem.k_dtype else []
    words += [f"--v-dtype {problem.v_dtype}"] if problem.v_dtype else []
    words += ["--one-level"] if problem.one_level else []
    words += ["--config " + ",".join(changed)] if changed else []
    return " ".join(words)


def render(problem: AttentionProblem, config: KernelConfig, *, lineinfo: bool = False) -> Source:
    """Render a kernel.

    Parameters
    ----------
    problem : AttentionProblem
    config : KernelConfig
        Its family names the template.
    lineinfo : bool
        Compile with source positions for profilers.

    Returns
    -------
    Source
    """
    family = kernels.family_named(config.family)
    symbol = kernels.symbol(problem, config)
    template = _environment().get_template(family.template)
    text = template.render(
        problem=problem,
        config=config,
        arch=ARCHES[problem.arch],
        params=family.params,
        symbol=symbol,
        dump_command=dump_command(problem, config),
    )
    return Source(text, _headers(), symbol, compile_options(problem.arch, lineinfo=lineinfo), problem.arch)
