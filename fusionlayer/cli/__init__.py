"""The command ``fusionlayer``: for each subcommand a module with its options in ``parsers``, and one that runs it."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from .. import __version__
from ..base.errors import ConfigError, FusionLayerError, printable
from .arguments import Parser
from .outputs import drop_output
from .parsers import COMMANDS

__all__ = ["main", "make_parser"]

_EPILOG = """\
What works here, and how fast is it?
    fusionlayer doctor
    fusionlayer bench collectives -np 2

Which plan suits my model and my network?
    torchrun --nproc-per-node 2 --no-python fusionlayer profile --model gpt
    fusionlayer plan --profile profiles/PROFILE.yaml --workers 8 -o plan.yaml
    fusionlayer explain plan.yaml --profile profiles/PROFILE.yaml
    fusionlayer simulate profiles/PROFILE.yaml --workers 2,8,64

Which ranks straggle in a running job, and where?
    fusionlayer status

Where does the time of a step go?
    FUSIONLAYER_TIMELINE=trace.json python train.py
    fusionlayer trace trace.json

`fusionlayer COMMAND --help` has details.
"""


def make_parser() -> Parser:
    """Return the parser of all subcommands."""
    parser = Parser(
        prog="fusionlayer",
        description="What fusionlayer costs and saves, in numbers.",
        epilog=_EPILOG,
    )
    parser.add_argument("--version", action="store_true", help="print versions and what the libraries were built for")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    for command in COMMANDS:
        command.add_parser(commands)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line, that of the process by default; return the exit status."""
    parser = make_parser()
    options = parser.parse_args(arguments)
    if options.version:
        options.command = "--version"
    elif options.command is None:
        parser.error("the following arguments are required: COMMAND")
    options.arguments = [*(sys.argv[1:] if arguments is None else arguments)]
    try:
        code = _run(options)
        sys.stdout.flush()
    except FusionLayerError as error:
        print(f"fusionlayer {options.command}: {printable(str(error), lines=True)}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    except BrokenPipeError:  # the reader has closed the pipe, as `head` does
        drop_output()
        return 141
    except OSError as error:  # such as a disk that is full
        print(f"fusionlayer {options.command}: {error.filename or 'output'}: {error.strerror}", file=sys.stderr)
        drop_output()
        return 1
    except KeyboardInterrupt:
        return 130
    return code


def _run(options: argparse.Namespace) -> int:
    if options.version:
        _print_version()
        return 0
    if "check" in options:
        options.check(options)
    module = importlib.import_module(f".{options.command}", __name__)  # here torch is imported
    return module.run(options) or 0


def _print_version() -> None:
    from importlib import metadata  # slow, and only needed here

    from ..base import libraries

    info = libraries.build_info(__version__)
    print(f"fusionlayer {info.version}, torch {metadata.version('torch')}")
    print(f"CPU library: {info.isa} of {', '.join(info.isas)}; CUDA library: {info.cuda.get('archs', 'none')}")
