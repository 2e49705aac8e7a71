"""Ranks with fewer batches: ``join`` stands in for them in the steps of optimizers."""

import signal
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fusionlayer.torch as hvd
from fusionlayer.transport import local
from tests.harness import checkpoint, outcomes_of
from tests.integrations.training import FEATURES, HIDDEN, loss_of, make_model
from tests.loops import looped


def over_ranks(size: int, body: Callable[[int], Any]) -> list[Any]:
    def rank_main(rank: int) -> Any:
        hvd.init()
        try:
            return body(rank)
        finally:
            hvd.shutdown()

    return local.run(rank_main, size)


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
}


@looped("name", OPTIONS)
@looped("batches", [(2, 6, 4), (0, 2, 8)])
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


def test_operations_several_optimizers_and_steps_that_were_only_begun() -> None:
    def body(rank: int) -> list[int]:
        ends = []
        first, second = make_model(), make_model()
        two, one = distributed(second, compression=hvd.Compression.fp16), distributed(first)
        for _ in range(2):
            for batch in range(2 * rank):
                one.zero_grad()
                two.zero_grad()
                (loss_of(first, rank, batch) + loss_of(second, rank, batch)).backward()
                # Ranks wait for the one that was made last.
                one.synchronize()
                hvd.allreduce(torch.ones(1), name="between")
                with one.skip_synchronize():
                    one.step()
                two.step()
            if rank != 1:  # a step is begun, by some gradients or all; nobody ends it
                half = first[2](torch.ones(1, HIDDEN)).sum() if rank == 0 else loss_of(first, rank, 0)
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


def test_a_step_that_only_the_first_rank_to_join_has_begun() -> None:
    def body(rank: int) -> int:
        model = make_model()
        optimizer = distributed(model)
        before = [p.detach().clone() for p in model.parameters()]
        if rank == 0:
            model(torch.ones(1, FEATURES)).sum().backward()
        else:
            hvd.allreduce(torch.ones(1), name="not.by.rank.0")  # it is done when rank 0 has joined
        hvd.join()
        assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
        step = optimizer.state_dict()["fusionlayer"]["step"]
        optimizer.zero_grad()  # which nothing under way forbids
        optimizer.close()
        return int(step)

    assert over_ranks(2, body) == [1, 1]


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


class Ranker(nn.Module):
    """A table whose gradient is sparse, and a layer whose gradient is not."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 3, sparse=sparse)
        self.layer = nn.Linear(3, 1)
        for i, p in enumerate(self.parameters()):
            p.data = torch.randn(p.shape, generator=torch.Generator().manual_seed(i))

    def loss(self, rank: int, batch: int) -> Tensor:
        rows = torch.tensor([rank, batch % 7, batch % 7])
        if (rank + batch) % 3 == 2:  # no gradient for the table
            return self.layer(torch.ones(1, 3)).square().sum()  # type: ignore[no-any-return]
        return self.layer(self.table(rows)).square().sum()  # type: ignore[no-any-return]


@looped("batches", [(3, 3, 3), (2, 4, 0)])
@looped("op", [hvd.Average, hvd.Sum])
@looped("passes", [1, 2])
def test_sparse_gradients_are_gathered(batches: tuple[int, ...], op: Any, passes: int) -> None:
    def body(rank: int) -> tuple[list[Tensor], list[str]]:
        model = Ranker(sparse=True)
        table = hvd.DistributedOptimizer(torch.optim.SparseAdam([model.table.weight], lr=0.1), op=op)
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        table.close()
        both = hvd.DistributedOptimizer(sgd, model.named_parameters(), op=op, backward_passes_per_step=passes)
        for step in range(batches[rank]):
            both.zero_grad()
            for i in range(passes):
                model.loss(rank, step * passes + i).backward()
            if step == 0 and passes == 1 and model.table.weight.grad is not None:
                with pytest.raises(AssertionError, match="zero_grad"):
                    both.zero_grad()
            both.synchronize()
            assert model.table.weight.grad is not None and model.table.weight.grad.is_sparse
            with both.skip_synchronize():
                both.step()
        hvd.join()
        names = [name for bucket in both.fusion_plan.buckets for name in bucket.names]
        both.close()
        return [p.detach() for p in model.parameters()], names

    found = over_ranks(3, body)
    expected = Ranker(sparse=False)
    plain = torch.optim.SGD(expected.parameters(), lr=0.1)
    for step in range(max(batches)):
        plain.zero_grad()
        for rank in range(3):
            for i in range(passes if step < batches[rank] else 0):
                (expected.loss(rank, step * passes + i) / (3 if op is hvd.Average else 1)).backward()
        plain.step()
    parameters, names = found[batches.index(max(batches))]
    assert sorted(names) == ["layer.bias", "layer.weight"]  # the table is in no bucket
    for p, q in zip(parameters, expected.parameters(), strict=True):
        torch.testing.assert_close(p, q)


@looped("passes", [1, 2])
def test_a_table_that_is_unfrozen_later_is_gathered(passes: int) -> None:
    def training(model: Ranker, optimizer: Any, losses: Callable[[int], list[Tensor]]) -> list[Tensor]:
        for step in range(4):
            model.table.weight.requires_grad_(step > 1)
            optimizer.zero_grad()
            for loss in losses(step):
                loss.backward()
            optimizer.step()
        return [p.detach() for p in model.parameters()]

    def body(rank: int) -> list[Tensor]:
        model = Ranker(sparse=True)
        model.table.weight.requires_grad_(False)
        optimizer = distributed(model, backward_passes_per_step=passes)
        found = training(model, optimizer, lambda step: [model.loss(rank, step * passes + i) for i in range(passes)])
        assert optimizer.reducer.sparse.gathered == {"table.weight"}
        optimizer.close()
        return found

    model = Ranker(sparse=False)
    plain = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    expected = training(
        model, plain, lambda step: [model.loss(rank, step * passes + i) / 2 for rank in (0, 1) for i in range(passes)]
    )
    for found in over_ranks(2, body):
        for p, q in zip(found, expected, strict=True):
            torch.testing.assert_close(p, q)


def test_an_optimizer_of_sparse_gradients_alone_and_what_cannot_be() -> None:
    def body(rank: int) -> Tensor:
        model = Ranker(sparse=True)
        optimizer: Any = hvd.DistributedOptimizer(torch.optim.SparseAdam([model.table.weight], lr=0.1))
        for batch in range(3 if rank else 2):
            optimizer.zero_grad()
            (model.table(torch.tensor([rank, batch])).sum() * (rank + 1)).backward()
            optimizer.step()
        hvd.broadcast_parameters(model.state_dict(), root_rank=hvd.join())
        assert optimizer.state_dict()["fusionlayer"]["step"] == 3 and not optimizer.fusion_plan.buckets
        optimizer.close()
        late = distributed(model)
        model.layer(torch.ones(1, 3)).sum().backward()
        late.step()
        model.table(torch.tensor([rank])).sum().backward()
        late.step()
        assert not model.table.weight.grad.is_sparse  # type: ignore[union-attr]
        late.close()
        planned = distributed(model, planner="safusion")
        planned.zero_grad()
        with pytest.raises(ValueError, match=r"sparse_as_dense=True.*leave out plan, overlap_forward"):
            model.table(torch.tensor([rank])).sum().backward()
        planned.close()
        return model.table.weight.detach()

    found = over_ranks(2, body)
    assert not torch.equal(found[0], Ranker(sparse=True).table.weight)


def lose(rank: int, world: int) -> None:
    hvd.init()
    model = make_model()
    optimizer = distributed(model)
    train(model, optimizer, [3, 0, 6][rank])
    last = hvd.join()
    hvd.broadcast_parameters(model.state_dict(), root_rank=last)
    for p, q in zip(model.parameters(), oracle([3, 0, 6]).parameters(), strict=True):
        torch.testing.assert_close(p, q)
    try:
        if rank == 0:
            hvd.join()
        train(model, optimizer, 2)
        if rank == 1:
            checkpoint("now")
        train(model, optimizer, 1000)
    except hvd.HorovodInternalError as error:
        raise RuntimeError(f"join: {error}") from error


@pytest.mark.medium
def test_processes_one_of_which_is_killed_while_another_stands_in() -> None:
    found = outcomes_of(lose, 3, signals={(1, "now"): signal.SIGKILL})
    assert [outcome.kind for outcome in found] == ["raised", "died", "raised"], found
    assert "join: " in found[0].error[1] and "rank 1" in found[0].error[1]
    assert found[2].error[0] == "TransportError" and "rank 1" in found[2].error[1]
