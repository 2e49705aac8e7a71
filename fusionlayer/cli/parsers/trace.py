"""The options of ``fusionlayer trace``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..arguments import add_removed, count

_EPILOG = """\
FUSIONLAYER_TIMELINE=trace.json makes a file trace.json.RANK for each rank, which Perfetto (ui.perfetto.dev) and
chrome://tracing show too. "other" is the rest of the training loop. The loss counts as backward.
"""


def add_parser(commands: Any) -> None:
    """Add the subcommand to ``commands``, which argparse's ``add_subparsers`` has returned."""
    parser = commands.add_parser(
        "trace",
        help="show what steps wait for, from timelines, and break them down",
        description="Break down the mean step of a run, from the timelines of its ranks.",
        epilog=_EPILOG,
    )
    parser.add_argument(
        "timelines", nargs="+", metavar="FILE", help="timelines, or the value of FUSIONLAYER_TIMELINE for all ranks"
    )
    parser.add_argument("--skip", type=count, default=3, metavar="N", help="first steps to leave out (default 3)")
    parser.add_argument("--json", action="store_true", help="JSON output")
    parser.add_argument("--merge", type=Path, metavar="OUT.json", help="one timeline of all ranks, by rank 0's clock")
    add_removed(parser, "--plot", "write one timeline with --merge and open it in ui.perfetto.dev")
