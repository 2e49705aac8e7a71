"""A newcomer is lost at each point of its life, alone or with another: the others go on, long before a time-out."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fusionlayer as fl
from fusionlayer import launch
from fusionlayer.elastic import Generation, Members
from fusionlayer.training.policies import handover
from fusionlayer.transport import connected
from fusionlayer.transport.c10d import C10dTransport
from fusionlayer.transport.links.gloo import GlooLink
from tests.harness import checkpoint, outcomes_of
from tests.losses import lose, stop_here
from tests.tiers import exhaustive

from .test_processes import check
from .worker import begin, digest

pytestmark = pytest.mark.medium

TIMEOUT = "1000"
FIRST = 2
LAST = 3  # steps within which a newcomer comes to each point
POINTS = (
    "has asked",
    "is a member",
    "has some links",
    "has said what it has",
    "gets a tensor",
    "has the state",
    "has one lane",
    "computes",
    "has asked for the plan",
    "has sent a half",
    "has the results",
)


def live(rank: int, world: int, folder: str) -> dict[str, Any]:
    """Train. From the third on ranks join one after the other, and each is lost at another point."""
    before = Path(folder, f"over {rank - 1}")
    while rank >= FIRST and not before.exists():
        time.sleep(0.01)
    begin(rank, folder, FIRST, TIMEOUT)
    members = fl.membership()
    model = nn.Linear(100, 100)
    optimizer: Any = fl.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model, codec="int8")
    point = "" if rank < FIRST else POINTS[rank - FIRST]
    if point:
        _arm(point, members, lambda: _end(folder, rank), lambda: stop_here(folder, f"lost {rank}"))
    elif rank == 0:
        _lose_who_asks_for_the_plan(folder, world, members)
    coming, end, ended = FIRST, Path(folder, "end"), None
    made = 0
    while ended is None or members.step < ended:
        assert not point or made < LAST, f"a newcomer has not come to where it {point}"
        made += 1
        hook = model.weight.register_hook(lambda gradient: _end(folder, rank)) if members.has_joined else None
        loss = model(torch.full((4, 100), rank + 1.0)).square().mean()
        if hook is not None and point != "computes":
            hook.remove()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 1 and coming <= world and (coming == FIRST or _is_over(folder, coming - 1, members)):
            Path(folder, f"over {coming - 1}").touch()
            coming += 1
        if coming > world and not end.exists() and rank == 1:
            Path(folder, "end.new").write_text(str(members.step + 3))
            Path(folder, "end.new").rename(end)
        ended = int(end.read_text()) if end.exists() else None
    return {"digest": digest(model), "finished": members.step, "size": members.size}


def _end(folder: str, rank: int) -> None:
    Path(folder, f".lost {rank}").write_text(str(os.getpid()))
    Path(folder, f".lost {rank}").rename(Path(folder, f"lost {rank}"))
    checkpoint("lost")


def _is_over(folder: str, rank: int, members: Members) -> bool:
    """Return whether a rank was lost, and the others have gone on without it."""
    lost = Path(folder, f"lost {rank}")
    if not lost.exists() or members.size > FIRST or int(lost.read_text()) in members.processes:
        return False
    stat = Path(f"/proc/{lost.read_text()}/stat")
    return not stat.exists() or stat.read_text().rpartition(") ")[2][0] in "ZX"


def _before(owner: Any, name: str, act: Callable[[], None], when: Callable[..., bool] = lambda *_: True) -> None:
    """Have ``act`` run before a call of ``owner.name`` whose arguments are those that are waited for."""
    original = getattr(owner, name)

    def call(*arguments: Any, **options: Any) -> Any:
        if when(*arguments):
            act()
        return original(*arguments, **options)

    setattr(owner, name, call)


def _arm(point: str, members: Members, end: Callable[[], None], stop: Callable[[], None]) -> None:
    """Have this process end at a point of its life."""

    def send_a_half(link: GlooLink, outgoing: Any, incoming: Any) -> Any:
        if any(message.data.numel() > 1000 for message in outgoing):
            for _, work in post(link, outgoing[:1], []).sent:
                work.wait()
            end()
        return post(link, outgoing, incoming)

    def ask_for_the_plan(link: GlooLink, outgoing: Any, incoming: Any) -> Any:
        posted = post(link, outgoing, incoming)
        stop()
        return posted

    post = GlooLink._post
    if point == "has asked":
        _before(Generation, "rank_of", end)  # the first thing that it does after it has knocked
    elif point == "is a member":
        _before(C10dTransport, "among", end)
    elif point == "has some links":
        _before(connected, "await_count", end)
    elif point == "has said what it has":
        _before(handover, "receive_bytes", end)
    elif point == "gets a tensor":
        _before(C10dTransport, "recv", end, lambda transport, x, source: x.nbytes > 30_000)
    elif point == "has the state":
        _before(members, "all_have_state", end)
    elif point == "has one lane":
        _before(C10dTransport, "shared_duplicate", end)
    elif point == "has asked for the plan":
        _before(GlooLink, "broadcast", lambda: setattr(GlooLink, "_post", ask_for_the_plan))
    elif point == "has sent a half":
        GlooLink._post = send_a_half  # type: ignore[method-assign]
    elif point == "has the results":
        _before(members, "agree", end)


def _lose_who_asks_for_the_plan(folder: str, world: int, members: Members) -> None:
    """Find the one that is lost at that point gone when the plan is sent, before its connection tells that."""
    late = FIRST + POINTS.index("has asked for the plan")
    lost, post, broadcast = Path(folder, f"lost {late}"), GlooLink._post, GlooLink.broadcast

    def posting(link: GlooLink, outgoing: Any, incoming: Any) -> Any:
        lose(int(lost.read_text()))
        posted = post(link, outgoing, incoming)
        os.kill(int(lost.read_text()), signal.SIGKILL)
        return posted

    def sending(link: GlooLink, *arguments: Any) -> None:
        if members.size > FIRST and Path(folder, f"over {late - 1}").exists():
            while not lost.exists():
                time.sleep(0.01)
            GlooLink._post, GlooLink.broadcast = posting, broadcast  # type: ignore[method-assign]
            try:
                broadcast(link, *arguments)
            finally:
                GlooLink._post = post  # type: ignore[method-assign]
        else:
            broadcast(link, *arguments)

    GlooLink.broadcast = sending  # type: ignore[method-assign]


def test_a_newcomer_may_be_lost_at_each_point_of_its_life(tmp_path: Path) -> None:
    world = FIRST + len(POINTS)
    newcomers = range(FIRST, world)
    signals = {(rank, "lost"): signal.SIGKILL for rank in newcomers}
    outcomes = outcomes_of(live, world, str(tmp_path), signals=signals, backend=None)
    ends = check(outcomes, tuple(newcomers))
    assert [end["size"] for end in ends] == [FIRST] * FIRST


def come(rank: int, world: int, folder: str) -> dict[str, Any]:
    """Train. The last rank joins; others reach a checkpoint when they have made a step with it."""
    while rank == world - 1 and not Path(folder, "begun").exists():
        time.sleep(0.01)
    begin(rank, folder, world - 1, TIMEOUT)
    members = fl.membership()
    model = nn.Linear(100, 100)
    optimizer: Any = fl.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model, codec="int8")
    full, end, ended = False, Path(folder, "end"), None
    while ended is None or members.step < ended:
        model(torch.full((4, 100), rank + 1.0)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        Path(folder, "begun").touch()
        if members.has_joined and members.size == world and not full:
            full = True
            checkpoint("lost")
        if full and members.size < world and not end.exists() and fl.rank() == 0:
            Path(folder, "end.new").write_text(str(members.step + 5))
            Path(folder, "end.new").rename(end)
        ended = int(end.read_text()) if end.exists() else None
    return {"digest": digest(model), "finished": members.step}


@pytest.mark.parametrize("lost", [(0, 3), (2, 3)])
def test_who_leads_may_be_lost_when_a_newcomer_has_come_and_the_newcomer_with_another(
    lost: tuple[int, ...], tmp_path: Path
) -> None:
    signals = {(rank, "lost"): signal.SIGKILL for rank in lost}
    outcomes = outcomes_of(come, 4, str(tmp_path), signals=signals, backend=None)
    check(outcomes, lost)


def meet(rank: int, world: int, folder: str, amid: str) -> None:
    """Begin an elastic job; rank 0 reaches the checkpoint "stopped" while ranks count, or members meet."""

    def stop(*given: Any) -> Any:
        checkpoint("stopped")

    if rank == 0:
        owner, name = (launch, "node_name") if amid == "count" else (Members, "_open_next")
        setattr(owner, name, stop)
    begin(rank, folder, world, timeout="4")


@exhaustive(guarded_by="tests/transport/test_connecting.py::test_a_rank_that_is_lost_while_ranks_connect_is_named")
@pytest.mark.parametrize("amid", ["count", "members"])
def test_a_rank_that_is_stopped_while_they_meet_is_told_in_time(tmp_path: Path, amid: str) -> None:
    outcomes = outcomes_of(meet, 2, str(tmp_path), amid, signals={(0, "stopped"): signal.SIGSTOP}, backend=None)
    assert [o.kind for o in outcomes] == ["hung", "raised"], outcomes
    assert outcomes[1].error[0] == "TransportError", outcomes[1]
    assert ("the store by which the ranks meet" if amid == "count" else "while they met") in outcomes[1].error[1]
