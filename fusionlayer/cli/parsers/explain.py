"""The options of ``fusionlayer explain``."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ...base.errors import ConfigError
from ..arguments import above_zero, add_cluster, add_removed, positive
from ..tables import add_columns

_COLUMNS = (
    *("bucket", "tensors", "elements", "sends", "codec", "sent by", "sent in steps", "F", "C", "ready", "start"),
    *("end", "idle", "tensor", "bits", "alone", "saves"),
)

_EPILOG = """\
examples:
    fusionlayer explain --parameters 100e6 --rate 1gbit --nodes 2 \\
        --per-host 8 --step 0.35
    fusionlayer explain plan.yaml --profile profile.yaml
    fusionlayer explain plan.yaml --profile profile.yaml --rate 1gbit \\
        --timeline plan.json

Without a plan it prints sending time / computing time of a model, and the
codec that docs/choosing.md recommends for this ratio.

With a plan, times count from the start of backward. They are predicted for one
thread that communicates and has a core of its own, or for one stream of a GPU.

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
        help="recommend a codec, or show when a plan's buckets are predicted to be sent",
        description="Recommend a codec for a model and a network, or explain a fusion plan.",
        epilog=_EPILOG,
    )
    parser.add_argument(
        "plan", nargs="?", type=Path, metavar="PLAN.yaml", help="as `fusionlayer plan` writes it; needs --profile"
    )
    add_cluster(parser, required=False)
    add_columns(parser, _COLUMNS)
    parser.add_argument(
        "--timeline", type=Path, metavar="OUT.json", help="write the predicted step as a trace for ui.perfetto.dev"
    )
    add_removed(parser, "--plot", "write a trace with --timeline and open it in ui.perfetto.dev")
    ratio = parser.add_argument_group("without a plan")
    ratio.add_argument(
        "--parameters", type=above_zero, metavar="N", help="of the model, such as 100e6 (default: those of --profile)"
    )
    ratio.add_argument("--nodes", type=positive, metavar="N", help="number of hosts; 1: --rate is that of each rank")
    ratio.add_argument(
        "--step",
        type=above_zero,
        metavar="SECONDS",
        help="a training step of one process alone, without communication (default: that of --profile)",
    )
    parser.set_defaults(check=_check)


def _check(options: argparse.Namespace) -> None:
    """Raise ``ConfigError`` for options that contradict each other, or that are missing."""
    given = {f"--{name}": getattr(options, name) for name in ("nodes", "parameters", "step", "rate")}
    if options.plan is not None:
        if options.profile is None:
            raise ConfigError("a plan is explained by a profile; give --profile PROFILE.yaml")
        del given["--rate"]
        for name in (name for name, value in given.items() if value is not None):
            raise ConfigError(f"{name} goes without a plan; leave out one of them")
    elif options.timeline:
        raise ConfigError("--timeline shows a plan; give PLAN.yaml too")
    else:
        needed = ["--nodes"] if options.profile else [*given]
        missing = [name for name in needed if given[name] is None]
        if missing:
            raise ConfigError(f"no {', '.join(missing)}; give these, or PLAN.yaml and --profile")
