"""Ranks that are late: sums go on without them, all replicas have equal bits, and nothing is lost."""

from __future__ import annotations

import hashlib
import os
import signal
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import fusionlayer as fl
from fusionlayer.collectives._late import MOST_MISSED
from tests.harness import checkpoint, outcomes_of, run_ranks
from tests.tiers import tiered

pytestmark = [pytest.mark.medium, pytest.mark.timeout(110)]

WORLD, LATE = 4, 2
GRACE = 0.05
LENGTHS = (3000, 5, 700)
WAYS = [
    ("int4", "c10d", torch.float32),
    ("raw", "c10d", torch.float32),
    ("int4", "sockets", torch.float32),
    ("raw", "c10d", torch.bfloat16),
    ("int8", "sockets", torch.bfloat16),
]


class Model:
    """Parameters that are only ever stepped by plain SGD: they add up what was applied."""

    def __init__(self, codec: str, transport: str, dtype: torch.dtype, **settings: Any) -> None:
        os.environ["FUSIONLAYER_GRACE"] = str(GRACE)
        fl.init(transport=transport, **settings)
        self.parameters = [torch.nn.Parameter(torch.zeros(n, dtype=dtype)) for n in LENGTHS]
        self.optimizer = fl.DistributedOptimizer(
            torch.optim.SGD(self.parameters, lr=1.0), codec=codec, algorithm="two_shot", planner="wfbp"
        )
        self.given = [torch.zeros(n, dtype=torch.float64) for n in LENGTHS]

    def step(self, number: int) -> None:
        generator = torch.Generator().manual_seed(1000 * number + fl.rank())
        for parameter, given in zip(self.parameters, self.given, strict=True):
            gradient = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
            given += gradient.double()
            (parameter * gradient).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def digest(self) -> str:
        data = b"".join(p.detach().view(torch.uint8).numpy().tobytes() for p in self.parameters)
        return hashlib.sha256(data).hexdigest()

    def owed(self) -> list[Tensor]:
        """Return what this rank has not sent yet, in the unit of averages."""
        engine = self.optimizer._fl_engine
        assert engine is not None
        kept = engine.memory.state_dict()["residuals"]
        return [kept[self.optimizer._fl_names[parameter]].double() for parameter in self.parameters]


def balance(model: Model) -> list[float]:
    """Return how far averages that were applied and what is owed, over all ranks, differ from the gradients' mean."""
    worst = []
    for parameter, given, owed in zip(model.parameters, model.given, model.owed(), strict=True):
        total = given / fl.size() - owed
        dist.all_reduce(total)
        worst.append(float((total + parameter.detach().double()).abs().max()))
    return worst


def out_for_two_steps(rank: int, world: int, way: Sequence[Any]) -> dict[str, Any]:
    model = Model(*way)
    store = dist.distributed_c10d._get_default_store()
    digests, early = [], 0.0
    for number in range(8):
        if rank == LATE and number == 3:
            store.wait(["three steps more"])  # the others set it when they have ended step 5: without this rank
            early = float(sum(p.detach().double().sum() for p in model.parameters))
        model.step(number)
        digests.append(model.digest())
        if rank == 0 and number == 5:
            store.set("three steps more", "")
    found = {"digests": digests, "balance": balance(model), "early": early}
    found["missed"] = model.optimizer._fl_engine.memory.norm() if rank == LATE else 0.0  # type: ignore[union-attr]
    fl.shutdown()
    return found


@pytest.mark.parametrize("codec, transport, dtype", tiered(WAYS, lambda *way: way in WAYS[:3]))
def test_the_others_go_on_and_nothing_is_lost(codec: str, transport: str, dtype: torch.dtype) -> None:
    found = run_ranks(out_for_two_steps, WORLD, (codec, transport, dtype), timeout=60.0, store="tcp")
    assert all(each["digests"] == found[0]["digests"] for each in found)
    bound = 1e-5 if dtype is torch.float32 else 0.5
    assert all(max(each["balance"]) < bound for each in found), found[0]["balance"]
