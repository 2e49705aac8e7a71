"""One rank: ``python -m benchmarks.sharded.worker JOB RESULT``, the job as JSON.

Rank 0 says on stdout how far it is, and writes what was measured into the file RESULT in the end.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist

import fusionlayer as fl
from examples.gpt import Config, Corpus
from examples.wire import carrier, sent_bytes

from .variants import VARIANTS, Trainer

__all__ = ["Job", "main", "measure"]


@dataclass(frozen=True)
class Job:
    """What the ranks of one network do.

    Attributes:
        variants: names.
        rounds: that count; two before them do not, as the first step of a variant sends whole weights.
        config: of the model, as a mapping.
        batch: pieces of text in a rank's step.
        dtype: of weights in transit, a name of ``DTYPES``.
        lr: learning rate.
        seed: of weights, data and order.
    """

    variants: Sequence[str]
    rounds: int
    config: Mapping[str, int | bool]
    batch: int
    dtype: str = "f32"
    lr: float = 1e-3
    seed: int = 0


WARM_UP = 2


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
    """Return what each round of each variant took, by the variant's name.

    Every variant trains a model of its own. They take turns of one step within a round, in an order that is shuffled in
    every round. "seconds" are those of the slowest rank, "sent" bytes that left the busiest node, "payload" bytes of
    messages that a rank sent, inside its node too, "loss" the mean over ranks.
    """
    config = Config(**job.config)  # type: ignore[arg-type]
    trainers: dict[str, Trainer] = {
        name: VARIANTS[name].trainer(config, job.seed, job.dtype, job.lr) for name in job.variants
    }
    device = carrier(fl.local_size(), fl.size(), os.environ.get("GLOO_SOCKET_IFNAME"))
    corpus = Corpus()
    measured: dict[str, list[dict[str, float]]] = {name: [] for name in trainers}
    for number in range(job.rounds + WARM_UP):
        begin = time.perf_counter()
        order = list(trainers)
        random.Random(job.seed * 1009 + number).shuffle(order)
        data = torch.Generator().manual_seed((job.seed * 10_007 + fl.rank() + 1) * 1_000_003 + number)
        tokens, targets = corpus.sample(job.batch, config.context, data)
        for name in order:
            trainer = trainers[name]
            dist.barrier()
            before, paid = sent_bytes(device) if device else 0, trainer.payload or 0
            start = time.perf_counter()
            loss = trainer.step(tokens, targets)
            seconds = time.perf_counter() - start
            dist.barrier()
            sent = (sent_bytes(device) if device else 0) - before
            worst = torch.tensor([seconds, sent, (trainer.payload or 0) - paid], dtype=torch.float64)
            mean = torch.tensor(loss, dtype=torch.float64)
            dist.all_reduce(worst, dist.ReduceOp.MAX)
            dist.all_reduce(mean)
            if number >= WARM_UP:
                names = ("seconds", "sent", "payload", "loss")
                measured[name].append(dict(zip(names, [*worst.tolist(), mean.item() / fl.size()], strict=True)))
        if fl.rank() == 0:
            print(f"round {number + 1} of {job.rounds + WARM_UP}: {time.perf_counter() - begin:.1f} s", flush=True)
    return measured


def as_json(job: Job) -> str:
    """Return what ``main`` reads."""
    return json.dumps(asdict(job))


if __name__ == "__main__":
    main()
