"""Mixtures of experts over ranks that are processes: torch.compile, shared weights beside experts, lost peers."""

import signal

import pytest
import torch
from torch import Tensor, nn

import fusionlayer as fl
from tests.harness import checkpoint, outcomes_of, run_ranks
from tests.integrations.training import fill
from tests.ranks import on_processes
from tests.synthetic import gradient
from tests.tiers import exhaustive

pytestmark = pytest.mark.medium

WIDTH, TOKENS, PER_RANK = 16, 24, 2


class Mixture(nn.Module):
    def __init__(self, codec: str) -> None:
        super().__init__()
        dispatcher = fl.moe.Dispatcher(codec=codec)
        self.shared = nn.Linear(WIDTH, WIDTH)
        self.router = nn.Linear(WIDTH, PER_RANK * dispatcher.size)
        experts = [nn.Linear(WIDTH, WIDTH) for _ in range(PER_RANK)]
        fill(self)
        for number, expert in enumerate(experts):
            fill(expert, 10 + PER_RANK * dispatcher.rank + number)
        self.experts = fl.moe.Experts(experts, dispatcher)

    def forward(self, x: Tensor) -> Tensor:
        x = self.shared(x)
        weights, indices = self.router(x).softmax(-1).topk(2)
        return x + self.experts(x, weights, indices)


def data(stream: int) -> Tensor:
    return gradient(TOKENS * WIDTH, 8000 + stream).view(TOKENS, WIDTH)


@exhaustive(guarded_by="tests/integrations/test_tensor_parallel_processes.py::test_operations_compile_as_one_graph")
@on_processes(2)
def test_a_compiled_model_is_the_same(rank: int, world: int) -> None:
    results = []
    for compiled in (False, True):
        model = Mixture("zip")
        forward = torch.compile(model, backend="aot_eager") if compiled else model
        for step in range(2):  # other numbers of tokens for each rank: sizes must not be baked in
            y = forward(data(10 * rank + step)[: TOKENS - step * rank])
            y.square().sum().backward()
        results.append([y.detach(), *(parameter.grad for parameter in model.parameters())])
    for one, other in zip(*results, strict=True):
        assert one is not None and other is not None
        torch.testing.assert_close(other, one)


def hold_shared(rank: int, world: int) -> list[list[float]]:
    """Return shared weights and this rank's experts after training beside DistributedOptimizer."""
    model = Mixture("zip")
    names = {name: parameter for name, parameter in model.named_parameters() if "experts" not in name}
    optimizers: list[torch.optim.Optimizer] = [
        fl.DistributedOptimizer(torch.optim.SGD(names.values(), lr=0.1), names.items(), codec="raw"),
        torch.optim.SGD(model.experts.parameters(), lr=0.1),
    ]
    for step in range(4):
        for optimizer in optimizers:
            optimizer.zero_grad()
        (model(data(100 * step + rank)) - data(50)).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
    return [parameter.detach().flatten().tolist() for parameter in [*names.values(), *model.experts.parameters()]]


def test_training_over_ranks_is_training_in_one_process() -> None:
    """One process that averages the losses of as many batches: the whole layer's gradients are scaled alike."""
    world = 2
    ranks = run_ranks(hold_shared, world)
    shared, router = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, PER_RANK * world)
    fill(nn.ModuleList([shared, router]))
    experts = [nn.Linear(WIDTH, WIDTH) for _ in range(PER_RANK * world)]
    for number, expert in enumerate(experts):
        fill(expert, 10 + number)
    parameters = [p for module in (shared, router, *experts) for p in module.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    for step in range(4):
        optimizer.zero_grad()
        for rank in range(world):
            x = shared(data(100 * step + rank))
            weights, indices = router(x).softmax(-1).topk(2)
            y = x
            for number, expert in enumerate(experts):
                y = y + (weights * (indices == number)).sum(1, keepdim=True) * expert(x)
            ((y - data(50)).square().mean() / world).backward()
        optimizer.step()
    common, each = parameters[:4], 2 * PER_RANK
    for rank, found in enumerate(ranks):
        mine = parameters[4 + rank * each : 4 + (rank + 1) * each]
        for ours, theirs in zip(found, [*common, *mine], strict=True):
            torch.testing.assert_close(torch.tensor(ours), theirs.detach().flatten())


def lose_a_peer(rank: int, world: int) -> None:
    fl.init()
    model = Mixture("zip")
    y = model(data(rank))
    checkpoint("backward")
    for _ in range(50):
        y.square().sum().backward()
        y = model(data(rank))


def test_a_lost_peer_is_named_in_backward() -> None:
    outcomes = outcomes_of(lose_a_peer, 3, signals={(1, "backward"): signal.SIGKILL})
    for rank in (0, 2):
        assert outcomes[rank].error[0] == "TransportError", outcomes[rank]
        assert "rank 1 is gone" in outcomes[rank].error[1]
