"""Gradients of the differentiable operations, compared with finite differences of the losses of all ranks."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fusionlayer as fl
import fusionlayer.torch as hvd
from fusionlayer.transport import local
from tests.loops import looped

H = 1e-5
COLUMNS = 2
Operation = Callable[[list[Tensor], Any], Any]

# By the objective of the gradient, as the docstrings and docs/horovod.md state it.
SUM_OF_LOSSES: dict[str, Operation] = {
    "sum": lambda x, s: hvd.allreduce(x[0], op=hvd.Sum, process_set=s),
    "average": lambda x, s: hvd.allreduce(x[0], process_set=s),
    "scaled sum": lambda x, s: hvd.allreduce(
        x[0], op=hvd.Sum, prescale_factor=0.5, postscale_factor=3.0, process_set=s
    ),
    "scaled average": lambda x, s: hvd.allreduce(x[0], prescale_factor=0.5, postscale_factor=3.0, process_set=s),
    "grouped sum": lambda x, s: hvd.grouped_allreduce(x, op=hvd.Sum, process_set=s),
    "grouped average": lambda x, s: hvd.grouped_allreduce(x, postscale_factor=3.0, process_set=s),
    "exact codec": lambda x, s: hvd.allreduce(x[0].float(), compression=hvd.Compression.zip, process_set=s).double(),
    "even alltoall": lambda x, s: hvd.alltoall(x[0][: 2 * s.size()], process_set=s),
    "alltoall": lambda x, s: hvd.alltoall(
        x[0], [s.rank(), *[1] * (s.size() - 2), 6 - s.rank() - s.size() + 2], process_set=s
    )[0],
}
MEAN_OF_LOSSES: dict[str, Operation] = {
    "allgather": lambda x, s: hvd.allgather(x[0][: 1 + 2 * s.rank()], process_set=s),
    "allgather of no rows": lambda x, s: hvd.allgather(x[0][: s.rank()], process_set=s),
    "allgather of scalars": lambda x, s: hvd.allgather(x[0].sum(), process_set=s),
    "grouped allgather": lambda x, s: hvd.grouped_allgather([x[0][s.rank() :], x[1]], process_set=s),
    "broadcast": lambda x, s: hvd.broadcast(x[0], s.ranks[-1] if s.ranks else 1, process_set=s),
}
TIMES_RANKS: dict[str, Operation] = {
    "reducescatter of a sum": lambda x, s: hvd.reducescatter(x[0][:5], op=hvd.Sum, process_set=s),
    "reducescatter of an average": lambda x, s: hvd.reducescatter(x[0][:5], process_set=s),
    "scaled reducescatter": lambda x, s: hvd.reducescatter(
        x[0], prescale_factor=0.5, postscale_factor=3.0, process_set=s
    ),
    "grouped reducescatter": lambda x, s: hvd.grouped_reducescatter(x, op=hvd.Sum, prescale_factor=3.0, process_set=s),
}


def given(rank: int, seed: int = 0) -> list[Tensor]:
    """Return a rank's inputs; the second is not contiguous."""
    generator = torch.Generator().manual_seed(10 * seed + rank)
    x, y = (torch.randn(rows, COLUMNS, generator=generator, dtype=torch.float64) for rows in (6, 3))
    return [x, y.t().contiguous().t()]


def loss_of(operation: Operation, inputs: list[Tensor], members: Any, rank: int) -> Tensor:
    """Return this rank's loss: no linear function of the results, and another one on each rank."""
    results = operation(inputs, members)
    results = results if isinstance(results, list) else [results]
    # t(): the gradient of the result is not contiguous.
    losses = [((rank + i + 2) * y.t() + y.t().square()).sin().sum() for i, y in enumerate(results)]
    return torch.stack(losses).sum()


def differences(operation: Operation, members: Any, rank: int, ranks: list[int], step: float) -> list[list[float]]:
    """Return by which the losses of all ranks change, where one rank's inputs move: for each rank and input."""
    found = []
    for moved in ranks:
        for i in range(2):
            ends = []
            for sign in (1, -1):
                inputs = given(rank)
                if rank == moved:
                    inputs[i] = inputs[i] + sign * step * given(rank, seed=1)[i]
                with torch.no_grad():
                    ends.append(loss_of(operation, inputs, members, rank))
            change = hvd.allreduce((ends[0] - ends[1]) / (2 * step), op=hvd.Sum, process_set=members)
            found.append(float(change))
    return [found[2 * k : 2 * k + 2] for k in range(len(ranks))]


def check(operation: Operation, members: Any, rank: int, ranks: list[int], factor: float, step: float) -> None:
    expected = differences(operation, members, rank, ranks, step)[ranks.index(rank)]
    inputs = [x.requires_grad_() for x in given(rank)]
    loss_of(operation, inputs, members, rank).backward()
    for x, direction, change in zip(inputs, given(rank, seed=1), expected, strict=True):
        found = 0.0 if x.grad is None else float((x.grad * direction).sum())
        assert found == pytest.approx(factor * change, rel=1e-3 if step > H else 1e-6, abs=1e-4 if step > H else 1e-7)


def over_ranks(world: int, body: Callable[[int, Any, list[int]], None], chosen: list[int] | None = None) -> None:
    """Run ``body`` with its rank, the process set and the set's ranks, on each of ``chosen``."""

    def rank_main(rank: int) -> None:
        hvd.init()
        try:
            members = hvd.add_process_set(chosen) if chosen else hvd.global_process_set
            if rank in (ranks := chosen or list(range(world))):
                body(rank, members, ranks)
        finally:
            hvd.shutdown()

    local.run(rank_main, world, timeout=120)


@looped("world, chosen", [(2, None), (3, None), (3, [0, 2])])
def test_gradients_are_those_of_the_stated_objective(world: int, chosen: list[int] | None) -> None:
    def body(rank: int, members: Any, ranks: list[int]) -> None:
        size = len(ranks)
        for factor, operations in ((1, SUM_OF_LOSSES), (1 / size, MEAN_OF_LOSSES), (size, TIMES_RANKS)):
            for name, operation in operations.items():
                print(name)
                # The codec takes f32 at most, so differences are coarse.
                check(operation, members, rank, ranks, factor, 1e-2 if "codec" in name else H)

    over_ranks(world, body, chosen)


@looped("op", [hvd.Max, hvd.Min, hvd.Product, hvd.Adasum])
def test_a_reduction_without_a_gradient_refuses_backward(op: Any) -> None:
    """The value is right with and without a graph; only backward through it raises."""

    def body(rank: int, members: Any, ranks: list[int]) -> None:
        operations: list[Operation] = [
            lambda x, s: hvd.allreduce(x[0], op=op),
            lambda x, s: hvd.grouped_allreduce(x, op=op),
        ]
        if op is not hvd.Adasum:
            operations += [
                lambda x, s: hvd.reducescatter(x[0], op=op),
                lambda x, s: hvd.grouped_reducescatter(x, op=op),
            ]
        for operation in operations:
            plain = loss_of(operation, given(rank), members, rank)
            inputs = [x.requires_grad_() for x in given(rank)]
            loss = loss_of(operation, inputs, members, rank)
            assert torch.equal(loss, plain)
            with pytest.raises(fl.UsageError, match=rf"op={op.name} has no gradient; .*detach\(\)"):
                loss.backward()
            assert all(x.grad is None for x in inputs)

    over_ranks(2, body)


def test_the_page_states_every_objective() -> None:
    for operation in (hvd.allreduce, hvd.allgather, hvd.broadcast, hvd.alltoall, hvd.reducescatter):
        assert operation.__doc__ is not None and "\n    Gradient: " in operation.__doc__
