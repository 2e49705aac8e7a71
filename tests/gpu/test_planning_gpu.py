"""Planning by what a GPU tells of its steps: two processes share it, and their messages go by gloo."""

from typing import Any

import pytest
import torch

import fusionlayer as fl
from tests.gpu.test_processes_gpu import losses, make_model, prepare, same_everywhere
from tests.harness import run_ranks

pytestmark = pytest.mark.medium


def with_planning(rank: int, world: int, options: dict[str, Any]) -> tuple[int, float]:
    """Return the number of buckets in the end, and the seconds of backward that were measured."""
    device = prepare()
    model = make_model(device)
    optimizer: Any = fl.DistributedOptimizer(
        torch.optim.AdamW(model.parameters(), lr=5e-3), model.named_parameters(), **options
    )
    losses(model, optimizer, rank, device)
    assert same_everywhere(list(model.parameters()))
    profile, buckets = optimizer.cost_profile, len(optimizer.fusion_plan.buckets)
    optimizer.close()
    assert profile.machine.device == "cuda" and profile.codecs["raw"].encode(1 << 20) > 0
    ready = [tensor.ready for tensor in profile.model.tensors]
    assert ready == sorted(ready) and ready[0] == 0
    return buckets, profile.model.backward


@pytest.mark.parametrize("options", [{"codec": "raw", "planner": "safusion"}, {"codec": "auto"}], ids=str)
def test_plans_are_made_by_the_time_of_the_device(options: dict[str, Any]) -> None:
    first, second = run_ranks(with_planning, 2, options)
    assert first == second and first[0] >= 1 and first[1] > 0
