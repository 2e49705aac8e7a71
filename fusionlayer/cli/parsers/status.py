"""The options of ``fusionlayer status``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..arguments import above_zero

__all__ = ["add_parser"]

_DESCRIPTION = "What the ranks of a running job do, which straggle, and why a failed job has failed."
_EPILOG = """\
It reads the file that rank 0 of a watched job keeps: of a job with `fl.watch()`, with the
default process group "fusionlayer", or with FUSIONLAYER_WATCH=1. Run it on rank 0's host, as
the same user. On a terminal the table is drawn anew every second until the job ends.

    fusionlayer status
    fusionlayer status --once --json
    fusionlayer status /tmp/fusionlayer-1000/job-4711.json
"""


def add_parser(commands: Any) -> None:
    """Add the subcommand."""
    parser = commands.add_parser("status", help="what the ranks of a job do", description=_DESCRIPTION, epilog=_EPILOG)
    parser.add_argument(
        "file",
        type=Path,
        nargs="?",
        metavar="FILE",
        help="that rank 0 keeps, as FUSIONLAYER_STATUS names it (default: this user's newest on this host)",
    )
    parser.add_argument("--once", action="store_true", help="print the table once, also on a terminal")
    parser.add_argument("--json", action="store_true", help="print all that is known as JSON, once")
    parser.add_argument("--every", type=above_zero, default=1.0, metavar="SECONDS", help="between two tables (1)")
