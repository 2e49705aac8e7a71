"""Several GPUs in a box: each rank sends from the GPU of its tensors, whenever its script has chosen it."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fusionlayer as fl
import fusionlayer.torch as hvd
from tests.harness import outcomes_of, run_ranks
from tests.transport.fake_nccl import FakeNccl, gpus

WORLD = 4
WHEN = ["before", "after", "never", "one visible"]


def functional(device: torch.device) -> list[float]:
    x = torch.full((3000,), fl.rank() + 1.0, device=device)
    fl.all_reduce(x, codec="int8")
    y = torch.full((5,), fl.rank() + 1.0, device=device)
    fl.all_reduce(y)
    return [x.tolist()[0], y.tolist()[0]]


def horovod(device: torch.device) -> list[float]:
    x = torch.full((5,), fl.rank() + 1.0, device=device)
    even = hvd.add_process_set([0, 2])
    found = [hvd.allreduce(x, op=hvd.Sum, name="x").tolist()[0]]
    if fl.rank() in (0, 2):
        found.append(hvd.allreduce(x, op=hvd.Sum, process_set=even, name="even").tolist()[0])
    return found


def job(rank: int, world: int, when: str, calls: Callable[[torch.device], list[float]]) -> Any:
    os.environ |= {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(world)}
    with gpus([rank] if when == "one visible" else range(world)):
        if when == "before":
            torch.cuda.set_device(rank)
        hvd.init()
        if when == "after":
            torch.cuda.set_device(hvd.local_rank())
        index = 0 if when == "one visible" else rank
        found = calls(torch.device("cuda", index))
        hvd.shutdown()
        return found, FakeNccl.launched


@pytest.mark.parametrize("when", WHEN)
@pytest.mark.parametrize("calls, sums", [(functional, [2.5, 2.5]), (horovod, [10.0, 4.0])], ids=["fl", "hvd"])
def test_each_rank_sends_from_its_gpu(when: str, calls: Any, sums: list[float]) -> None:
    every = run_ranks(job, WORLD, when, calls)
    for rank, (found, _) in enumerate(every):
        assert found == pytest.approx(sums if calls is functional or rank in (0, 2) else sums[:1], rel=0.01)
    launched = [launched for _, launched in every]
    assert launched[0] and launched[0] == launched[2] and launched[1] == launched[3]
    in_all = {name for name, _ in launched[1]}
    assert [each for each in launched[0] if each[0] in in_all] == launched[1], "one order on every rank"
