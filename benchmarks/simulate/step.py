"""What a step of a model costs alone, and when its gradients and parameters come into play."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from functools import partial
from typing import Any

from torch import Tensor

from benchmarks.training.workloads import make_workload

__all__ = ["measure_step"]


def measure_step(name: str, rank: int, warm_up: int, steps: int) -> dict[str, Any]:
    """Return medians over ``steps`` without communication, in seconds, as a profile's ``model`` has them.

    ``ready`` and ``used`` are mappings by name of the parameter. Batches count as a part of forward, clearing gradients
    as a part of the update. A parameter that is not used by the forward of its own module counts as used at once.
    """
    workload = make_workload(name, 0, rank)
    model = workload.model()
    optimizer = workload.optimizer(model)
    names = {parameter: key for key, parameter in model.named_parameters()}
    seconds: dict[str, list[float]] = defaultdict(list)
    ready: dict[str, list[float]] = {key: [] for key in names.values()}
    used: dict[str, list[float]] = {key: [] for key in names.values()}
    start = 0.0

    def note_ready(key: str, _: Tensor) -> None:
        ready[key].append(time.perf_counter() - start)

    def note_used(keys: list[str], *_: object) -> None:
        for key in keys:
            used[key].append(time.perf_counter() - start)

    for parameter, key in names.items():
        parameter.register_post_accumulate_grad_hook(partial(note_ready, key))
    for module in model.modules():
        own = [names[parameter] for parameter in module.parameters(recurse=False) if parameter in names]
        module.register_forward_pre_hook(partial(note_used, own))

    for number in range(warm_up + steps):
        if number == warm_up:
            for samples in (*seconds.values(), *ready.values(), *used.values()):
                samples.clear()
        start = time.perf_counter()
        loss = model(*workload.batch(number))
        start = _note(seconds["forward"], start)
        loss.backward()
        start = _note(seconds["backward"], start)
        optimizer.step()
        optimizer.zero_grad()
        _note(seconds["optimizer"], start)
    return {
        **{key: statistics.median(samples) for key, samples in seconds.items()},
        "ready": {key: statistics.median(samples) for key, samples in ready.items()},
        "used": {key: statistics.median(samples) if samples else 0.0 for key, samples in used.items()},
        "numel": {key: parameter.numel() for parameter, key in names.items()},
    }


def _note(samples: list[float], start: float) -> float:
    """Record the seconds since ``start``; return the present."""
    now = time.perf_counter()
    samples.append(now - start)
    return now
