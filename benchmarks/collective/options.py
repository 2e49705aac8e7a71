"""The command line."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable

import fusionlayer as fl
from benchmarks import driver
from benchmarks.arguments import comma_separated, count, one_of
from benchmarks.lab import Network
from benchmarks.lab.network import CPU_BOUND
from benchmarks.variants import codec_presets

__all__ = ["parse"]

DEFAULTS = {
    "rates": "none,100mbit,1gbit",
    "worlds": "2,4",
    "sizes": "64KB,1MB,4MB,16MB",
    "rounds": 5,
    "turn_seconds": 0.1,
}
SMOKE = {"rates": "none,1gbit", "worlds": "2", "sizes": "64KB", "rounds": 2, "turn_seconds": 0.0}


def parse(description: str | None) -> argparse.Namespace:
    """Return what the command line asks for; what cannot be is told to the user, and ends the process."""
    parser = driver.make_parser("collective", description, allow_abbrev=False)
    parser.add_argument(
        "--rates",
        type=comma_separated(_rate),
        help=f"of each host's link, comma-separated; none: one host's loopback (default {DEFAULTS['rates']})",
    )
    parser.add_argument(
        "--worlds", type=comma_separated(count(2)), help=f"numbers of workers (default {DEFAULTS['worlds']})"
    )
    parser.add_argument("--hosts", type=count(2), default=2, help="that workers are spread over (default 2)")
    parser.add_argument("--sizes", type=comma_separated(_size), help=f"default {DEFAULTS['sizes']}")
    parser.add_argument("--rounds", type=count(), help=f"default {DEFAULTS['rounds']}")
    parser.add_argument("--codecs", type=_names(fl.codecs.names()), default=tuple(codec_presets()), help="default: all")
    collectives = fl.collectives.names()
    parser.add_argument("--collectives", type=_names(collectives), default=tuple(collectives), help="default: all")
    parser.add_argument("--timeout", type=float, default=1800.0, help="seconds for one set of workers (default 1800)")
    driver.add_options(parser, timed=True, smoke=True)
    parser.set_defaults(**(SMOKE if "--smoke" in sys.argv[1:] else DEFAULTS))
    options = parser.parse_args()
    uneven = [world for world in options.worlds if world % options.hosts]
    if uneven and any(options.rates):
        parser.error(f"--worlds {uneven[0]} cannot be spread over --hosts {options.hosts}; choose a multiple of it")
    return options


def _names(known: list[str]) -> Callable[[str], tuple[str, ...]]:
    return comma_separated(one_of(known))


def _rate(text: str) -> str | None:
    if text == "none":
        return None
    try:
        rate = Network(rate=text, allow_cpu_bound=True).bits_per_second
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if rate is not None and rate > CPU_BOUND:
        raise argparse.ArgumentTypeError(f"{text!r}; above 1gbit this machine's cores are measured: choose up to 1gbit")
    return text


def _size(text: str) -> int:
    match = re.fullmatch(r"([1-9]\d*)(KB|MB)", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r}; expected a whole number with KB or MB, such as 64KB")
    return int(match[1]) << (10 if match[2] == "KB" else 20)
