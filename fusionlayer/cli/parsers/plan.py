"""The options of ``fusionlayer plan``."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ...base.errors import ConfigError
from ...planning.fidelities import BUDGET, FIDELITIES
from ..arguments import add_cluster, key_value, names, planner, positive
from ..tables import add_columns

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

waiting  the optimizer's wait after backward
idle     pauses of communication between buckets (W in SAFusion, section 3.3)

Both are predictions for one communication thread with a core of its own;
`fusionlayer simulate` shares cores and links. See docs/planning.md.
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
    parser.add_argument("--workers", type=positive, required=True, metavar="N", help="ranks of the job")
    parser.add_argument("--planner", type=planner, metavar="NAME", help="how gradients are fused (default safusion)")
    parser.add_argument(
        "--planner-option",
        type=key_value,
        action="append",
        metavar="KEY=VALUE",
        help="option of the planner; repeatable",
    )
    parser.add_argument(
        "--codec",
        default="raw",
        metavar="NAME",
        help="codec of all gradients, or auto (default raw)",
    )
    parser.add_argument("--density", type=float, metavar="X", help="share of elements that a sparse codec sends")
    parser.add_argument(
        "--codec-option", type=key_value, action="append", metavar="KEY=VALUE", help="option of the codec; repeatable"
    )
    parser.add_argument(
        "--policy", metavar="POLICY.yaml", help="rules that give each gradient a codec, instead of --codec"
    )
    parser.add_argument(
        "--fidelity",
        choices=FIDELITIES,
        help="with --codec auto: codecs to choose from (default near_lossless); local: all, and local steps",
    )
    parser.add_argument(
        "--loss-budget",
        type=float,
        metavar="PERCENT",
        help="with fidelity local: measured excess of the final loss over f32's; leaves out unmeasured ways (default: "
        f"{BUDGET:g}, and unmeasured ways are allowed)",
    )
    parser.add_argument("--losses", type=Path, metavar="LOSSES.yaml", help="your own measured losses")
    parser.add_argument("--algorithm", metavar="NAME", help="collective (default: as the engine chooses)")
    parser.add_argument(
        "--ahead",
        action=argparse.BooleanOptionalAction,
        help="encode gradients one by one as they arrive (default: as the codec does)",
    )
    parser.add_argument("-o", "--out", type=Path, metavar="PLAN.yaml", help="where to write the plan")
    parser.add_argument("--compare", action="store_true", help="compare all planners")
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
