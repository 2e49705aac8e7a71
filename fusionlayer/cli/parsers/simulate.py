"""The options of ``fusionlayer simulate``."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ...base.errors import ConfigError
from ...planning.connections import CONGESTION_CONTROLS
from ..arguments import above_zero, add_removed, chance, join, names, numbers, planner, positive, seconds
from ..tables import add_columns

ALGORITHMS = (
    *("dense", "ring", "butterfly", "one_shot", "gather", "gather_v", "oktopk", "two_shot", "zipped", "switched"),
    *("integer_sum", "low_rank", "omnireduce", "two_level", "grid"),
)
"""The keys of ``planning.collective_phases.ALGORITHMS``."""
WORKERS = (2, 8, 64, 256, 1024, 4096)
"""Numbers of workers, unless others are given."""
_COLUMNS = (
    *("workers", "method", "step", "band", "speed-up", "exposed", "sent", "beyond what was validated", "where"),
)

_EPILOG = """\
examples:
    fusionlayer simulate profile.yaml --workers 2,8,64 --codec int8,int4
    fusionlayer simulate profile.yaml --rate 1gbit --overlap-forward
    fusionlayer simulate profile.yaml --rate 100mbit --rtt 0.05 --loss 0.0005 \\
        --connections 8

exposed  the step without computing: training waits for the network
band     the projected step times the validation's range of measured over
         projected steps

EXTRAPOLATION names limits of the validation that are exceeded: the band does
not hold there. docs/simulation.md has the model.
"""


def add_parser(commands: Any) -> None:
    """Add the subcommand to ``commands``, which argparse's ``add_subparsers`` has returned."""
    parser = commands.add_parser(
        "simulate",
        help="project steps to more workers or another network, from a measured profile",
        description="Project training steps of several methods to more workers or another network.",
        epilog=_EPILOG,
    )
    parser.add_argument("profile", type=Path, metavar="PROFILE.yaml", help="measured costs (profiles/README.md)")
    parser.add_argument(
        "--workers", type=numbers, metavar="N,N", help=f"default {join(WORKERS)}, or one on each host of --rates"
    )
    parser.add_argument("--rate", help="rate of each host's link, such as 1gbit (default: the profile's highest)")
    parser.add_argument(
        "--rates",
        type=names,
        metavar="RATE,RATE",
        help="rates of the hosts' links, where they differ; two_shot gets shares by them",
    )
    parser.add_argument("--codec", type=names, metavar="NAME,NAME", help="codecs of the profile (default: all)")
    parser.add_argument(
        "--algorithm",
        choices=ALGORITHMS,
        metavar="NAME",
        help=f"collective: {', '.join(ALGORITHMS)} (default: as the engine chooses)",
    )
    parser.add_argument("--planner", type=planner, metavar="NAME", help="how gradients are fused (default: configured)")
    parser.add_argument("--overlap-forward", action="store_true", help="also with results awaited in the next forward")
    parser.add_argument("--per-host", type=positive, metavar="N", help="workers on each host (default: as measured)")
    parser.add_argument("--cores", type=above_zero, metavar="X", help="cores of each worker (default: as measured)")
    parser.add_argument(
        "--latency", type=seconds, metavar="SECONDS", help="latency of a message (default: as measured)"
    )
    parser.add_argument("--rtt", type=seconds, default=0.0, metavar="SECONDS", help="round trip between hosts, on top")
    parser.add_argument(
        "--loss",
        type=chance,
        default=0.0,
        metavar="P",
        help="chance to lose a TCP segment between hosts, such as 0.001 (default 0)",
    )
    parser.add_argument(
        "--congestion",
        choices=sorted(CONGESTION_CONTROLS),
        default="reno",
        help="congestion control of TCP (default reno)",
    )
    parser.add_argument(
        "--connections",
        type=positive,
        metavar="K",
        help="connections of transport sockets to each rank (default: gloo's one)",
    )
    parser.add_argument("--curves", action="store_true", help="interpolate measured transfers, not alpha-beta")
    add_columns(parser, _COLUMNS)
    add_removed(parser, "--plot", "write the steps with --json and draw those")
    parser.add_argument("--json", action="store_true", help="JSON output")
    parser.set_defaults(check=_check)


def _check(options: argparse.Namespace) -> None:
    """Raise ``ConfigError`` for options that contradict each other."""
    if options.rates and options.rate:
        raise ConfigError("--rate and --rates; give one of them")
