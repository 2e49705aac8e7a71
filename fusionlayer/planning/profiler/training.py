"""Makes a profile of running training: from its own steps, and short measurements between two of them."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from ...base.plan import TensorInfo
from ...codecs import Codec
from ...process.clock import HOST, Clock
from ...scheduler.plan_controller import StepSeconds
from ...transport import Transport
from ..cost_model import LinkCost
from ..profile import PROFILE_VERSION, Gradient, Machine, Model, Profile
from .averages import Points, average
from .codecs import measure_codecs, measure_copy
from .disturbance import measure_disturbance
from .link import measure_call, measure_collectives
from .machine import describe_machine, device_name
from .results import as_codecs, as_curve

__all__ = ["TRANSFER_SECONDS", "profile_training"]

TRANSFER_SECONDS = 1.0
"""Limit for measuring all transfers, without the latency."""
_ELEMENTS = (1 << 10, 1 << 15, 1 << 20)
_NBYTES = tuple(4**exponent for exponent in range(5, 12))
_REPEATS = 3


def profile_training(
    steps: Sequence[StepSeconds],
    tensors: Mapping[str, TensorInfo],
    codecs: Mapping[str, Codec],
    transport: Transport,
    local_size: int = 1,
    clock: Clock = HOST,
) -> Profile:
    """Return the costs of this training, means over ranks of each rank's medians. All ranks call it together.

    Backward begins with its first gradient. Forward is the rest of a step without encoding ahead and waiting, so it
    includes the update. All ranks use the link at once while it is measured, so its costs hold for as many ranks.

    Args:
        steps: of this rank; each rank has equally many.
        tensors: of a step, by name.
        codecs: by registered name, each with the options to measure.
        transport: all ranks; nothing else may compute or send meanwhile.
        local_size: ranks of this host, which share its cores.
        clock: of the gradients' device; codecs and messages are measured there too.
    """
    names = sorted(tensors)
    largest = max(tensor.numel for tensor in tensors.values())
    elements = [size for i, size in enumerate(_ELEMENTS) if i < 2 or size < 32 * largest]
    found: dict[str, Any] = {
        "ready": {name: statistics.median(step.ready[name] for step in steps) for name in names},
        "backward": statistics.median(step.backward for step in steps),
        "forward": statistics.median(s.wall - s.backward - s.submitting - s.waiting for s in steps),
        "copy": measure_copy(elements, _REPEATS, clock),
        "codecs": measure_codecs(codecs, elements, _REPEATS, clock),
        "call": measure_call(transport, _REPEATS, clock),
        "disturbance": measure_disturbance(transport, _REPEATS, clock),
        "collectives": measure_collectives(transport, _NBYTES, _REPEATS, TRANSFER_SECONDS, clock),
    }
    found = average(found, transport)
    size = transport.size
    link = _link(found["call"]["latency"], found["collectives"], size)
    environment = describe_machine(device_name(clock.device))
    nbytes, seconds = found["collectives"]["one_shot"][-1]
    return Profile(
        version=PROFILE_VERSION,
        title=f"training on {environment['hardware']}, {size} rank{'s' if size > 1 else ''}",
        machine=Machine.here(local_size, clock.device),
        model=_model(found, tensors),
        copy=as_curve(found["copy"]),
        codecs=as_codecs(found["codecs"]),
        links={f"{max(1, round(8 * (size - 1) * nbytes / seconds / 1e6))}mbit": link},
        collectives={name: {str(size): as_curve(points)} for name, points in found["collectives"].items()},
        disturbance=found["disturbance"],
        environment=environment,
    )


def _model(found: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> Model:
    ready = found["ready"]
    arrived = sorted(ready, key=lambda name: (ready[name], name))
    gradients = [
        Gradient(name, tensor.numel, ready[name], 0.0, tensor.dtype, tensor.itemsize)
        for name, tensor in ((name, tensors[name]) for name in arrived)
    ]
    return Model("training", max(0.0, found["forward"]), found["backward"], 0.0, tuple(gradients))


def _link(latency: float, collectives: Mapping[str, Points], size: int) -> LinkCost:
    """Return the link's costs, by bytes that each rank sends, that reproduce the seconds of the collectives."""
    exchange = as_curve([[(size - 1) * nbytes, seconds] for nbytes, seconds in collectives["one_shot"]])
    reduce = as_curve([[2 * (size - 1) / size * nbytes, seconds] for nbytes, seconds in collectives["dense"]])
    return LinkCost(latency, 0.0, 0.0, exchange, reduce)
