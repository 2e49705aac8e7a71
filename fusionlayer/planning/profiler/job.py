"""Measures the cost profile of a job."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ...codecs import Codec
from ...process.clock import HOST, Clock
from ...transport import Transport
from ..cost_model import LinkCost
from ..profile import Profile
from ..sizes import Sizes
from .averages import average
from .costs import Note, make_profile, measure_costs
from .link import measure_link
from .models import load_model
from .results import as_link
from .step import as_model, measure_step

_WHOLE = Sizes()


def measure_profile(
    model: str,
    codecs: Mapping[str, Codec],
    transport: Transport,
    *,
    pair: Transport | None = None,
    rate: str | None = None,
    sizes: Sizes = _WHOLE,
    environment: Mapping[str, str],
    clock: Clock = HOST,
    note: Note = lambda done, what: None,
) -> Profile:
    """Return the profile of this job: means over ranks of each rank's medians. All ranks call it together.

    One rank alone measures the model, codecs and copies; two or more also measure a link and collectives, several nodes
    of several ranks also the links inside and between nodes.
    """
    module, batch = load_model(model)
    module.to(clock.device)
    batch = [each.to(clock.device) if isinstance(each, torch.Tensor) else each for each in batch]
    optimizer = torch.optim.AdamW(module.parameters())
    warm_up = max(2, sizes.steps // 4)
    staged = transport.stages(clock.device)
    found = measure_costs(
        codecs,
        transport,
        sizes,
        clock,
        staged=staged,
        more={"model": lambda: measure_step(module, optimizer, lambda _: batch, warm_up, sizes.steps, clock)},
        note=note,
    )
    link: LinkCost | None = None
    if transport.size > 1:
        measured = _measured_by(pair, transport, sizes, HOST if staged else clock)
        if clock.lags:  # what the host does for a transfer takes nothing from the device
            found["call"]["cpu"] = measured["cpu"] = measured["cpu_per_byte"] = measured["sum_per_byte"] = 0.0
        more = transport.size - 2
        link = as_link(measured, max(0.0, found["call"]["cpu"] - measured["cpu"]) / more if more else measured["cpu"])
    name = model.rpartition(":")[2]
    return make_profile(
        name,
        found,
        as_model(name, found["model"]),
        transport,
        link=link,
        rate=rate,
        clock=clock,
        environment=environment,
    )


def _measured_by(pair: Transport | None, transport: Transport, sizes: Sizes, clock: Clock) -> dict[str, Any]:
    """Return on all ranks the link's costs: the mean of the measurements of the two ranks of ``pair``."""
    empty = [[size, 0.0] for size in sizes.nbytes]
    link: dict[str, Any] = dict.fromkeys(("latency", "cpu", "cpu_per_byte", "sum_per_byte"), 0.0)
    link |= {"exchange": empty, "all_reduce": empty}
    if pair is not None:
        measured = measure_link(pair, sizes.nbytes, sizes.repeats, clock)
        link = {key: measured[key] for key in link}
    found: dict[str, Any] = average(link, transport, measured_by=2)
    return found
