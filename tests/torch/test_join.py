"""Ranks with fewer batches: ``join`` stands in for them in the steps of optimizers."""

from __future__ import annotations

import signal
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fusionlayer.torch as hvd
from fusionlayer.transport import local
from tests.harness import checkpoint, outcomes_of, run_ranks


def over_ranks(size: int, body: Callable[[int], Any]) -> list[Any]:
    def rank_main(rank: int) -> Any:
        hvd.init()
        try:
            return body(rank)
        finally:
            hvd.shutdown()

    return local.run(rank_main, size, timeout=30)


def make_model() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    for i, p in enumerate(model.parameters()):
        p.data = torch.randn(p.shape, generator=torch.Generator().manual_seed(i))
    return model


def loss_of(model: nn.Module, rank: int, batch: int) -> Tensor:
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(100 * rank + batch))
    return model(x).square().mean()


def oracle(batches: list[int], passes: int = 1, average: bool = True) -> nn.Module:
    """Train on one rank: ranks that have no batches left count as zeros, and the average is still over all."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    for step in range(max(batches) // passes):
        optimizer.zero_grad()
        for rank, count in enumerate(batches):
            for batch in range(step * passes, min((step + 1) * passes, count)):
                (loss_of(model, rank, batch) / (len(batches) if average else 1)).backward()
        optimizer.step()
    return model


def distributed(model: nn.Module, **options: Any) -> Any:
    sgd = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    return hvd.DistributedOptimizer(sgd, model.named_parameters(), **options)


def train(model: nn.Module, optimizer: Any, batches: int, passes: int = 1) -> None:
    for batch in range(batches):
        if batch % passes == 0:
            optimizer.zero_grad()
        loss_of(model, hvd.rank(), batch).backward()
        if batch % passes == passes - 1:
            optimizer.step()


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "sum": {"op": hvd.Sum},
    "accumulated": {"backward_passes_per_step": 2},
    "overlapping": {"overlap_forward": True},
    "int8": {"compression": hvd.Compression.int8},
    "onebit": {"compression": hvd.Compression.onebit},
    "ahead": {"compression": hvd.Compression.topk(0.5)},
    "autotuned": {"autotune": True},
}


@pytest.mark.short
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("batches", [(2, 6, 4), (0, 2, 8)])
def test_uneven_numbers_of_steps(name: str, batches: tuple[int, ...]) -> None:
    options = OPTIONS[name]
    passes = options.get("backward_passes_per_step", 1)

    def body(rank: int) -> tuple[int, nn.Module, int, list[Tensor]]:
        model = make_model()
        given = {**options, "overlap_forward": model} if "overlap_forward" in options else options
        optimizer = distributed(model, **given)
        train(model, optimizer, batches[rank], passes)
        last = hvd.join()
        trained = make_model()
        trained.load_state_dict(model.state_dict())
        hvd.broadcast_parameters(model.state_dict(), root_rank=last)
        hvd.broadcast_optimizer_state(optimizer, root_rank=last)
        train(model, optimizer, 2 * passes, passes)
        step = optimizer.state_dict()["fusionlayer"]["step"]
        optimizer.close()
        return last, trained, step, [p.detach().clone() for p in model.parameters()]

    found = over_ranks(3, body)
    longest = batches.index(max(batches))
    assert [last for last, *_ in found] == [longest] * 3
    assert [step for _, _, step, _ in found] == [max(batches) // passes + 2] * 3
    for p, q, r in zip(*(parameters for *_, parameters in found), strict=True):
        assert torch.equal(p, q) and torch.equal(q, r)
    if "compression" not in options or name == "int8":
        close = 1e-5 if name != "int8" else 0.03
        expected = oracle(list(batches), passes, average=options.get("op") is not hvd.Sum)
        for p, q in zip(found[longest][1].parameters(), expected.parameters(), strict=True):
            torch.testing.assert_close(p, q, atol=close, rtol=close)


@pytest.mark.short
def test_operations_several_optimizers_and_steps_that_were_only_begun() -> None:
    def body(rank: int) -> list[int]:
        ends = []
        first, second = make_model(), make_model()
        one, two = distributed(first), distributed(second, compression=hvd.Compression.fp16)
        for _ in range(2):
            for batch in range(2 * rank):
                one.zero_grad()
                two.zero_grad()
                (loss_of(first, rank, batch) + loss_of(second, rank, batch)).backward()
                # The second's gradients come first, and the first is waited for first.
                one.synchronize()
                hvd.allreduce(torch.ones(1), name="between")
                with one.skip_synchronize():
                    one.step()
                two.step()
            if rank != 1:  # a step is begun, by some gradients or all; nobody ends it
                half = first[1](torch.ones(1, 8)).sum() if rank == 0 else loss_of(first, rank, 0)
                half.backward()
                loss_of(second, rank, 0).backward()
            ends.append(hvd.join())
            ends.append(one.state_dict()["fusionlayer"]["step"])
            ends.append(two.state_dict()["fusionlayer"]["step"])
            hvd.barrier()
        one.close()
        two.close()
        return ends

    for ends in over_ranks(3, body):
        assert ends[1:3] == [5, 5] and ends[4:] == [10, 10]


@pytest.mark.short
def test_process_sets() -> None:
    def body(rank: int) -> int:
        few = hvd.add_process_set([0, 2])
        model = make_model()
        optimizer = distributed(model, process_set=few)
        other = distributed(make_model())
        with suppress(IndexError):
            train(model, optimizer, 1 + rank)
        hvd.join()
        step = optimizer.state_dict().get("fusionlayer", {"step": -1})["step"]
        assert "fusionlayer" in other.state_dict() and other.state_dict()["fusionlayer"]["step"] == 0
        optimizer.close()
        other.close()
        return int(step)

    assert over_ranks(3, body) == [3, -1, 3]
