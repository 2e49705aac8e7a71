"""Operations of all kinds, asked for in another order on every rank, beside an oracle of one process."""

from __future__ import annotations

import gc
import random
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fusionlayer.torch as hvd
from fusionlayer.transport import local
from tests.tiers import exhaustive, long

AT_ONCE = 250
RANKS = 3

DTYPES = (torch.float32, torch.float64, torch.int32, torch.int64, torch.bfloat16, torch.uint8)


class Wanted:
    """One operation, as every rank can work it out by itself."""

    def __init__(self, number: int) -> None:
        choice = random.Random(number)
        self.number = number
        # Some names come again and again, others once.
        self.name = f"again.{number % AT_ONCE}" if choice.random() < 0.7 else f"once.{number}"
        self.kind = choice.choice(("allreduce", "allreduce_", "min", "group", "allgather", "broadcast", "scatter"))
        self.dtype = choice.choice(DTYPES)
        self.shape = tuple(choice.randint(0, 6) for _ in range(choice.randint(1, 3)))
        self.root = choice.randrange(RANKS)

    def given(self, rank: int) -> Tensor:
        rows = (self.number + rank) % 4 if self.kind == "allgather" else self.shape[0]
        shape = torch.Size((rows, *self.shape[1:]))
        return ((torch.arange(shape.numel()) * 3 + rank * 5 + self.number) % 11).view(shape).to(self.dtype)

    def begin(self, rank: int) -> Callable[[], Any]:
        x, name = self.given(rank), self.name
        handle = {
            "allreduce": lambda: hvd.allreduce_async(x, name=name, op=hvd.Sum),
            "allreduce_": lambda: hvd.allreduce_async_(x, name=name, op=hvd.Sum),
            "min": lambda: hvd.allreduce_async(x, name=name, op=hvd.Min),
            "group": lambda: hvd.grouped_allreduce_async([x, x + 1], name=name, op=hvd.Sum),
            "allgather": lambda: hvd.allgather_async(x, name=name),
            "broadcast": lambda: hvd.broadcast_async(x, self.root, name=name),
            "scatter": lambda: hvd.reducescatter_async(x, name=name, op=hvd.Sum),
        }[self.kind]()
        return lambda: hvd.synchronize(handle)

    def expected(self, rank: int) -> list[Tensor]:
        every = [self.given(r) for r in range(RANKS)]
        if self.kind == "allgather":
            return [torch.cat(every)]
        if self.kind == "broadcast":
            return [every[self.root]]
        if self.kind == "min":
            return [torch.stack(every).amin(0)]
        total = torch.stack(every).sum(0).to(self.dtype)
        if self.kind == "scatter":
            each, rest = divmod(len(total), RANKS)
            start = rank * each + min(rank, rest)
            return [total[start : start + each + (rank < rest)]]
        return [total, total + RANKS] if self.kind == "group" else [total]


def body(rank: int, operations: int) -> int:
    hvd.init()
    order = random.Random(1000 + rank)
    for first in range(0, operations, AT_ONCE):
        wanted = [Wanted(number) for number in range(first, first + AT_ONCE)]
        order.shuffle(wanted)
        begun = [(each, each.begin(rank)) for each in wanted]
        order.shuffle(begun)
        for each, wait in begun:
            found = wait()
            expected = each.expected(rank)
            for x, y in zip(found if isinstance(found, list) else [found], expected, strict=True):
                assert x.dtype == y.dtype and torch.equal(x, y), f"{each.kind} {each.name} {each.dtype} {each.shape}"
    here = hvd.basics.session()
    assert here.pending == 0 and not here._table._running and not here._table._asked
    hvd.barrier()
    coordinator = here._coordinator
    if coordinator is not None:
        matcher = coordinator._matcher
        assert not (matcher._waiting or matcher._later or matcher._ready or matcher._failed)
    hvd.shutdown()
    return operations


@pytest.mark.medium
@exhaustive(guarded_by="tests/torch/test_behaviours.py::test_behaviour")
@pytest.mark.parametrize("operations", [1000, pytest.param(10_000, marks=long)])
def test_operations_in_any_order(monkeypatch: pytest.MonkeyPatch, operations: int) -> None:
    monkeypatch.setenv("HOROVOD_CACHE_CAPACITY", "500")
    before = set(threading.enumerate())
    assert local.run(lambda rank: body(rank, operations), RANKS) == [operations] * RANKS
    gc.collect()
    assert not set(threading.enumerate()) - before
    assert not hvd.basics._sessions
