"""The options of ``fusionlayer autotune``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..outputs import add_plot
from ..tables import add_columns

__all__ = ["add_parser"]

_EPILOG = """\
examples:
    fusionlayer autotune tried.csv
    fusionlayer autotune tried.csv --plot tried.svg

The log is what fl.Autotune(log="tried.csv") names, or HOROVOD_AUTOTUNE_LOG, or
`fusionrun --autotune --autotune-log-file tried.csv`. It may be read while
training goes on.

shape     how bytes are dealt out to the buckets: even, tapered (small ones at
          both ends of backward), tensors (equal counts), or planned, by which
          training began
to best   the plan's step / the best plan's step just before and after, median
          over trials: below 1 it was faster
"""


def add_parser(commands: Any) -> None:
    """Add the subcommand to ``commands``, which argparse's ``add_subparsers`` has returned."""
    parser = commands.add_parser(
        "autotune",
        help="show which plans autotuning has tried, from its log",
        description="Show which plans autotuning has tried while training ran, and which one won.",
        epilog=_EPILOG,
    )
    parser.add_argument("log", type=Path, metavar="LOG.csv", help="as autotuning writes it")
    add_columns(parser, ("buckets", "shape", "trials", "step", "to best"))
    add_plot(parser, "all trials against steps")
    parser.add_argument("--json", action="store_true", help="print the rows of the log as JSON")
