"""One worker: ``python -m benchmarks.passthrough.worker CELL``, the cell as JSON; rank 0 writes what all measured.

Each form trains a copy of the same model by torch's own DistributedDataParallel, over a group of its own. They take
turns in every round, in an order that differs from round to round; what counts is the worker that took longest.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import fusionlayer as fl
from examples.gpt import GPT, Config, Corpus
from fusionlayer import backend

__all__ = ["FORMS", "Cell", "main", "measure"]

FORMS = ("gloo", "gloo again", "fusionlayer", "fusionlayer with rules")
NO_FIT = {"rules": [{"codec": "int8", "op": "send", "group": "nobody*"}, {"codec": "int8", "dtype": "bfloat16"}]}
"""Rules that every call is looked up in and that fit none."""


@dataclass(frozen=True)
class Cell:
    """What is trained, and how often.

    Attributes:
        width: of the GPT.
        layers: of the GPT.
        batch: texts of a worker's step.
        steps: of a turn.
        rounds: turns of each form.
    """

    width: int = 384
    layers: int = 6
    batch: int = 2
    steps: int = 4
    rounds: int = 24


def main() -> None:
    """Run the worker that the command line describes."""
    cell = Cell(**json.loads(sys.argv[1]))
    torch.set_num_threads(1)
    fl.init()
    seconds = measure(cell)
    if fl.rank() == 0:
        print(json.dumps(seconds), flush=True)
    dist.barrier()
    fl.shutdown()


def measure(cell: Cell) -> dict[str, list[float]]:
    """Return seconds of a step of each form in each round, on the slowest worker."""
    turns = {form: _copy(cell, form) for form in FORMS}
    for turn in turns.values():
        turn(2)
    seconds: dict[str, list[float]] = {form: [] for form in FORMS}
    for number in range(cell.rounds):
        order = list(FORMS)
        random.Random(number).shuffle(order)
        for form in order:
            dist.barrier()
            start = time.perf_counter()
            turns[form](cell.steps)
            took = torch.tensor(time.perf_counter() - start)
            dist.all_reduce(took, dist.ReduceOp.MAX)
            seconds[form].append(took.item() / cell.steps)
    return seconds


def _copy(cell: Cell, form: str) -> Callable[[int], None]:
    """Return what takes so many training steps of a copy of the model."""
    name, *rules = form.split(" with ")
    group = dist.new_group(backend=name.split()[0], pg_options=backend.Policy.of(NO_FIT if rules else None))
    torch.manual_seed(0)
    config = Config(width=cell.width, layers=cell.layers, heads=4)
    model = DistributedDataParallel(GPT(config), process_group=group, bucket_cap_mb=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    corpus, generator = Corpus(), torch.Generator().manual_seed(dist.get_rank())

    def take(steps: int) -> None:
        for _ in range(steps):
            optimizer.zero_grad()
            model(*corpus.sample(cell.batch, config.context, generator)).backward()
            optimizer.step()

    return take


if __name__ == "__main__":
    main()
