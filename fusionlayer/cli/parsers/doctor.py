"""The options of ``fusionlayer doctor``."""

from __future__ import annotations

from typing import Any

from ..tables import add_columns

COLUMNS = ("section", "name", "state", "detail")
"""The fields of a ``doctor.Finding``."""

_EPILOG = """\
examples:
    fusionlayer doctor
    fusionlayer doctor --json

ok     it works
none   not installed, not needed
note   worth a look
FAIL   installed or requested, but broken

A codec's error is the share of a Gaussian tensor's energy that it loses.
The exit status is 1 after a FAIL.
"""


def add_parser(commands: Any) -> None:
    """Add the subcommand to ``commands``, which argparse's ``add_subparsers`` has returned."""
    parser = commands.add_parser(
        "doctor",
        help="print what is installed and what of it works here",
        description="Check this installation, machine and environment; try every codec and transport.",
        epilog=_EPILOG,
    )
    add_columns(parser, COLUMNS)
    parser.add_argument("--json", action="store_true", help="JSON output")
