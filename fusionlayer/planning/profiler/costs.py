"""Measures the common part of an offline profile and one of running training, and makes the profile."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from ...codecs import Codec
from ...process.clock import HOST, Clock
from ...process.processes import machine_name
from ...transport import Transport
from ..cost_model import Curve, LinkCost
from ..profile import PROFILE_VERSION, Machine, Model, Profile
from ..sizes import Sizes
from .averages import Points, average
from .codecs import measure_codecs, measure_copy, measure_staging
from .disturbance import measure_disturbance
from .link import levels_of, measure_call, measure_collectives
from .results import as_codecs, as_curve, as_link

Note = Callable[[float, str], object]
"""Called with the completed share of the work, and the next subject."""


def measure_costs(
    codecs: Mapping[str, Codec],
    transport: Transport,
    sizes: Sizes,
    clock: Clock = HOST,
    *,
    dtype: torch.dtype = torch.float32,
    limit: float = math.inf,
    staged: bool = False,
    more: Mapping[str, Callable[[], Any]] = {},
    note: Note = lambda done, what: None,
) -> dict[str, Any]:
    """Return costs of codecs, copies and transfers, means over ranks of each rank's medians.

    All ranks call it together. One rank alone measures no transfers.
    """
    elements, repeats, carried = sizes.elements, sizes.repeats, HOST if staged else clock
    found: dict[str, Any] = {"codecs": {}}
    parts: dict[str, Callable[[], Any]] = {
        **more,
        "copy": lambda: measure_copy(elements, repeats, clock),
        **{
            f"codec {name}": partial(measure_codecs, {name: codec}, elements, repeats, clock, dtype)
            for name, codec in codecs.items()
        },
    }
    if transport.size > 1:
        parts["call"] = lambda: measure_call(transport, repeats, carried)
        parts["calls"] = lambda: {
            level: measure_call(transport, repeats, carried, peers) for level, peers in levels_of(transport).items()
        }
        parts["disturbance"] = lambda: measure_disturbance(transport, repeats, clock)
        parts["collectives"] = lambda: measure_collectives(transport, sizes.nbytes, repeats, limit, clock)
        if staged:
            parts["staging"] = lambda: measure_staging(sizes.nbytes, repeats, clock)
    for place, (part, measure) in enumerate(parts.items()):
        note(place / (len(parts) + 1), part)
        if part.startswith("codec "):
            found["codecs"].update(measure())
        else:
            found[part] = measure()
    note(len(parts) / (len(parts) + 1), "link")
    averaged: dict[str, Any] = average(found, transport)
    return averaged


def make_profile(
    title: str,
    found: Mapping[str, Any],
    model: Model,
    transport: Transport,
    *,
    link: LinkCost | None = None,
    rate: str | None = None,
    clock: Clock = HOST,
    environment: Mapping[str, str],
) -> Profile:
    """Return the profile of the costs ``found`` by ``measure_costs``; it is the same on all ranks.

    Args:
        title: the measured subject, in words; hardware and number of ranks are added.
        found: means over ranks.
        model: its step.
        transport: all ranks.
        link: measured between two of them; None: as the exchanges of all ranks say. If nodes have several ranks, these
            give the time of messages of any size, because all ranks of a node share its link.
        rate: the rate of a node's link, in the words of tc; None: the rate of the largest exchange.
        clock: the clock of the device that computes.
        environment: facts for the profile, about hardware and software.
    """
    size, curves = transport.size, dict(found.get("collectives", {}))
    inside: LinkCost | None = None
    per_host, links = 1, {}
    if size > 1:
        reduce = [[2 * (size - 1) / size * nbytes, seconds] for nbytes, seconds in curves["dense"]]
        levels = {level: curves.pop(level) for level in ("inside", "between") if level in curves}
        if levels:
            per_host = len(transport.nodes[0])
            carried = {"inside": per_host - 1, "between": size - per_host}
            calls = found["calls"]
            near, far = (_by_bytes(levels[level], carried[level], calls[level]["latency"], link) for level in carried)
            inside = as_link({**near, "all_reduce": near["exchange"]}, link.overhead if link else 0.0)
            link = as_link({**far, "all_reduce": reduce}, link.overhead if link else 0.0)
        elif link is None:
            link = as_link(
                {**_by_bytes(curves["one_shot"], size - 1, found["call"]["latency"], None), "all_reduce": reduce}, 0.0
            )
        assert link is not None
        links[rate or _achieved(link)] = link
    return Profile(
        version=PROFILE_VERSION,
        title=f"{title} on {environment['hardware']}, {size} rank{'s' if size > 1 else ''}",
        machine=Machine.here(_sharing(transport), clock.device, per_host),
        model=model,
        copy=as_curve(found["copy"]),
        codecs=as_codecs(found["codecs"]),
        links=links,
        inside=inside,
        collectives={name: {str(size): as_curve(points)} for name, points in curves.items()},
        disturbance=found.get("disturbance", 0.0),
        staging=as_curve(found["staging"]) if "staging" in found else None,
        environment=environment,
    )


def _sharing(transport: Transport) -> int:
    """Return the number of ranks on this rank's machine, which share its cores; emulated hosts are of one machine."""
    mine = hashlib.sha256(machine_name().encode()).digest()
    return transport.all_gather_bytes(mine).count(mine)


def _by_bytes(points: Points, messages: int, latency: float, link: LinkCost | None) -> dict[str, Any]:
    """Return the data for ``as_link`` from exchanges in which a link carries this many messages at once."""
    exchange = [[messages * nbytes, seconds] for nbytes, seconds in points]
    cpu = {name: getattr(link, name, 0.0) for name in ("cpu_per_byte", "sum_per_byte")}
    return {"latency": latency, "exchange": exchange, **cpu}


def _achieved(link: LinkCost) -> str:
    assert isinstance(link.exchange, Curve), "measured"
    nbytes, seconds = link.exchange.points[-1]
    return f"{max(1, round(8 * nbytes / seconds / 1e6))}mbit"
