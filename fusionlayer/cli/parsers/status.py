"""The options of ``fusionlayer status``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..arguments import above_zero

_DESCRIPTION = "Show the activity of a job's ranks, stragglers, and the cause of a failure."
_EPILOG = """\
It reads the file of a watched job: one with `fl.watch()`, the default process group
"fusionlayer", or FUSIONLAYER_WATCH=1. Run it on rank 0's host as the same user.

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
        help="the file in FUSIONLAYER_STATUS (default: this user's newest on this host)",
    )
    parser.add_argument("--once", action="store_true", help="print once, also on a terminal")
    parser.add_argument("--json", action="store_true", help="JSON output, once")
    parser.add_argument(
        "--every", type=above_zero, default=1.0, metavar="SECONDS", help="interval on a terminal (default 1)"
    )
