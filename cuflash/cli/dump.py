"""Source, PTX, machine code and resources of a kernel.

cuflash dump --head-dim 128 --causal                     the rendered source
cuflash dump resources sass --head-dim 64 --arch sm_80
cuflash dump --head-dim 64 --arch sm_90a                 (sm_90: the Ampere-style kernel for the same GPU)
cuflash dump --head-dim 128 --config block_n=48 -o out/  everything, as files
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..arch import ARCHES
from .problems import add_problem_options, default_arch, overridden, parse_override, problem_from
from .screen import Screen

if TYPE_CHECKING:
    from ..compiled import Compiled
    from ..config import KernelConfig
    from ..problem import AttentionProblem
    from ..render import Source

PARTS = ("source", "ptx", "sass", "resources")
DISASSEMBLERS = {"nvdisasm": ("--print-code",), "cuobjdump": ("--dump-sass",)}


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"out of {', '.join(PARTS)}; default: source")
    add_problem_options(parser)
    parser.add_argument("--arch", choices=tuple(ARCHES), help="default: the GPU's, compute capability 9.0 without one")
    parser.add_argument(
        "--config", type=parse_override, default={}, metavar="FIELD=N,...", help="change fields of the tuned config"
    )
    parser.add_argument("-o", "--output", type=Path, metavar="DIR", help="write all parts and the headers there")


def run(args: argparse.Namespace, screen: Screen) -> int:
    if unknown := [part for part in args.parts if part not in PARTS]:
        raise ValueError(f"{unknown[0]!r} is no part of a kernel; accepted are {', '.join(PARTS)}")
    dump = make_dump(args)
    if args.output:
        for path in write_files(dump, args.output):
            screen.line(str(path))
        return 0
    for part in args.parts or ["source"]:
        if part == "resources":
            screen.pairs(dump.resources)
        else:
            screen.source(getattr(dump, part), {"source": "cuda", "ptx": "ptx", "sass": "text"}[part])
    return 0


@dataclass(frozen=True)
class Dump:
    """A kernel whose parts are made when they are asked for."""

    problem: AttentionProblem
    config: KernelConfig

    @cached_property
    def rendered(self) -> Source:
        from ..render import render

        return render(self.problem, self.config)

    @cached_property
    def compiled(self) -> Compiled:
        from ..compiler import compile_source

        return compile_source(self.rendered)

    @property
    def source(self) -> str:
        return self.rendered.text

    @property
    def ptx(self) -> str:
        from ..compiler import to_ptx

        return to_ptx(self.rendered)

    @cached_property
    def sass(self) -> str:
        """The disassembly.

        Raises
        ------
        FileNotFoundError
            No disassembler was found.
        """
        program = find_disassembler()
        if program is None:
            raise FileNotFoundError(
                "no disassembler was found: pip install nvidia-cuda-nvdisasm, or have nvdisasm or cuobjdump on PATH"
            )
        return disassemble(program, self.compiled.cubin)

    @property
    def resources(self) -> dict[str, Any]:
        compiled = self.compiled
        return {
            "kernel": compiled.symbol,
            "target": compiled.arch,
            "registers": compiled.registers,
            "spilt bytes": compiled.spill_bytes,
            "stack bytes": compiled.stack_bytes,
            "static shared memory": compiled.static_smem,
            "dynamic shared memory": self.config.smem_bytes(self.problem),
            "threads": self.config.threads,
            "code bytes": len(compiled.cubin),
            "compile seconds": round(compiled.seconds, 2),
            "NVRTC": compiled.nvrtc,
            "warnings": "\n".join(compiled.warnings) or "none",
        }


def make_dump(args: argparse.Namespace) -> Dump:
    """The kernel that the options name.

    Raises
    ------
    ValueError
        A changed config needs more shared memory than the target has.
    """
    from .. import kernels

    problem = problem_from(args, args.arch or default_arch())
    if args.arch is None:
        targets = kernels.device_targets(problem.arch, problem.access_bytes, problem.task)
        problem = dataclasses.replace(problem, arch=targets[-1])
    config = overridden(kernels.select_config(problem), args.config)
    need, limit = config.smem_bytes(problem), ARCHES[problem.arch].smem_per_block
    if need > limit:
        raise ValueError(f"--config needs {need} bytes of shared memory; {problem.arch} has {limit} for a block")
    return Dump(problem, config)


def write_files(dump: Dump, folder: Path) -> list[Path]:
    """Every part as a file, and the headers where the source includes them from."""
    symbol = dump.rendered.symbol
    texts = {f"{symbol}.cu": dump.source, f"{symbol}.ptx": dump.ptx, **dump.rendered.headers}
    texts[f"{symbol}.json"] = json.dumps(dump.resources, indent=1) + "\n"
    if find_disassembler() is not None:
        texts[f"{symbol}.sass"] = dump.sass
    written = []
    for name, text in texts.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        written.append(path)
    cubin = folder / f"{symbol}.cubin"
    cubin.write_bytes(dump.compiled.cubin)
    return [*written, cubin]


def find_disassembler() -> Path | None:
    """nvdisasm or cuobjdump, on PATH or in NVIDIA's wheels."""
    for name in DISASSEMBLERS:
        if found := shutil.which(name):
            return Path(found)
    package = importlib.util.find_spec("nvidia")
    for root in package.submodule_search_locations or [] if package else []:
        for name in DISASSEMBLERS:
            for candidate in sorted(Path(root).glob(f"*/bin/{name}"), reverse=True):
                return candidate
    return None


def disassemble(program: Path, cubin: bytes) -> str:
    """The machine code of a cubin as text.

    Raises
    ------
    OSError
        The disassembler failed; the message has what it said.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        command = [str(program), *DISASSEMBLERS[program.name], str(path)]
        done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"{program} failed: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout
