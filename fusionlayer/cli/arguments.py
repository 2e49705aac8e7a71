"""Argument types and options that several subcommands share."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import yaml

from .. import codecs
from ..codecs import Codec
from ..planning.cluster import Scenario
from ..planning.profile import Profile

__all__ = ["add_cluster", "as_options", "get_codec", "join", "key_value", "names", "numbers", "positive", "scenario_of"]


def join(items: Sequence[object]) -> str:
    """Return "a,b,c"."""
    return ",".join(map(str, items))


def positive(text: str) -> int:
    """Read a whole number above 0."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}; expected a whole number above 0")
    return int(text)


def numbers(text: str) -> list[int]:
    """Read growing whole numbers from "2,8,64"."""
    return sorted({positive(part) for part in text.split(",")})


def names(text: str) -> list[str]:
    """Read names from "a,b"."""
    return [part for part in text.split(",") if part]


def key_value(text: str) -> tuple[str, Any]:
    """Read an option from "key=value"; the value is YAML."""
    key, equals, value = text.partition("=")
    if not (key and equals):
        raise argparse.ArgumentTypeError(f"{text!r}; expected key=value")
    try:
        return key, yaml.safe_load(value)
    except yaml.YAMLError:
        return key, value


def as_options(pairs: Sequence[tuple[str, Any]] | None) -> dict[str, Any]:
    """Return the options that ``key_value`` has read; a later value replaces an earlier one."""
    return dict(pairs or ())


def get_codec(name: str, options: Sequence[tuple[str, Any]] | None, density: float | None) -> Codec:
    """Return the codec that a command line names; raise ``ConfigError`` for an unknown name or option."""
    more = {} if density is None else {"density": density}
    return codecs.get(name, **more, **as_options(options))


def add_cluster(parser: argparse.ArgumentParser) -> None:
    """Add the options that describe the cluster of a plan."""
    parser.add_argument("--profile", type=str, required=True, metavar="PROFILE.yaml", help="measured costs")
    parser.add_argument(
        "--rate",
        help="of each host's link, such as 1gbit (default: collectives as they were measured with so many workers, or "
        "else the profile's highest rate)",
    )
    parser.add_argument("--per-host", type=positive, default=1, metavar="N", help="workers on each host (default 1)")


def scenario_of(options: argparse.Namespace, profile: Profile, rate: str | None = None) -> Scenario:
    """Return the cluster that ``add_cluster``'s options describe; ``rate`` replaces its rate."""
    return Scenario(rate or options.rate or profile.fastest_rate, options.per_host)
