"""The command line: one module per command, loaded when its command is called."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

from .. import __version__
from ..errors import CompileError, DriverError, MissingKernelError, UnsupportedError

COMMANDS = {
    "demo": "what this machine can do: kernels, speed, accuracy, memory traffic",
    "info": "versions, devices, compiler, cache, frameworks, environment switches",
    "run": "attention on .npy files",
    "dump": "source, PTX, machine code and resources of a kernel",
    "compile": "compile kernels ahead, into the cache or a directory",
    "cache": "the disk cache of compiled kernels",
    "bench": "measure speed and accuracy, beside torch where it is installed",
}

EXPECTED = (
    ValueError,
    TypeError,
    OSError,
    ImportError,
    UnsupportedError,
    CompileError,
    DriverError,
    MissingKernelError,
)
"""Errors that tell a person what to do, or that the machine is at fault: shown without a traceback."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command.

    Parameters
    ----------
    arguments : sequence of str, optional
        ``sys.argv[1:]`` by default.

    Returns
    -------
    int
        Exit status: 0; 1 for a failure, whose message is on stderr; 2 without a command, which shows the help, and for
        wrong usage (argparse exits by itself); 130 when interrupted.
    """
    from .screen import make_screen

    top = parser()
    args = top.parse_args(arguments)
    if not hasattr(args, "module"):
        top.print_help(sys.stderr)
        return 2
    try:
        status: int = args.module.run(args, make_screen())
        sys.stdout.flush()
    except KeyboardInterrupt:
        print("cuflash: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader, head for example, has gone; what Python flushes at exit goes nowhere
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except EXPECTED as error:
        if args.traceback:
            raise
        print(f"cuflash: error: {error}", file=sys.stderr)
        return 1
    return status


def parser() -> argparse.ArgumentParser:
    """The whole command line."""
    top = argparse.ArgumentParser(prog="cuflash", description="Exact fused attention for plain arrays.")
    top.add_argument("--version", action="version", version=f"cuflash {__version__}")
    commands = top.add_subparsers(title="commands", metavar="COMMAND")
    for name, text in COMMANDS.items():
        module = importlib.import_module(f".{name}", __name__)
        command = commands.add_parser(
            name, help=text, description=module.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        command.add_argument("--traceback", action="store_true", help="show where an error came from")
        module.configure(command)
        command.set_defaults(module=module)
    return top
