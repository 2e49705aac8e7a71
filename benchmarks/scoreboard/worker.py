"""One worker of one run: ``python -m benchmarks.scoreboard.worker METHOD SEED SETTINGS``, the settings as JSON.

Rank 0 writes a line ``[step, validation loss, seconds]`` whenever it has looked at the loss; the seconds are those of
training so far. The seed decides the initial weights and each worker's data, so runs of one seed differ by the method
alone.

Every worker looks at its own replica, on its share of the held-out data. With local steps replicas differ between
syncs, so looks are where a period ends. Those of fusionlayer are at the anchors: what all workers had after the last
sync, or, of a model whose fragments are synchronised at different times, after the last sync of each.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext

import torch
from torch import nn

import fusionlayer as fl
from benchmarks.peers import PEERS, Attached, attach
from benchmarks.training.workloads import Workload, make_workload
from benchmarks.variants import Variant

from .settings import Settings

__all__ = ["evaluations", "main", "train"]

MOMENTUM = 0.9


def main() -> None:
    """Run the worker that the command line describes."""
    method, seed, settings = sys.argv[1], int(sys.argv[2]), Settings(**json.loads(sys.argv[3]))
    fl.init()
    for line in train(method, seed, settings):
        if fl.rank() == 0:
            print(json.dumps(line), flush=True)
    fl.shutdown()


def train(method: str, seed: int, settings: Settings) -> Iterator[tuple[int, float, float]]:
    """Yield (step, validation loss over all workers' shares, seconds of training) before the first step, every so
    often, and at the end.
    """
    torch.manual_seed(seed)
    workload = make_workload(settings.model, seed, fl.rank())
    network = workload.model()
    data = torch.Generator().manual_seed(seed * fl.size() + fl.rank() + 1)
    attached = connect(method, network, settings)
    optimizer = attached.optimizer
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: warm_up_then_cosine(step, settings.steps))
    looks = evaluations(settings.steps, settings.every, period_of(method))
    seconds = 0.0
    anchored = getattr(optimizer, "anchored", nullcontext)
    yield 0, validate(network, workload), seconds
    start = time.perf_counter()
    for step in range(1, settings.steps + 1):
        inputs, targets = workload.sample(settings.batch_size, data)
        optimizer.zero_grad()
        attached.model(inputs, targets).backward()
        optimizer.step()
        schedule.step()
        if step in looks:
            seconds += time.perf_counter() - start
            with anchored():
                loss = validate(network, workload)
            yield step, loss, seconds
            start = time.perf_counter()
    attached.close()


def evaluations(steps: int, every: int, period: int) -> set[int]:
    """Return the steps after which the loss is looked at: about ``every`` so many, where a period ends, and the last.

    Args:
        steps: of all training.
        every: steps between two looks, if each of them ends a period.
        period: steps after which the workers' parameters are equal.
    """
    apart = -(-every // period) * period
    return {*range(apart, steps, apart), steps}


def period_of(method: str) -> int:
    """Return after how many steps of a method the workers' parameters are equal again."""
    return PEERS[method].period if method in PEERS else Variant.parse(method).period


def connect(method: str, network: nn.Module, settings: Settings) -> Attached:
    """Return what trains ``network`` on all workers."""
    variant = None if method in PEERS else Variant.parse(method)
    momentum = 0.0 if variant is not None and variant.options.get("momentum") else MOMENTUM
    optimizer: torch.optim.Optimizer
    if settings.optimizer == "SGD":
        optimizer = torch.optim.SGD(network.parameters(), lr=settings.learning_rate, momentum=momentum)
    else:
        optimizer = torch.optim.AdamW(network.parameters(), lr=settings.learning_rate, betas=(momentum, 0.999))
    if variant is None:
        return attach(method, network, optimizer)
    return Attached(variant.place(network), variant.wrap(optimizer, network))


def warm_up_then_cosine(step: int, steps: int) -> float:
    """Return the factor on the learning rate: up to 1 in the first tenth of all steps, then down to 0."""
    warm_up = max(1, steps // 10)
    if step < warm_up:
        return (step + 1) / warm_up
    return (1 + math.cos(math.pi * (step - warm_up) / (steps - warm_up + 1))) / 2


@torch.no_grad()
def validate(network: nn.Module, workload: Workload) -> float:
    """Return the loss on the held-out data, of which each worker does its share with its own replica."""
    inputs, targets = workload.held_out()
    mine = slice(fl.rank(), None, fl.size())
    network.eval()
    share = network(inputs[mine], targets[mine]).double()
    network.train()
    return float(fl.all_reduce(share))


if __name__ == "__main__":
    main()
