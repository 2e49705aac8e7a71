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
from ..profile import Gradient, Model, Profile
from ..sizes import Sizes
from .averages import average
from .costs import make_profile, measure_costs
from .machine import describe_machine, device_name

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
    clock: Clock = HOST,
) -> Profile:
    """Return the costs of this training, means over ranks of each rank's medians. All ranks call it together.

    Backward begins with its first gradient. Forward is the rest of a step without encoding ahead and waiting, so it
    includes the update. All ranks use the link at once while it is measured, so its costs hold for as many ranks.
    """
    names = sorted(tensors)
    largest = max(tensor.numel for tensor in tensors.values())
    elements = tuple(size for i, size in enumerate(_ELEMENTS) if i < 2 or size < 32 * largest)
    ended = {
        "ready": {name: statistics.median(step.ready[name] for step in steps) for name in names},
        "backward": statistics.median(step.backward for step in steps),
        "forward": statistics.median(s.wall - s.backward - s.submitting - s.waiting for s in steps),
    }
    model = _model(average(ended, transport), tensors)
    sizes = Sizes(elements, _NBYTES, len(steps), _REPEATS)
    found = measure_costs(codecs, transport, sizes, clock, dtype=model.dtype, limit=TRANSFER_SECONDS)
    environment = describe_machine(device_name(clock.device))
    return make_profile("training", found, model, transport, clock=clock, environment=environment)


def _model(found: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> Model:
    ready = found["ready"]
    arrived = sorted(ready, key=lambda name: (ready[name], name))
    gradients = [
        Gradient(name, tensor.numel, ready[name], 0.0, tensor.dtype, tensor.itemsize)
        for name, tensor in ((name, tensors[name]) for name in arrived)
    ]
    return Model("training", max(0.0, found["forward"]), found["backward"], 0.0, tuple(gradients))
