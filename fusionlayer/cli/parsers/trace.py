"""The options of ``fusionlayer trace``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..arguments import add_removed, count

__all__ = ["add_parser"]

_EPILOG = """\
Write the timelines with FUSIONLAYER_TIMELINE=trace.json; each rank makes a file trace.json.RANK, which Perfetto
(ui.perfetto.dev) and chrome://tracing show as well. "other" is what lies between the spans: data, gradient clipping,
whatever else the training loop does. The loss counts as backward.
"""


def add_parser(commands: Any) -> None:
    """Add the subcommand to ``commands``, which argparse's ``add_subparsers`` has returned."""
    parser = commands.add_parser(
        "trace",
        help="show what steps wait for, from timelines, and break them down",
        description="Tell what the mean step of a run waits for, and break it down, from the timelines of its ranks.",
        epilog=_EPILOG,
    )
    parser.add_argument(
        "timelines", nargs="+", metavar="FILE", help="timelines, or what FUSIONLAYER_TIMELINE was, for all ranks"
    )
    parser.add_argument(
        "--skip", type=count, default=3, metavar="N", help="first steps to leave out: they plan and warm up (default 3)"
    )
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    parser.add_argument(
        "--merge", type=Path, metavar="OUT.json", help="write one timeline of all ranks, by the clock of rank 0"
    )
    add_removed(parser, "--plot", "write one timeline with --merge and open it in ui.perfetto.dev")
