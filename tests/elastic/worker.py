"""A rank of an elastic job, for tests: it trains, is lost where it is told, and says what became of the others."""

import os
import time
import zlib
from pathlib import Path
from typing import Any

import torch
from torch import nn

import fusionlayer as fl
from tests.harness import checkpoint

__all__ = ["Weighted", "begin", "digest", "train"]

TIMEOUT = "20"


def begin(rank: int, folder: str, first: int, timeout: str = TIMEOUT) -> None:
    """Begin an elastic job of ``first`` ranks, which find each other in ``folder``; later ranks join it."""
    os.environ.update(TMPDIR=folder, FUSIONLAYER_TIMEOUT=timeout, FUSIONLAYER_MEMBERS=f"{folder}/members")
    if rank < first:
        os.environ.update(PMI_RANK=str(rank), PMI_SIZE=str(first), PMIX_NAMESPACE="test")
    else:
        os.environ["FUSIONLAYER_JOIN"] = f"{folder}/members"
    fl.init(elastic=True)


def digest(model: nn.Module) -> int:
    value = 0
    for x in model.state_dict().values():
        value = zlib.crc32(x.detach().numpy().tobytes(), value)
    return value


class Weighted(nn.Module):
    """Its gradients are ``weight`` everywhere, and its buffer counts the steps."""

    def __init__(self, weight: float) -> None:
        super().__init__()
        self.parts = nn.ParameterList(nn.Parameter(torch.zeros(n)) for n in (300, 5, 1000))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.weight = weight

    def forward(self) -> torch.Tensor:
        self.steps += 1
        return self.weight * torch.stack([part.sum() for part in self.parts]).sum()


def train(rank: int, world: int, folder: str, first: int, changes: int) -> dict[str, Any]:
    """Train until ``first`` ranks are there after so many changes, and some steps more; return what came of each step.

    Rank r has the gradient 2^r, so an update tells whose gradients it has. A rank other than 1 reaches the checkpoint
    "lost" in the middle of a backward, once it has made enough steps; the test may kill it there. Ranks from ``first``
    on join when the ones before them are lost.
    """
    if rank >= first:
        awaited = Path(folder, f"lost{rank - first}")
        while not awaited.exists():
            time.sleep(0.01)
    begin(rank, folder, first)
    members = fl.membership()
    model = Weighted(2.0**rank)
    optimizer = fl.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.0), model, codec="raw")
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 10**6)
    sampler = torch.utils.data.DistributedSampler(range(60), fl.size(), fl.rank(), shuffle=False)
    members.share(schedule=schedule, sampler=sampler)
    seen: list[dict[str, Any]] = []
    end = Path(folder, "end")
    ended: int | None = None
    own = 0
    while ended is None or members.step < ended:
        before = float(model.parts[0].detach()[0])
        those = members.processes
        loss = model()
        if rank != 1 and own == 6 + 4 * rank:
            hook = model.parts[0].register_hook(lambda gradient: checkpoint("lost"))
            loss.backward()
            hook.remove()
        else:
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        own += 1
        update = before - float(model.parts[0].detach()[0])
        seen.append(
            {"step": members.step, "pids": [pid for pid in members.processes if pid in those], "update": update}
        )
        if members.changed() and rank == 1:
            Path(folder, f"lost{sum(each.name.startswith('lost') for each in Path(folder).iterdir())}").touch()
        if members.generation >= changes and members.size == first and ended is None and rank == 1:
            Path(folder, "end.new").write_text(str(members.step + 5))
            Path(folder, "end.new").rename(end)
        if end.exists():
            ended = int(end.read_text())
    return {
        "pid": os.getpid(),
        "seen": seen,
        "digest": digest(model),
        "place": (fl.rank(), fl.size(), fl.local_rank(), fl.local_size()),
        "dealt": (sampler.num_replicas, sampler.rank, len(list(sampler))),
        "schedule": schedule.last_epoch,
        "steps": int(model.steps),
        "finished": members.step,
    }
