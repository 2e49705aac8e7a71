"""The communication hook of DistributedDataParallel, over real processes."""

import gc
import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

import fusionlayer as fl
from fusionlayer.scheduler import Memory
from tests.integrations.training import assert_same_on_all_ranks, loss_of, make_model, train, weights
from tests.ranks import on_processes
from tests.synthetic import gradient

pytestmark = pytest.mark.medium

SMALL_BUCKETS = {"bucket_cap_mb": 0.0005}  # 524 bytes: DDP's one bucket of the first step becomes several in the second


def make_ddp(codec: str | None = None, ddp: dict[str, Any] = SMALL_BUCKETS, **options: Any) -> tuple[Any, Any]:
    """Return a model in DDP, and the hook if there is a codec."""
    model = DistributedDataParallel(make_model(), **ddp)
    return model, fl.ddp.register(model, codec, **options) if codec else None


def total(mine: Tensor) -> Tensor:
    summed = mine.clone()
    dist.all_reduce(summed)
    return summed


@on_processes(3)
def test_training(rank: int, world: int) -> None:
    """As plain DDP does it: exactly for ``raw``, nearly for the rest, the same bits on all ranks always."""

    def trained(**options: Any) -> Tensor:
        model, hook = make_ddp(**options)
        train(model, SGD(model.parameters(), lr=0.1, momentum=0.9), rank, range(4))
        if hook:
            hook.close()
        return weights(model)

    start, plain = weights(make_model()), trained()
    for options, bound in [
        ({"codec": "raw"}, 1e-6),
        ({"codec": "raw", "ddp": {"gradient_as_bucket_view": True, **SMALL_BUCKETS}}, 1e-6),
        ({"codec": "raw", "ddp": {}}, 1e-6),
        ({"codec": "raw", "algorithm": "two_shot"}, 1e-6),
        ({"codec": "int8", "algorithm": "ring"}, 0.05),
        ({"codec": "int8", "algorithm": "butterfly"}, 0.05),
        ({"codec": "dynamiq", "algorithm": "ring"}, 0.15),
        ({"codec": "dynamiq", "bits": 8, "algorithm": "butterfly"}, 0.05),
        ({"codec": "bf16"}, 0.02),
        ({"codec": "int8", "ddp": {"gradient_as_bucket_view": True, **SMALL_BUCKETS}}, 0.05),
        ({"codec": "int4"}, 0.25),
        ({"codec": "int", "bits": 4, "rounding": "stochastic", "ddp": {"static_graph": True, **SMALL_BUCKETS}}, 0.25),
    ]:
        result = trained(**options)
        assert_same_on_all_ranks(result)
        assert (result - plain).norm() < bound * (plain - start).norm(), options


@on_processes(2)
def test_noise_is_new_in_every_bucket_and_step(rank: int, world: int) -> None:
    """The same gradients are rounded anew in each bucket and each step."""
    features = 64
    model = nn.Sequential(*(nn.Linear(features, 1, bias=False) for _ in range(2)))
    ddp = DistributedDataParallel(_SideBySide(model), bucket_cap_mb=1e-4)
    options = {"bits": 4, "rounding": "stochastic", "error_feedback": False}
    hook = fl.ddp.register(ddp, "int", **options)
    x = gradient(features, 40 + rank).view(1, features)
    drawn = []
    for _ in range(3):
        model.zero_grad()
        ddp(x).backward()
        drawn += [tuple(p.grad.view(-1).tolist()) for p in model.parameters() if p.grad is not None]
    hook.close()
    assert len(set(drawn)) == len(drawn) == 6


class _SideBySide(nn.Module):
    """Layers of the same input, whose gradients are equal."""

    def __init__(self, layers: nn.Sequential) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([layer(x).sum() for layer in self.layers]).sum()


@on_processes(3)
def test_error_feedback_survives_the_rebuilding_of_buckets_and_a_checkpoint(rank: int, world: int) -> None:
    """What was given to the hook is what came out plus what all ranks hold back, but for the rounding to 8 bits."""
    model, hook = make_ddp("int4", feedback_bits=8)
    alone = make_model()
    given = {name: torch.zeros_like(p) for name, p in alone.named_parameters()}
    came_out = {name: torch.zeros_like(p) for name, p in alone.named_parameters()}
    buckets = []

    def steps(numbers: range) -> None:
        for step in numbers:
            model.zero_grad()
            alone.zero_grad()
            loss_of(model, rank, step).backward()
            loss_of(alone, rank, step).backward()
            buckets.append(len(hook.fusion_plan.buckets))
            for name, parameter in alone.named_parameters():
                given[name] += total(parameter.grad) / world
                came_out[name] += model.module.get_parameter(name).grad

    def assert_nothing_is_lost() -> None:
        plain = Memory()
        plain.load_state_dict(hook.state_dict())
        held_back = plain.state_dict()["residuals"]
        assert hook.state_dict()["packed"]
        assert held_back.keys() == given.keys()
        for name in given:
            held = total(held_back[name]).view_as(given[name])
            assert held.abs().max() > 0
            slack = float(given[name].abs().max()) / 100
            torch.testing.assert_close(came_out[name] + held, given[name], rtol=1e-4, atol=slack)

    steps(range(1))
    assert_nothing_is_lost()
    steps(range(1, 5))
    assert buckets[0] == 1 and buckets[4] > 1, f"the layout was meant to change: {buckets}"
    assert_nothing_is_lost()

    saved = hook.state_dict()
    hook.close()
    model, hook = make_ddp("int4", feedback_bits=8)
    hook.load_state_dict(saved)
    assert hook.state_dict()["sent"] == saved["sent"] == sum(buckets)
    buckets.clear()
    steps(range(5, 8))
    assert_nothing_is_lost()


@on_processes(2)
def test_what_cannot_be_is_refused_on_every_rank(rank: int, world: int) -> None:
    with pytest.raises(fl.ConfigError, match="register got a Sequential; wrap the model in DistributedDataParallel"):
        fl.ddp.register(make_model())
    with pytest.raises(fl.ConfigError, match="did you mean 'int8'"):
        make_ddp("int88")
    with pytest.raises(fl.ConfigError, match="codec 'auto' chooses for the gradients of a DistributedOptimizer"):
        make_ddp("auto")
    with pytest.raises(fl.ConfigError, match="got planner='safusion'; DDP makes its own buckets"):
        make_ddp("int8", planner="safusion")
    with pytest.raises(fl.ConfigError, match="got fallback='raw'; DDP makes its own buckets"):
        make_ddp("int4", fallback="raw")
    with pytest.raises(fl.ConfigError, match="dense"):
        model, _ = make_ddp("int8", algorithm="dense")
        loss_of(model, rank, 0).backward()

    model, hook = make_ddp("raw")
    assert fl.ddp.register(model, "raw") is hook, "a callback registers in each training"
    with pytest.raises(fl.UsageError, match="has a hook, which has other arguments"):
        fl.ddp.register(model, "int8")
    loss_of(model, rank, 0).backward()
    hook.close()
    with pytest.raises(fl.FusionLayerError, match="closed"):
        loss_of(model, rank, 1).backward()
    with pytest.raises(fl.UsageError, match="has a hook, which was closed; DDP takes one hook for its life"):
        fl.ddp.register(model, "raw")

    plain = make_model()
    plain[0].bias.requires_grad_(False)
    model = DistributedDataParallel(plain)
    hook = fl.ddp.register(model, "int8")
    loss_of(model, rank, 0).backward()
    plain[0].bias.requires_grad_(True)
    with pytest.raises(fl.UsageError, match="gradient '0.bias' is not reduced.*wrap the model and register"):
        loss_of(model, rank, 1).backward()
    plain[0].bias.requires_grad_(False)
    plain[0].bias.grad = None
    loss_of(model, rank, 2).backward()
    hook.close()

    for odd in (
        {"codec": "int8"},
        {"codec": "int4", "rounding": "stochastic"},
        {"codec": "int4", "algorithm": "two_shot"},
    ):
        model, _ = make_ddp(**(odd if rank == 1 else {"codec": "int4", "algorithm": "one_shot"}))
        with pytest.raises(fl.PlanMismatch, match="differs over ranks") as error:
            loss_of(model, rank, 0).backward()
        assert error.value.ranks == (1,)
        with pytest.raises(fl.PlanMismatch):
            loss_of(model, rank, 1).backward()
    with pytest.raises(fl.PlanMismatch, match="rank 0 has check_replicas=4, rank 1 has check_replicas=5"):
        make_ddp("raw", check_replicas=4 + rank)
    model, hook = make_ddp("raw", check_replicas=4)
    train(model, SGD(model.parameters(), lr=0.1), rank, range(3))
    if rank == 1:
        model.module[2].bias.data[3] += 1e-3
    with pytest.raises(fl.ReplicaMismatch, match="1 of 4 parameters differ over ranks: '2.bias' on ranks 0, 1;"):
        train(model, SGD(model.parameters(), lr=0.1), rank, range(3, 7))
    hook.close()


@on_processes(2)
def test_a_hook_that_nobody_closes_leaves_no_threads(rank: int, world: int) -> None:
    """A backward that fails on every rank; nobody closes the hook."""
    before = set(threading.enumerate())

    def fail(gradient: Tensor) -> Tensor:
        raise ValueError("a mistake in the model")

    def attempt() -> set[threading.Thread]:
        model, _ = make_ddp(codec="int8")
        next(model.parameters()).register_hook(fail)
        with pytest.raises(ValueError, match="a mistake"):
            loss_of(model, rank, 0).backward()
        new = set(threading.enumerate()) - before
        return {thread for thread in new if thread.name.startswith("fusionlayer") and "heartbeat" not in thread.name}

    ours = attempt()
    assert ours, "the hook has no threads"
    gc.collect()
    for thread in ours:
        thread.join(180)
        assert not thread.is_alive(), thread.name
