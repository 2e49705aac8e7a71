"""The command ``fusionlayer``: one module for each of its subcommands."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from ..errors import FusionLayerError
from . import bench, doctor, explain, plan, profile, simulate, trace
from .arguments import Parser

__all__ = ["main", "make_parser"]

_COMMANDS = (profile, plan, explain, simulate, trace, bench, doctor)


def make_parser() -> Parser:
    """Return the parser of all subcommands."""
    parser = Parser(prog="fusionlayer", description="What fusionlayer costs and saves, in numbers.")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for command in _COMMANDS:
        command.add_parser(commands)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line, that of the process by default; return the exit status."""
    options = make_parser().parse_args(arguments)
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


def _drop_output() -> None:
    """Let what is still to be written go nowhere: Python flushes at its end, and would fail once more."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.__stdout__.fileno() if sys.__stdout__ else 1)
