"""Turns shared options of subcommands into objects: codecs, devices and clusters."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import torch

from .. import codecs, context
from ..base.errors import ConfigError
from ..codecs import Codec
from ..planning.cluster import Scenario
from ..planning.profile import Profile
from .arguments import as_options


def get_codec(name: str, options: Sequence[tuple[str, Any]] | None, density: float | None) -> Codec:
    """Return the codec that a command line names; raise ``ConfigError`` for an unknown name or option."""
    more = {} if density is None else {"density": density}
    return codecs.get(name, **more, **as_options(options))


def check_device(options: argparse.Namespace) -> None:
    """Raise ``ConfigError`` unless this machine has the device of ``add_device``."""
    if options.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda, and torch sees no CUDA device; leave it out")


def device_of(options: argparse.Namespace) -> torch.device:
    """Return this rank's device. Ranks of a host take its devices in turn, and the rank's becomes the current one."""
    if options.device == "cpu":
        return torch.device("cpu")
    device = torch.device("cuda", context.local_rank() % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def scenario_of(options: argparse.Namespace, profile: Profile, rate: str | None = None) -> Scenario:
    """Return the cluster that ``add_cluster``'s options describe; ``rate`` replaces its rate."""
    return Scenario(rate or options.rate or profile.fastest_rate, options.per_host or profile.machine.per_host)
