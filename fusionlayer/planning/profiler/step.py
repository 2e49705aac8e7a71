"""Measures a model's step without communication, and when its gradients arrive and its parameters are used."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ...base.errors import ConfigError
from ...base.plan import plain_name
from ...process.clock import HOST, Clock, Stamp
from ..profile import Gradient, Model


def measure_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: Callable[[int], Sequence[Any]],
    warm_up: int,
    steps: int,
    clock: Clock = HOST,
) -> dict[str, Any]:
    """Return medians over ``steps`` without communication, in seconds; ``as_model`` makes a profile's model of them.

    ``ready``, ``used`` and ``tensors`` (elements, type, bytes of an element) are by name of the parameter. Forward
    includes making the batch, the update includes clearing gradients. A parameter whose own module's forward is not
    called counts as used at once. A parameter without a gradient is left out.
    """
    names = {p: plain_name(name) for name, p in model.named_parameters() if p.requires_grad}
    spans: dict[str, list[tuple[Stamp, Stamp]]] = defaultdict(list)
    ready: dict[str, list[tuple[Stamp, Stamp]]] = {key: [] for key in names.values()}
    used: dict[str, list[tuple[Stamp, Stamp]]] = {key: [] for key in names.values()}
    start: Stamp = None

    def note_ready(key: str, _: Tensor) -> None:
        ready[key].append((start, clock.stamp()))

    def note_used(keys: list[str], *_: object) -> None:
        for key in keys:
            used[key].append((start, clock.stamp()))

    for parameter, key in names.items():
        parameter.register_post_accumulate_grad_hook(partial(note_ready, key))
    for module in model.modules():
        own = [names[parameter] for parameter in module.parameters(recurse=False) if parameter in names]
        module.register_forward_pre_hook(partial(note_used, own))

    for number in range(warm_up + steps):
        if number == warm_up:
            for samples in (*spans.values(), *ready.values(), *used.values()):
                samples.clear()
        start = clock.stamp()
        loss = model(*batch(number))
        spans["forward"].append((start, start := clock.stamp()))
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise ConfigError(f"the model's forward returned {type(loss).__name__}; expected the loss, of one element")
        loss.backward()
        spans["backward"].append((start, start := clock.stamp()))
        optimizer.step()
        optimizer.zero_grad()
        spans["optimizer"].append((start, clock.stamp()))

    def median(samples: Sequence[tuple[Stamp, Stamp]]) -> float:
        return statistics.median(clock.waited(start, end) for start, end in samples)

    arrived = {key: median(samples) for key, samples in ready.items() if samples}
    return {
        **{key: median(samples) for key, samples in spans.items()},
        "ready": arrived,
        "used": {key: median(used[key]) if used[key] else 0.0 for key in arrived},
        "tensors": {
            key: [parameter.numel(), str(parameter.dtype).removeprefix("torch."), parameter.element_size()]
            for parameter, key in names.items()
            if key in arrived
        },
    }


def as_model(name: str, found: dict[str, Any]) -> Model:
    """Return the result of ``measure_step`` as the model of a profile."""
    tensors = [
        Gradient(key, numel, round(found["ready"][key], 7), round(found["used"][key], 7), dtype, itemsize)
        for key, (numel, dtype, itemsize) in found["tensors"].items()
    ]
    tensors.sort(key=lambda tensor: tensor.ready)
    return Model(name, found["forward"], found["backward"], found["optimizer"], tuple(tensors))
