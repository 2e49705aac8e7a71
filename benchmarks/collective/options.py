"""The command line."""

from __future__ import annotations

import argparse
import math
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import fusionlayer as fl
from benchmarks import driver
from benchmarks.arguments import comma_separated, count, one_of
from benchmarks.lab import Network
from benchmarks.lab.network import CPU_BOUND, seconds_of
from benchmarks.variants import codec_presets

__all__ = ["Link", "parse"]

FUNCTIONS = ("all_reduce", "all_gather", "all_to_all")
MOST_CONNECTIONS = 64

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
        "--links",
        type=comma_separated(Link.parse),
        default=(),
        metavar="RATE[/RTT[/LOSS[/CONGESTION]]]",
        help="links in place of --rates, comma-separated, such as 1gbit,100mbit/50ms/0.0005/reno; a rate such as "
        "30mbit+100mbit is of two interfaces",
    )
    parser.add_argument(
        "--functions",
        type=_names(FUNCTIONS),
        default=(),
        help=f"of fusionlayer, with each codec, over gloo and --connections: {', '.join(FUNCTIONS)} (default: none)",
    )
    parser.add_argument(
        "--connections",
        type=comma_separated(_connections),
        default=(),
        metavar="K[/KIND]",
        help="numbers of TCP connections of our own that --functions are tried over, comma-separated, such as "
        "1,4,4/bbr; or /plain, /tags, /tls: without a guard, authenticated, encrypted (default: none)",
    )
    parser.add_argument(
        "--only", default="", metavar="REGEX", help="operations to measure, such as 'over 8' (default: all)"
    )
    parser.add_argument(
        "--most-seconds",
        type=float,
        default=math.inf,
        metavar="SECONDS",
        help="an operation whose rounds would take longer has fewer of them (default: all have --rounds)",
    )
    parser.add_argument("--theme", default="collective", help="first part of the result files' names")
    parser.add_argument(
        "--worlds", type=comma_separated(count(2)), help=f"numbers of workers (default {DEFAULTS['worlds']})"
    )
    parser.add_argument("--hosts", type=count(2), default=2, help="that workers are spread over (default 2)")
    parser.add_argument("--sizes", type=comma_separated(_size), help=f"default {DEFAULTS['sizes']}")
    parser.add_argument("--rounds", type=count(), help=f"default {DEFAULTS['rounds']}")
    parser.add_argument("--codecs", type=_names(fl.codecs.names()), default=tuple(codec_presets()), help="default: all")
    collectives = fl.collectives.names()
    parser.add_argument(
        "--collectives",
        type=_names_or_none(collectives),
        default=tuple(collectives),
        help="of the engine, with each codec; none: only the functions and what they are compared with (default: all)",
    )
    parser.add_argument("--timeout", type=float, default=1800.0, help="seconds for one set of workers (default 1800)")
    driver.add_options(parser, timed=True, smoke=True)
    parser.set_defaults(**(SMOKE if "--smoke" in sys.argv[1:] else DEFAULTS))
    options = parser.parse_args()
    options.links = options.links or tuple(Link(rate) for rate in options.rates)
    if options.connections and not options.functions:
        parser.error("--connections without --functions; say which are tried over them")
    try:
        re.compile(options.only)
    except re.error as error:
        parser.error(f"--only {options.only!r}: {error}; expected a regular expression")
    uneven = [world for world in options.worlds if world % options.hosts]
    if uneven and any(link.limited for link in options.links):
        parser.error(f"--worlds {uneven[0]} cannot be spread over --hosts {options.hosts}; choose a multiple of it")
    return options


@dataclass(frozen=True)
class Link:
    """What joins the hosts: the fields are those of ``Cell``."""

    rate: str | None = None
    delay: str | None = None
    loss: float = 0.0
    congestion: str = "reno"
    interfaces: tuple[str, ...] = ()

    @property
    def limited(self) -> bool:
        """Whether it joins hosts, rather than the workers of one."""
        return self.rate is not None or bool(self.interfaces)

    @classmethod
    def parse(cls, text: str) -> Link:
        """Return the link that ``text`` says: RATE, RATE/RTT, RATE/RTT/LOSS or RATE/RTT/LOSS/CONGESTION."""
        rate, *more = text.split("/")
        rtt, loss, congestion = [*more, *["0ms", "0", "reno"][len(more) :]][:3]
        several = tuple(rate.split("+")) if "+" in rate else ()
        try:
            if len(more) > 3:
                raise ValueError("more than four parts")
            delay = None if rtt == "0ms" else f"{1e3 * seconds_of('rtt', rtt) / 2:g}ms"
            link = cls(None if several else rate, delay, float(loss), congestion, several)
            Network(2, link.rate, delay=delay, loss=link.loss, congestion=congestion, interfaces=several)
        except ValueError as error:
            raise argparse.ArgumentTypeError(
                f"{text!r}: {error}; expected RATE/RTT/LOSS/CONGESTION, such as 100mbit/50ms/0.0005/reno"
            ) from None
        return link


def _names_or_none(known: list[str]) -> Callable[[str], tuple[str, ...]]:
    return lambda text: () if text == "none" else _names(known)(text)


def _names(known: Sequence[str]) -> Callable[[str], tuple[str, ...]]:
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


def _connections(text: str) -> str:
    number, slash, congestion = text.partition("/")
    count(1, MOST_CONNECTIONS)(number)
    if slash and not re.fullmatch("[a-z0-9_-]+", congestion):
        raise argparse.ArgumentTypeError(f"{text!r}; expected a number, or one and the name of a congestion control")
    return text


def _size(text: str) -> int:
    match = re.fullmatch(r"([1-9]\d*)(KB|MB)", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r}; expected a whole number with KB or MB, such as 64KB")
    return int(match[1]) << (10 if match[2] == "KB" else 20)
