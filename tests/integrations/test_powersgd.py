"""Training with gradients of low rank: resumed, fused in any way, and in many buckets over processes."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

import fusionlayer as fl
from tests.integrations.training import assert_same_on_all_ranks, fill, make_model, train, weights
from tests.ranks import on_processes, on_ranks

POWERSGD: dict[str, Any] = {"codec": "powersgd", "rank": 2}


def make_pair(overlap: bool = False, **options: Any) -> tuple[nn.Module, Any]:
    model = make_model()
    if overlap:
        options["overlap_forward"] = model
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    return model, fl.DistributedOptimizer(optimizer, model.named_parameters(), **POWERSGD | options)


@on_ranks(2)
def test_factors_are_kept_once_the_warm_up_is_over(rank: int) -> None:
    model, optimizer = make_pair(warmup_steps=2)
    for step in range(4):
        train(model, optimizer, rank, [step])
        kept = optimizer.state_dict()["fusionlayer"]["tensors"]
        assert set(kept) == ({"0.weight", "2.weight"} if step >= 2 else set())
    assert {bucket.algorithm for bucket in optimizer.fusion_plan.buckets} == {"low_rank"}


@on_ranks(3)
def test_results_do_not_depend_on_what_travels_together(rank: int) -> None:
    """One bucket, a bucket for each tensor, two lanes or one, or another plan from the third step on: the same bits."""
    found = []
    for planner in ("wfbp", "horovod"):
        model, optimizer = make_pair(planner=planner)
        train(model, optimizer, rank, range(4))
        found.append(weights(model))
        plan = optimizer.fusion_plan
        assert len(plan.buckets) == (4 if planner == "wfbp" else 1)
        optimizer.close()
    model, optimizer = make_pair(planner="wfbp")
    train(model, optimizer, rank, range(2))
    optimizer.reducer.engine.switch(plan)
    train(model, optimizer, rank, range(2, 4))
    optimizer.close()
    assert torch.equal(*found) and torch.equal(weights(model), found[0])


@pytest.mark.medium
@on_processes(2)
def test_many_buckets_over_processes(rank: int, world: int) -> None:
    """What aborts torch's own hook over gloo: a bucket for each tensor, several of them under way at once."""
    fl.init()

    def deep() -> nn.Sequential:
        model = nn.Sequential(make_model()[0], *[nn.Linear(40, 40) for _ in range(6)], make_model()[2])
        fill(model)
        return model

    def optimized(**options: Any) -> Tensor:
        model = deep()
        optimizer: Any = fl.DistributedOptimizer(
            SGD(model.parameters(), lr=0.05), model.named_parameters(), planner="wfbp", **options
        )
        train(model, optimizer, rank, range(6))
        assert len(optimizer.fusion_plan.buckets) == 16
        optimizer.close()
        return weights(model)

    def in_ddp(**options: Any) -> Tensor:
        model = DistributedDataParallel(deep(), bucket_cap_mb=0.0005)
        hook = fl.ddp.register(model, **options)
        train(model, SGD(model.parameters(), lr=0.05), rank, range(6))
        assert hook.fusion_plan is not None and len(hook.fusion_plan.buckets) >= 8
        hook.close()
        return weights(model)

    start, raw = weights(deep()), optimized(codec="raw")
    for trained in (optimized, in_ddp):
        found = trained(codec="powersgd", rank=2, min_compression_rate=1.0)
        assert_same_on_all_ranks(found)
        assert (found - raw).norm() < 0.5 * (raw - start).norm(), trained
    fl.shutdown()
