"""A small model, data and a training loop: the same bits in every process and thread."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from tests.synthetic import gradient

FEATURES, HIDDEN, CLASSES = 24, 40, 5


def fill(module: nn.Module, stream: int = 0) -> None:
    """Give every parameter its own fixed values."""
    with torch.no_grad():
        for i, parameter in enumerate(module.parameters()):
            values = gradient(parameter.numel(), stream * 1000 + i)
            parameter.copy_(values.view(parameter.shape).to(parameter.dtype))


def make_model(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """Return a perceptron whose tensors have lengths that fit no block of any codec."""
    model = nn.Sequential(nn.Linear(FEATURES, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, CLASSES)).to(dtype)
    fill(model)
    return model


def make_batch(rank: int, step: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Return 4 examples (4, FEATURES) and targets (4, CLASSES) that no other rank and step has."""
    values = gradient(4 * (FEATURES + CLASSES), 7_000_000 + 1000 * step + rank).view(4, -1).to(dtype)
    return values[:, :FEATURES], values[:, FEATURES:]


def loss_of(model: nn.Module, rank: int, step: int) -> Tensor:
    """Return the loss of ``model`` on the rank's batch of that step."""
    x, y = make_batch(rank, step, next(model.parameters()).dtype)
    return ((model(x) - y) ** 2).mean()


def train(model: nn.Module, optimizer: Optimizer, rank: int, steps: Iterable[int]) -> None:
    """Take ordinary steps."""
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, rank, step).backward()
        optimizer.step()


def weights(model: nn.Module) -> Tensor:
    """Return all parameters, flat."""
    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])


def assert_same_on_all_ranks(mine: Tensor) -> None:
    """Compare a tensor over the ranks of the default process group."""
    every = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(every, mine)
    assert all(torch.equal(theirs, mine) for theirs in every)


def averaged(
    model: nn.Module,
    optimizer: Optimizer,
    world: int,
    steps: Iterable[int],
    loss: Callable[[Any, int, int], Tensor] = loss_of,
    clip: float | None = None,
) -> Tensor:
    """Return the weights of one process that takes ordinary steps with the mean loss of ``world`` ranks."""
    for step in steps:
        optimizer.zero_grad()
        for rank in range(world):
            (loss(model, rank, step) / world).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    return weights(model)


def reference(
    world: int,
    steps: int,
    make_optimizer: Callable[[Iterable[Tensor]], Optimizer],
    dtype: torch.dtype = torch.float32,
    **how: Any,
) -> Tensor:
    """Return the weights of one process that averages what ``world`` ranks would compute, in rank order."""
    model = how.pop("model", None) or make_model(dtype)
    optimizer = make_optimizer(model.parameters())
    for step in range(steps):
        totals = [torch.zeros(p.shape) for p in model.parameters()]
        for rank in range(world):
            optimizer.zero_grad()
            loss_of(model, rank, step).backward()
            for total, parameter in zip(totals, model.parameters(), strict=True):
                assert parameter.grad is not None
                total += (parameter.grad * (1 / world)).float()
        for total, parameter in zip(totals, model.parameters(), strict=True):
            parameter.grad = total.to(dtype)
        optimizer.step()
    return weights(model)
