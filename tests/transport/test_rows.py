"""Links that move rows of one length by one call of their library: those of NCCL, with gloo in its place."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from fusionlayer.transport.c10d import C10dTransport
from fusionlayer.transport.links.nccl import NcclLink
from tests.harness import run_ranks

pytestmark = pytest.mark.medium

WORLD, NUMEL = 3, 1001


class OverGloo(NcclLink):
    """The calls that ``NcclLink`` makes, of a group of gloo on the CPU; ``exchange``, which gloo lacks, fails."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.calls = 0
        world: Any = dist.group.WORLD
        self._group = world._get_backend(self.device)

    @contextmanager
    def _operation(self) -> Iterator[None]:
        self.calls += 1
        yield


def row(source: int, to: int) -> Tensor:
    return torch.arange(NUMEL).add(10 * source + to).to(torch.uint8)


def move_rows(rank: int, world: int) -> tuple[int, int, int]:
    transport = C10dTransport()
    usual, link = transport._links["cpu"], OverGloo()
    transport._links["cpu"] = link
    before = transport.sequence, transport.bytes_sent
    every = torch.zeros(world, NUMEL, dtype=torch.uint8)
    transport.all_gather(row(rank, 0), every)
    assert torch.equal(every, torch.stack([row(source, 0) for source in range(world)]))
    every[(rank + 1) % world] = 0
    transport.all_gather(every[rank], every)  # in place
    assert torch.equal(every, torch.stack([row(source, 0) for source in range(world)]))
    transport.all_to_all(torch.stack([row(rank, to) for to in range(world)]), every)
    assert torch.equal(every, torch.stack([row(source, rank) for source in range(world)]))
    transport.all_gather(every[0, :0], every[:, :0])  # nothing to send
    calls = transport.sequence - before[0]
    sent = transport.bytes_sent - before[1]
    transport._links["cpu"] = usual
    transport.barrier()
    transport.close()
    return link.calls, calls, sent


def test_rows_travel_by_one_call() -> None:
    """However many ranks there are; one message for each of them is ``exchange``."""
    assert run_ranks(move_rows, WORLD) == [(3, 4, 3 * (WORLD - 1) * NUMEL)] * WORLD
