"""The options of ``fusionlayer doctor``."""

from __future__ import annotations

from typing import Any

from ..tables import add_columns

__all__ = ["COLUMNS", "add_parser"]

COLUMNS = ("section", "name", "state", "detail")
"""The fields of a ``doctor.Finding``."""

_EPILOG = """\
examples:
    fusionlayer doctor
    fusionlayer doctor --json

ok     it works
none   not installed, or not asked for: nothing depends on it
note   worth a look
FAIL   installed or asked for, and does not work

A codec's error is the share of a Gaussian tensor's energy that it loses.
The exit status is 0, or 1 if anything has failed.
"""


def add_parser(commands: Any) -> None:
    """Add the subcommand to ``commands``, which argparse's ``add_subparsers`` has returned."""
    parser = commands.add_parser(
        "doctor",
        help="print what is installed and what of it works here",
        description="Look at this installation, machine and environment, and try every codec\n"
        "and transport for a moment.",
        epilog=_EPILOG,
    )
    add_columns(parser, COLUMNS)
    parser.add_argument("--json", action="store_true", help="print JSON")
