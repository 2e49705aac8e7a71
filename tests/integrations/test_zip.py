"""Lossless gradients: the weights of uncompressed training, from fewer bytes."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import fusionlayer as fl
from fusionlayer.transport import local
from tests.loops import looped

pytestmark = pytest.mark.short


def trained(codec: str, algorithm: str | None = None, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Return the weights of each of 3 ranks after some steps, one behind the other."""

    torch.manual_seed(0)
    same = nn.Sequential(nn.Linear(40, 300), nn.ReLU(), nn.Linear(300, 7)).to(dtype)

    def train(rank: int) -> Tensor:
        model = copy.deepcopy(same)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        distributed = fl.DistributedOptimizer(
            optimizer, model.named_parameters(), codec=codec, algorithm=algorithm, planner="single"
        )
        data = torch.Generator().manual_seed(rank)
        for _ in range(14):  # more than it takes to choose a form
            distributed.zero_grad()
            model(torch.randn(16, 40, generator=data).to(dtype)).square().mean().backward()
            distributed.step()
        plan = distributed.fusion_plan
        assert plan is not None
        assert {bucket.algorithm for bucket in plan.buckets} == {algorithm or ("zipped" if codec != "raw" else "dense")}
        distributed.close()
        return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])

    return local.run(train, 3)


@looped("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_training_is_that_of_raw(dtype: torch.dtype) -> None:
    expected = trained("raw", dtype=dtype)
    for codec, algorithm in (("zip", None), ("rans", None), ("zip", "switched"), ("zip", "dense")):
        found = trained(codec, algorithm, dtype)
        assert all(torch.equal(mine, expected[0]) for mine in (*found, *expected)), (codec, algorithm)
