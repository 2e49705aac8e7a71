"""The profiler: measures the costs for a cost profile."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from ...codecs import Codec
from ...process.clock import HOST, Clock
from ...transport import Transport
from ..cost_model import LinkCost
from ..profile import PROFILE_VERSION, Machine, Profile
from ..sizes import Sizes
from .averages import Points, average
from .codecs import busy_seconds, measure_codecs, measure_copy, measure_staging
from .disturbance import measure_disturbance
from .link import measure_call, measure_collectives, measure_link
from .machine import cpu_name, describe_machine, device_name, file_name
from .models import BUILT_IN, load_model
from .results import as_codecs, as_curve, as_link
from .step import as_model, measure_step
from .training import profile_training

__all__ = [
    "BUILT_IN",
    "Points",
    "Sizes",
    "as_codecs",
    "as_curve",
    "as_link",
    "as_model",
    "average",
    "busy_seconds",
    "cpu_name",
    "describe_machine",
    "device_name",
    "file_name",
    "load_model",
    "measure_call",
    "measure_codecs",
    "measure_collectives",
    "measure_copy",
    "measure_disturbance",
    "measure_link",
    "measure_profile",
    "measure_staging",
    "measure_step",
    "profile_training",
]

_WHOLE = Sizes()


def measure_profile(
    model: str,
    codecs: Mapping[str, Codec],
    transport: Transport,
    *,
    pair: Transport | None = None,
    local_size: int = 1,
    rate: str | None = None,
    sizes: Sizes = _WHOLE,
    environment: Mapping[str, str],
    clock: Clock = HOST,
    note: Callable[[float, str], object] = lambda done, what: None,
) -> Profile:
    """Return the profile of this job: means over ranks of each rank's medians. All ranks call it together.

    One rank alone measures the model, codecs and copies; two or more also a link and collectives.

    Args:
        model: its name for ``load_model``.
        codecs: by name.
        transport: all ranks.
        pair: on two of the ranks, a transport of these two; the link between them is measured. None on other ranks.
        local_size: ranks of this host, which share its cores.
        rate: of the link, in the words of tc; None: the rate of its largest exchange.
        sizes: which sizes are measured, and how often.
        environment: facts for the profile, about hardware and software.
        clock: of the device that computes and has the messages.
        note: called with what share of the work is done, and what is measured next.
    """
    module, batch = load_model(model)
    module.to(clock.device)
    batch = [each.to(clock.device) if isinstance(each, torch.Tensor) else each for each in batch]
    # A link that carries the host's memory is measured with that, and the copies there are measured separately.
    carried = HOST if transport.stages(clock.device) else clock
    elements, repeats = sizes.elements, sizes.repeats
    optimizer = torch.optim.AdamW(module.parameters())
    found: dict[str, Any] = {"codecs": {}}
    parts: dict[str, Callable[[], Any]] = {
        "model": lambda: measure_step(module, optimizer, lambda _: batch, max(2, sizes.steps // 4), sizes.steps, clock),
        "copy": lambda: measure_copy(elements, repeats, clock),
        **{
            f"codec {name}": partial(measure_codecs, {name: codec}, elements, repeats, clock)
            for name, codec in codecs.items()
        },
    }
    if transport.size > 1:
        parts["call"] = lambda: measure_call(transport, repeats, carried)
        parts["disturbance"] = lambda: measure_disturbance(transport, repeats, clock)
        parts["collectives"] = lambda: measure_collectives(transport, sizes.nbytes, repeats, clock=clock)
        if carried is not clock:
            parts["staging"] = lambda: measure_staging(sizes.nbytes, repeats, clock)
    for place, (part, measure) in enumerate(parts.items()):
        note(place / (len(parts) + 1), part)
        if part.startswith("codec "):
            found["codecs"].update(measure())
        else:
            found[part] = measure()
    note(len(parts) / (len(parts) + 1), "link")
    found = average(found, transport)
    links: dict[str, LinkCost] = {}
    if transport.size > 1:
        link = _measured_by(pair, transport, sizes, carried)
        if clock.lags:  # what the host does for a transfer takes nothing from the device
            found["call"]["cpu"] = link["cpu"] = link["cpu_per_byte"] = 0.0
        more = transport.size - 2
        overhead = max(0.0, found["call"]["cpu"] - link["cpu"]) / more if more else link["cpu"]
        links[rate or _achieved(link["exchange"])] = as_link(link, overhead)
    name = model.rpartition(":")[2]
    return Profile(
        version=PROFILE_VERSION,
        title=f"{name} on {environment['hardware']}, {transport.size} rank{'s' if transport.size > 1 else ''}",
        machine=Machine.here(local_size, clock.device),
        model=as_model(name, found["model"]),
        copy=as_curve(found["copy"]),
        codecs=as_codecs(found["codecs"]),
        links=links,
        collectives={
            algorithm: {str(transport.size): as_curve(points)}
            for algorithm, points in found.get("collectives", {}).items()
        },
        disturbance=found.get("disturbance", 0.0),
        staging=as_curve(found["staging"]) if "staging" in found else None,
        environment=environment,
    )


def _measured_by(pair: Transport | None, transport: Transport, sizes: Sizes, clock: Clock) -> dict[str, Any]:
    """Return on all ranks the link's costs: the mean of what the two ranks of ``pair`` have measured."""
    empty = [[size, 0.0] for size in sizes.nbytes]
    link: dict[str, Any] = {"latency": 0.0, "cpu": 0.0, "cpu_per_byte": 0.0, "exchange": empty, "all_reduce": empty}
    if pair is not None:
        measured = measure_link(pair, sizes.nbytes, sizes.repeats, clock)
        link = {key: measured[key] for key in link}
    found: dict[str, Any] = average(link, transport, measured_by=2)
    return found


def _achieved(exchange: Points) -> str:
    nbytes, seconds = exchange[-1]
    return f"{max(1, round(8 * nbytes / seconds / 1e6))}mbit"
