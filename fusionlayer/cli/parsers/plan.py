"""The options of ``fusionlayer plan``."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ...base.errors import ConfigError
from ...planning.fidelities import BUDGET, FIDELITIES
from ..arguments import add_cluster, key_value, names, planner, positive
from ..tables import add_columns

__all__ = ["add_parser"]

_COLUMNS = (
    *("planner", "buckets", "waiting", "idle", "step", "tensor", "elements", "codec", "why"),
    *("sends", "mean step", "loss", "verdict"),
)

_EPILOG = """\
examples:
    fusionlayer plan --profile profile.yaml --workers 8 --codec int4 \\
        -o plan.yaml
    fusionlayer plan --profile profile.yaml --workers 8 --codec int4 --compare
    fusionlayer plan --profile profile.yaml --workers 8 --codec auto \\
        --fidelity aggressive --rate 1gbit -o plan.yaml

waiting  what the optimizer waits for after backward
idle     how long communication stood still between buckets (W in SAFusion,
         section 3.3)

Both are predictions for one thread that communicates and has a core of its
own; `fusionlayer simulate` shares cores and links out. See docs/planning.md.
"""


def add_parser(commands: Any) -> None:
    """Add the subcommand to ``commands``, which argparse's ``add_subparsers`` has returned."""
    parser = commands.add_parser(
        "plan",
        help="make a fusion plan from a measured profile",
        description="Make a fusion plan for the model of a profile.",
        epilog=_EPILOG,
    )
    add_cluster(parser)
    parser.add_argument("--workers", type=positive, required=True, metavar="N", help="ranks that the plan is for")
    parser.add_argument("--planner", type=planner, metavar="NAME", help="how gradients are fused (default safusion)")
    parser.add_argument(
        "--planner-option", type=key_value, action="append", metavar="KEY=VALUE", help="of the planner; repeatable"
    )
    parser.add_argument(
        "--codec",
        default="raw",
        metavar="NAME",
        help="of all gradients, or auto (default raw)",
    )
    parser.add_argument("--density", type=float, metavar="X", help="share of elements that a sparse codec sends")
    parser.add_argument(
        "--codec-option", type=key_value, action="append", metavar="KEY=VALUE", help="of the codec; repeatable"
    )
    parser.add_argument(
        "--policy", metavar="POLICY.yaml", help="rules that give each gradient a codec, instead of --codec"
    )
    parser.add_argument(
        "--fidelity",
        choices=FIDELITIES,
        help="with --codec auto: what the cost model may choose from (default near_lossless); local: all, and "
        "how often to exchange",
    )
    parser.add_argument(
        "--loss-budget",
        type=float,
        metavar="PERCENT",
        help="with fidelity local: by how much the final loss may be above that of f32, as measured; what was not "
        f"measured is left out (default: what was measured to be above {BUDGET:g} is)",
    )
    parser.add_argument(
        "--losses", type=Path, metavar="LOSSES.yaml", help="your own measured losses, instead of those that come along"
    )
    parser.add_argument("--algorithm", metavar="NAME", help="collective (default: as the engine chooses)")
    parser.add_argument(
        "--ahead",
        action=argparse.BooleanOptionalAction,
        help="encode gradients one by one as they arrive (default: as the codec does)",
    )
    parser.add_argument("-o", "--out", type=Path, metavar="PLAN.yaml", help="where to write the plan")
    parser.add_argument("--compare", action="store_true", help="print what every planner would make of it")
    parser.add_argument("--rates", type=names, metavar="R,R", help="rates to compare at (default: that of --rate)")
    add_columns(parser, _COLUMNS)
    parser.set_defaults(check=_check)


def _check(options: argparse.Namespace) -> None:
    """Raise ``ConfigError`` for options that contradict each other."""
    if options.rates and not options.compare:
        raise ConfigError("--rates is for --compare; a plan is made for one --rate")
    if options.out is None and not options.compare:
        raise ConfigError("nothing to do; give -o PLAN.yaml for the plan, or --compare for a table of planners")
    if options.loss_budget is not None and not 0 <= options.loss_budget < float("inf"):
        raise ConfigError(f"--loss-budget {options.loss_budget:g}; expected percent of the loss, at least 0")
