"""Ranks that are late: sums go on without them, all replicas have equal bits, and nothing is lost."""

from __future__ import annotations

import hashlib
import os
import signal
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fusionlayer as fl
import fusionlayer.torch as hvd
from fusionlayer.collectives._late import MOST_MISSED
from fusionlayer.errors import ConfigError
from fusionlayer.transport._linked import LinkedTransport
from tests.harness import checkpoint, outcomes_of, run_ranks
from tests.tiers import tiered

pytestmark = pytest.mark.medium

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
    """Parameters from 0 on that plain SGD steps by averages as they are: they add up what was applied."""

    def __init__(self, codec: str, transport: str, dtype: torch.dtype, lengths: Sequence[int] = LENGTHS) -> None:
        begin(transport)
        self.parameters = [nn.Parameter(torch.zeros(n, dtype=dtype)) for n in lengths]
        self.optimizer = fl.DistributedOptimizer(
            torch.optim.SGD(self.parameters, lr=1.0), codec=codec, algorithm="two_shot", planner="wfbp"
        )
        self.given = [torch.zeros(n, dtype=torch.float64) for n in lengths]

    def step(self, number: int) -> None:
        generator = torch.Generator().manual_seed(1000 * number + fl.rank())
        for parameter, given in zip(self.parameters, self.given, strict=True):
            gradient = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
            given += gradient.double()
            (parameter * gradient).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def error(self) -> float:
        """Return how far what was applied, and what is owed by all ranks, differ from the averages of all gradients."""
        engine = self.optimizer._fl_engine
        assert engine is not None
        kept, worst = engine.memory.state_dict()["residuals"], 0.0
        for parameter, given in zip(self.parameters, self.given, strict=True):
            total = given / fl.size() - kept[self.optimizer._fl_names[parameter]].double()
            dist.all_reduce(total)
            worst = max(worst, float((total + parameter.detach().double()).abs().max()))
        return worst


def begin(transport: str = "c10d") -> None:
    os.environ["FUSIONLAYER_GRACE"] = str(GRACE)
    fl.init(timeout=40.0, transport=transport)


def digest(parameters: Collection[torch.Tensor]) -> str:
    data = b"".join(p.detach().view(torch.uint8).numpy().tobytes() for p in parameters)
    return hashlib.sha256(data).hexdigest()


def held_for_three_steps(rank: int, world: int, way: Sequence[Any]) -> tuple[list[str], float]:
    model, digests = Model(*way), []
    store = dist.distributed_c10d._get_default_store()
    for number in range(8):
        if rank == LATE and number == 3:
            store.wait(["step 5 has ended"])
        model.step(number)
        digests.append(digest(model.parameters))
        if rank == 0 and number == 5:
            store.set("step 5 has ended", "")
    error = model.error()
    fl.shutdown()
    return digests, error


@pytest.mark.parametrize("codec, transport, dtype", tiered(WAYS, lambda *way: way in WAYS[:3]))
def test_the_others_go_on_and_nothing_is_lost(codec: str, transport: str, dtype: torch.dtype) -> None:
    found = run_ranks(held_for_three_steps, WORLD, (codec, transport, dtype), store="tcp")
    assert all(digests == found[0][0] for digests, _ in found)
    # Parameters of bf16 round each average that is added to them.
    assert all(error < (1e-5 if dtype is torch.float32 else 0.2) for _, error in found)


def held_in_ddp(rank: int, world: int) -> list[str]:
    begin()
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(50, 40), nn.Linear(40, 3)))
    hook = fl.ddp.register(model, "int4")
    optimizer, digests = torch.optim.SGD(model.parameters(), lr=0.1), []
    store = dist.distributed_c10d._get_default_store()
    for number in range(7):
        if rank == LATE and number == 3:
            store.wait(["step 4 has ended"])
        torch.manual_seed(100 * number + rank)
        model(torch.randn(8, 50)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        digests.append(digest([*model.parameters()]))
        if rank == 0 and number == 4:
            store.set("step 4 has ended", "")
    hook.close()
    fl.shutdown()
    return digests


def test_ddp_goes_on_too() -> None:
    found = run_ranks(held_in_ddp, WORLD, store="tcp")
    assert all(digests == found[0] for digests in found)


def held_until_all_wait(rank: int, world: int) -> list[bool]:
    """Return of each sum whether the late rank was in; it comes when a sum will not do without it."""
    store, presences = dist.distributed_c10d._get_default_store(), []
    attend = LinkedTransport.attend

    def telling(
        self: LinkedTransport, grace: float, must: Collection[int], is_due: Callable[[], bool]
    ) -> tuple[int, ...]:
        if LATE in must:
            store.set("all wait", "")
        present = attend(self, grace, must, is_due)
        presences.append(LATE in present)
        return present

    LinkedTransport.attend = telling  # type: ignore[method-assign]
    model = Model("int4", "c10d", torch.float32, (700,))
    for number in range(MOST_MISSED + 4):
        if rank == LATE and number == 1:
            store.wait(["all wait"])
        model.step(number)
    fl.shutdown()
    return presences


def test_after_some_sums_all_wait_for_a_rank() -> None:
    for presences in run_ranks(held_until_all_wait, WORLD, store="tcp"):
        runs = "".join("+" if there else "-" for there in presences).split("+")
        assert max(map(len, runs)) == MOST_MISSED


def killed_while_late(rank: int, world: int, transport: str) -> None:
    model = Model("int4", transport, torch.float32)
    for number in range(3 + 2 * MOST_MISSED):
        if rank == LATE and number == 3:
            checkpoint("late")
        model.step(number)


@pytest.mark.parametrize("transport", tiered(["c10d", "sockets"], lambda transport: transport == "c10d"))
def test_a_rank_that_dies_while_it_is_late_is_named(transport: str) -> None:
    kill = {(LATE, "late"): signal.SIGKILL}
    found = outcomes_of(killed_while_late, WORLD, transport, signals=kill, store="tcp")
    for outcome in found[:LATE] + found[LATE + 1 :]:
        assert (outcome.kind, outcome.error[0]) == ("raised", "TransportError"), outcome
        assert outcome.attributes["ranks"] == (LATE,), outcome.error


REFUSED: list[tuple[Mapping[str, Any], str]] = [
    ({"codec": "raw"}, "grace with algorithm 'dense'; only 'two_shot' leaves out ranks that are late"),
    ({"codec": "int4", "algorithm": "ring"}, "grace with algorithm 'ring'"),
    ({"codec": "dynamiq", "algorithm": "two_shot"}, "for which all ranks agree on something before each sum"),
    ({"codec": "int4", "error_feedback": False}, "beside error_feedback=False, where late gradients have to wait"),
    ({"sync": fl.Local(every=4)}, "beside sync=fl.Local(...)"),
    ({"codec": "int4", "autotune": True}, "beside codec='auto', autotune or a planner that needs costs"),
]


def refusals(rank: int, world: int) -> list[str]:
    begin()
    told = []
    for options, _ in REFUSED:
        try:
            fl.DistributedOptimizer(torch.optim.SGD([nn.Parameter(torch.zeros(9))], lr=1.0), **options)
            told.append("")
        except ConfigError as error:
            told.append(str(error))
    fl.shutdown()
    return told


def test_what_cannot_go_on_without_a_rank_is_refused() -> None:
    for told in run_ranks(refusals, 3, store="tcp"):
        for (_, expected), error in zip(REFUSED, told, strict=True):
            assert expected in error
    for told in run_ranks(refusals, 2, store="tcp"):
        assert "over 2 ranks" in told[1]


def test_other_front_ends_refuse_a_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSIONLAYER_GRACE", "0.1")
    for elastic in (True, False):
        fl.shutdown()
        with pytest.raises(ConfigError, match=r"FUSIONLAYER_GRACE=0.1|grace=0.1"):
            fl.init(elastic=elastic)
            hvd.DistributedOptimizer(torch.optim.SGD([nn.Parameter(torch.zeros(9))], lr=1.0))
    fl.shutdown()
