"""DistributedOptimizer over real processes: what threads cannot show."""

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.optim import SGD

import fusionlayer as fl
from tests.harness import run_ranks
from tests.integrations.test_optimizer_results import CODECS, plan_of, sgd
from tests.integrations.training import assert_same_on_all_ranks, loss_of, make_model, reference, train, weights
from tests.ranks import on_processes

pytestmark = pytest.mark.medium


def trained(rank: int, steps: int = 3, **options: Any) -> torch.Tensor:
    model = make_model()
    optimizer: Any = fl.DistributedOptimizer(sgd(model.parameters()), model.named_parameters(), **options)
    train(model, optimizer, rank, range(steps))
    optimizer.close()
    return weights(model)


@on_processes(3)
def test_training(rank: int, world: int) -> None:
    """Every codec and planner: the same bits everywhere, near the training of one process."""
    start, exact = weights(make_model()), reference(world, 3, sgd)
    for options in [*CODECS, {"planner": "wfbp"}, {"groups": 2}, {"plan": plan_of(world, "int8")}]:
        result = trained(rank, **options)
        assert_same_on_all_ranks(result)
        distance = (result - exact).norm() / (exact - start).norm()
        assert distance < (0.25 if "int" in str(options) else 1e-5 if options.get("codec") != "bf16" else 0.05), options


@on_processes(2)
def test_overlap_with_the_next_forward(rank: int, world: int) -> None:
    """The next forward begins early: the same bits, and what is under way at a rank's end still reaches the others."""
    expected = trained(rank, 12, codec="int4", planner="wfbp")
    model = make_model()
    optimizer: Any = fl.DistributedOptimizer(
        sgd(model.parameters()), model.named_parameters(), codec="int4", planner="wfbp", overlap_forward=model
    )
    train(model, optimizer, rank, range(12))
    if rank:
        time.sleep(0.5)
        optimizer.synchronize()
    else:
        fl.shutdown()
    assert torch.equal(weights(model), expected)


@on_processes(3)
def test_dynamic_graphs_scaler_and_two_optimizers(rank: int, world: int) -> None:
    """Ranks take other paths, scaled, clipped, over two optimizers at once, one of them over some of the ranks."""
    pair = dist.new_group([0, 1])
    model, other = make_model(), make_model(torch.bfloat16)
    optimizer: Any = fl.DistributedOptimizer(sgd(model.parameters()), model.named_parameters(), codec="int8")
    second: Any = None
    if rank < 2:
        second = fl.DistributedOptimizer(sgd(other.parameters()), other.named_parameters(), group=pair)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    for step in range(4):
        optimizer.zero_grad()
        loss = model[0].weight.square().sum() if step % world == rank else loss_of(model, rank, step)
        scaler.scale(loss).backward()
        if second is not None:
            second.zero_grad()
            loss_of(other, rank, step).backward()
            second.step()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
    assert_same_on_all_ranks(weights(model))
    if rank < 2:
        expected = reference(2, 4, sgd, torch.bfloat16)
        assert torch.equal(weights(other), expected)


def check_fsdp(rank: int, world: int) -> str:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    for layer in model:
        fully_shard(layer, mesh=dist.init_device_mesh("cpu", (world,)))
    with pytest.raises(fl.ConfigError) as error:
        fl.DistributedOptimizer(SGD(model.parameters(), lr=0.1), model.named_parameters())
    return str(error.value)


def test_sharded_parameters_are_refused() -> None:
    for message in run_ranks(check_fsdp, 2):
        assert "'0.weight' is sharded by FSDP" in message
        assert "fusionlayer.fsdp.compress(model)" in message
