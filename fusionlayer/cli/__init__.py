"""The command ``fusionlayer``: one module for each of its subcommands."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

import torch

from .. import __version__, native
from ..errors import FusionLayerError
from . import bench, doctor, explain, plan, profile, simulate, trace
from .arguments import Parser

__all__ = ["main"]

_COMMANDS = (profile, plan, explain, simulate, trace, bench, doctor)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line, that of the process by default; return the exit status."""
    parser = Parser(prog="fusionlayer", description="What fusionlayer costs and saves, in numbers.")
    parser.add_argument("--version", action="store_true", help="tell versions and what the libraries were built for")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    for command in _COMMANDS:
        command.add_parser(commands)
    options = parser.parse_args(arguments)
    if options.version:
        options.command, options.run = "--version", _print_version
    elif options.command is None:
        parser.error("the following arguments are required: COMMAND")
    options.arguments = [*(sys.argv[1:] if arguments is None else arguments)]
    try:
        status: int = options.run(options) or 0
        sys.stdout.flush()
    except FusionLayerError as error:
        print(f"fusionlayer {options.command}: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # the reader has closed the pipe, as `head` does
        _drop_output()
        return 141
    except OSError as error:  # such as a disk that is full
        print(f"fusionlayer {options.command}: {error.filename or 'output'}: {error.strerror}", file=sys.stderr)
        _drop_output()
        return 1
    except KeyboardInterrupt:
        return 130
    return status


def _print_version(_: argparse.Namespace) -> None:
    info = native.build_info(__version__)
    print(f"fusionlayer {info.version}, torch {torch.__version__}")
    print(f"CPU library: {info.isa} of {', '.join(info.isas)}; CUDA library: {info.cuda.get('archs', 'none')}")


def _drop_output() -> None:
    """Let what is still to be written go nowhere: Python flushes at its end, and would fail once more."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.__stdout__.fileno() if sys.__stdout__ else 1)
