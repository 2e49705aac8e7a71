"""The options of ``fusionlayer explain``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..arguments import add_cluster, add_removed
from ..tables import add_columns

__all__ = ["add_parser"]

_COLUMNS = (
    *("bucket", "tensors", "elements", "sends", "codec", "sent by", "sent in steps", "F", "C", "ready", "start"),
    *("end", "idle", "tensor", "bits", "alone", "saves"),
    *("collective", "1 MiB", "1 MiB zip", "16 MiB", "16 MiB zip", "zip pays from"),
)

_EPILOG = """\
examples:
    fusionlayer explain plan.yaml --profile profile.yaml
    fusionlayer explain plan.yaml --profile profile.yaml --rate 1gbit \\
        --timeline plan.json

Times count from the start of backward. They are predicted for one thread that
communicates and has a core of its own, or for one stream of a GPU that does.

ready    the bucket's gradients are there, encoded if that is done ahead
start    the communication thread takes the bucket
end      the sum is there
idle     how long the communication thread had nothing to send before that
F, C     what SAFusion (section 3.3) calls so: the time until the bucket's
         gradients are there, and its time on the communication thread
alone    a tensor by itself, from encoding to the sum; what raw would take
         above that is what the codec saves
"""


def add_parser(commands: Any) -> None:
    """Add the subcommand to ``commands``, which argparse's ``add_subparsers`` has returned."""
    parser = commands.add_parser(
        "explain",
        help="show a plan's buckets, and when each is predicted to be sent",
        description="Explain a fusion plan by a measured profile of its model.",
        epilog=_EPILOG,
    )
    parser.add_argument("plan", type=Path, metavar="PLAN.yaml", help="as `fusionlayer plan` writes it")
    add_cluster(parser)
    add_columns(parser, _COLUMNS)
    parser.add_argument(
        "--timeline", type=Path, metavar="OUT.json", help="write the predicted step as a trace for ui.perfetto.dev"
    )
    add_removed(parser, "--plot", "write a trace with --timeline and open it in ui.perfetto.dev")
