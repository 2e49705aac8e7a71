"""One worker of one run: ``python -m benchmarks.convergence.worker METHOD SEED SETTINGS``, the settings as JSON.

Rank 0 writes a line ``[step, validation loss]`` whenever it has looked at the loss. The seed decides the initial
weights and each worker's data, so runs of one seed differ by the method alone.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import fusionlayer as fl
from benchmarks.variants import Variant
from examples.gpt import GPT, Corpus

from .settings import MODELS, PEERS, VALIDATION_PIECES, Settings

__all__ = ["main", "train"]

MOMENTUM = 0.9
POWERSGD_RANK = 4
POWERSGD_START = 10
"""Steps without compression, in which PowerSGD's first factors are not yet needed."""


def main() -> None:
    """Run the worker that the command line describes."""
    method, seed, settings = sys.argv[1], int(sys.argv[2]), Settings(**json.loads(sys.argv[3]))
    fl.init()
    for step, loss in train(method, seed, settings):
        if fl.rank() == 0:
            print(json.dumps([step, loss]), flush=True)
    fl.shutdown()


def train(method: str, seed: int, settings: Settings) -> Iterator[tuple[int, float]]:
    """Yield (step, validation loss over all workers' shares) before the first step, every so often, and at the end."""
    config = MODELS[settings.model]
    corpus = Corpus()
    torch.manual_seed(seed)
    network = GPT(config)
    data = torch.Generator().manual_seed(seed * fl.size() + fl.rank() + 1)
    model, optimizer = connect(method, network, settings)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: warm_up_then_cosine(step, settings.steps))
    for step in range(settings.steps):
        if step % settings.every == 0:
            yield step, validate(network, corpus, config.context)
        tokens, targets = corpus.sample(settings.batch_size, config.context, data)
        optimizer.zero_grad()
        model(tokens, targets).backward()
        optimizer.step()
        schedule.step()
    yield settings.steps, validate(network, corpus, config.context)


def connect(method: str, network: nn.Module, settings: Settings) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return the model and the optimizer that train ``network`` on all workers."""
    variant = None if method in PEERS else Variant.parse(method)
    momentum = 0.0 if variant is not None and variant.options.get("momentum") else MOMENTUM
    optimizer: torch.optim.Optimizer
    if settings.optimizer == "SGD":
        optimizer = torch.optim.SGD(network.parameters(), lr=settings.learning_rate, momentum=momentum)
    else:
        optimizer = torch.optim.AdamW(network.parameters(), lr=settings.learning_rate, betas=(momentum, 0.999))
    if method == "ddp":
        return DistributedDataParallel(network), optimizer
    if method == "ddp-powersgd":
        # One bucket: with more of them the order of its collectives differs between ranks, and gloo aborts.
        model = DistributedDataParallel(network, bucket_cap_mb=1000)
        state = powerSGD_hook.PowerSGDState(None, POWERSGD_RANK, start_powerSGD_iter=POWERSGD_START)
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        return model, optimizer
    assert variant is not None
    return network, variant.wrap(optimizer, network)


def warm_up_then_cosine(step: int, steps: int) -> float:
    """Return the factor on the learning rate: up to 1 in the first tenth of all steps, then down to 0."""
    warm_up = max(1, steps // 10)
    if step < warm_up:
        return (step + 1) / warm_up
    return (1 + math.cos(math.pi * (step - warm_up) / (steps - warm_up + 1))) / 2


@torch.no_grad()
def validate(network: nn.Module, corpus: Corpus, length: int) -> float:
    """Return the loss on the validation text, of which each worker does its share."""
    tokens, targets = corpus.validate(VALIDATION_PIECES, length)
    mine = slice(fl.rank(), None, fl.size())
    share = network(tokens[mine], targets[mine]).double()
    return float(fl.all_reduce(share))


if __name__ == "__main__":
    main()
