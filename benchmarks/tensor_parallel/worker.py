"""One rank: ``python -m benchmarks.tensor_parallel.worker JOB RESULT``, the job as JSON.

Rank 0 says on stdout how far it is, and writes what was measured into the file RESULT in the end.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist

import fusionlayer as fl
from examples.gpt import Corpus
from examples.wire import carrier, sent_bytes

from .model import Shape, TensorParallelGPT
from .variants import Channel, parse

__all__ = ["Job", "main", "measure"]


@dataclass(frozen=True)
class Job:
    """What the ranks of one network do.

    Attributes:
        variants: names.
        rounds: that count; one before them does not.
        shape: of the model, as a mapping.
        seed: of weights, data and order.
    """

    variants: Sequence[str]
    rounds: int
    shape: Mapping[str, int] = field(default_factory=dict)
    seed: int = 0


def main() -> None:
    """Run the worker that the command line describes."""
    job = Job(**json.loads(sys.argv[1]))
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    fl.init()
    measured = measure(job)
    if fl.rank() == 0:
        Path(sys.argv[2]).write_text(json.dumps(measured))
    dist.barrier()
    fl.shutdown()


def measure(job: Job) -> dict[str, list[dict[str, float]]]:
    """Return seconds, bytes that a host sent, and loss of each round of each variant, by its name.

    One model takes all steps. Variants take turns within a round, in an order that is shuffled in every round. Seconds
    are those of the slowest rank.
    """
    shape = Shape(**job.shape)
    torch.manual_seed(job.seed + fl.rank())
    channels: dict[str, Channel] = {name: parse(name).channel(shape.width) for name in job.variants}
    model = TensorParallelGPT(shape, fl.size(), next(iter(channels.values())))
    for name, parameter in model.named_parameters():
        if "_in." not in name and "_out." not in name:  # whole on every rank
            dist.broadcast(parameter.detach(), 0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    device = carrier(fl.local_size(), fl.size(), os.environ.get("GLOO_SOCKET_IFNAME"))
    corpus, data = Corpus(), torch.Generator().manual_seed(job.seed)
    measured: dict[str, list[dict[str, float]]] = {name: [] for name in channels}
    for number in range(job.rounds + 1):
        begin = time.perf_counter()
        order = list(channels)
        random.Random(job.seed * 1009 + number).shuffle(order)
        for name in order:
            tokens, targets = corpus.sample(shape.batch, shape.context, data)
            model.channel = channels[name]
            dist.barrier()
            before = sent_bytes(device) if device else 0
            start = time.perf_counter()
            loss = model(tokens, targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            seconds = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
            sent = torch.tensor(float((sent_bytes(device) if device else 0) - before), dtype=torch.float64)
            dist.all_reduce(seconds, dist.ReduceOp.MAX)
            dist.all_reduce(sent, dist.ReduceOp.MAX)
            if number:
                measured[name].append({"seconds": seconds.item(), "sent": sent.item(), "loss": loss.item()})
        if fl.rank() == 0:
            print(f"round {number} of {job.rounds}: {time.perf_counter() - begin:.1f} s", flush=True)
    return measured


def as_json(job: Job) -> str:
    """Return what ``main`` reads."""
    return json.dumps(asdict(job))


if __name__ == "__main__":
    main()
