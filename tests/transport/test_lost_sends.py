"""A rank is lost that has asked for a message, before it has got it: the rank that sends does not wait in vain."""

import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fusionlayer.transport import C10dTransport
from fusionlayer.transport.links.gloo import GlooLink, wait
from fusionlayer.transport.links.gloo_waits import LOOK, SendWaits, _Turn
from tests.harness import outcomes_of
from tests.losses import lose, stop_here
from tests.ranks import on_processes

pytestmark = pytest.mark.medium

LOST = 1


def meet(rank: int, world: int, folder: str, call: str, n: int) -> None:
    """Make a call in which the lost rank has posted its receives, and sent what it has to, when it is lost."""
    transport = C10dTransport(timeout=1000)
    transport.barrier()
    link: Any = transport._links["cpu"]
    if rank == LOST:
        _stop_when_posted(folder)
    else:
        link._group = _Losing(link._group, folder)
    x = torch.zeros(n, dtype=torch.uint8)
    if call == "broadcast":
        transport.broadcast(x, 0)
    elif rank == LOST and call != "exchange":
        transport.recv(x, 0)
    elif call == "send":
        transport.send(x, LOST)
    else:
        transport.exchange({peer: (x, torch.empty_like(x)) for peer in range(world) if peer != rank})


def _stop_when_posted(folder: str) -> None:
    post = GlooLink._post

    def stopping(link: GlooLink, outgoing: Any, incoming: Any) -> Any:
        posted = post(link, outgoing, incoming)
        for _, work in posted.sent:
            work.wait()
        stop_here(folder, "lost")
        return posted

    GlooLink._post = stopping  # type: ignore[method-assign]


class _Losing:
    """A gloo group on which the other rank is lost before the first send."""

    def __init__(self, group: Any, folder: str) -> None:
        self._group, self._file = group, Path(folder, "lost")
        self.recv = group.recv

    def send(self, *arguments: Any) -> Any:
        while not self._file.exists():
            time.sleep(0.01)
        pid = int(self._file.read_text())
        lose(pid)
        work = self._group.send(*arguments)
        os.kill(pid, signal.SIGKILL)
        self.send = self._group.send  # type: ignore[method-assign]  # a long message has two parts
        return work


@pytest.mark.parametrize("call, n", [("broadcast", 8), ("send", 8), ("send", 500_000), ("exchange", 500_000)])
def test_who_sends_to_a_lost_rank_does_not_wait_for_the_time_out(call: str, n: int, tmp_path: Path) -> None:
    outcomes = outcomes_of(meet, 2, str(tmp_path), call, n)
    assert [outcome.kind for outcome in outcomes] == ["raised", "died"], outcomes
    assert outcomes[0].attributes["ranks"] == (LOST,) and "rank 1 is gone" in outcomes[0].error[1], outcomes[0]


@on_processes(3)
def test_a_rank_that_has_all_it_wants_may_leave_while_a_straggler_is_waited_for(
    rank: int, world: int, tmp_path: Path
) -> None:
    transport, seen = C10dTransport(timeout=1000), tmp_path / "seen"
    transport.barrier()
    if rank == 0:
        closed = _Turn.closed

        def note(turn: _Turn, peer: int, why: str) -> None:
            closed(turn, peer, why)
            if peer not in turn.peers:
                seen.touch()

        _Turn.closed = note  # type: ignore[method-assign]
    while rank == 1 and not seen.exists():
        time.sleep(0.01)
    x = torch.full((8,), rank, dtype=torch.uint8)
    transport.broadcast(x, 0)
    transport.close()
    assert not x.any()


def test_looks_at_connections_become_rare() -> None:
    """gloo keeps something of each look for ever, and on a slow link each message is waited for long enough for one."""
    asked, waits = [], SendWaits(wait)
    group = SimpleNamespace(recv=lambda *arguments: asked.append(arguments))
    slow: Any = SimpleNamespace(wait=lambda *_: time.sleep(1.5 * LOOK) is None)
    for _ in range(30):
        waits.wait([(LOST, slow)], time.monotonic() + 180, lambda: group)
    waits.aside.end()
    assert 0 < len(asked) < 10
