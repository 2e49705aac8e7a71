"""Who joins an elastic job gets the members' state to the bit, and no more of it than it lacks; and it watches."""

import os
import re
import threading
import time
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fusionlayer as fl
from fusionlayer.training.policies import handover
from fusionlayer.transport import Transport
from tests.harness import run_ranks

from .worker import begin, digest

pytestmark = pytest.mark.medium


def join(rank: int, world: int, folder: str) -> dict[str, Any]:
    """Train with AdamW until the last rank has joined, as if from another host; return what it has got, and how."""
    os.environ["FUSIONLAYER_RANKS_PER_NODE"] = "1"
    while rank == world - 1 and not Path(folder, "begun").exists():
        time.sleep(0.01)
    begin(rank, folder, world - 1)
    members = fl.membership()
    torch.manual_seed(0)
    frozen = nn.Linear(200, 400).requires_grad_(False)
    torch.manual_seed(1 + rank)
    model = nn.Sequential(frozen, nn.Linear(400, 100))
    optimizer: Any = fl.DistributedOptimizer(torch.optim.AdamW(model.parameters()), model, codec="int8")
    damaged = _damage_first() if rank == world - 1 else []
    sent, states, ended = 0, {}, None
    while ended is None or members.step < ended:
        model(torch.randn(8, 200)).square().mean().backward()
        generation, size = members.generation, members.size
        optimizer.step()
        optimizer.zero_grad()
        Path(folder, "begun").touch()
        if members.generation > generation and (size < world or rank == world - 1):
            states = {key: _checksums(each) for key, each in optimizer.state_dict()["state"].items()}
            sent, ended = members.transport.bytes_sent, members.step + 5
    trained = [*model[1].parameters(), *(x for each in optimizer.state.values() for x in each.values())]
    return {
        "digest": digest(model),
        "states": states,
        "sent": sent,
        "lacked": sum(x.nbytes for x in trained),
        "damaged": len(damaged),
        "changes": members.generation,
    }


def _damage_first() -> list[int]:
    """Flip a bit of the first large message of a state that comes; return a list that has its size then."""
    damaged: list[int] = []
    receive = handover.receive

    def receive_damaged(own: Any, transport: Transport, source: int) -> Any:
        received = transport.recv

        def recv(x: Tensor, source: int, tag: int = 0) -> None:
            received(x, source, tag)
            if x.nbytes > 30_000 and not damaged:
                damaged.append(x.nbytes)
                x.view(-1).view(torch.uint8)[1000] ^= 1

        transport.recv = recv  # type: ignore[method-assign]
        return receive(own, transport, source)

    handover.receive = receive_damaged
    return damaged


def _checksums(state: dict[str, Tensor]) -> dict[str, int]:
    return {name: zlib.crc32(x.numpy().tobytes()) for name, x in state.items()}


def test_a_newcomer_gets_what_it_lacks_to_the_bit_and_again_if_it_was_damaged(tmp_path: Path) -> None:
    ends = run_ranks(join, 3, str(tmp_path), backend=None)
    assert len({end["digest"] for end in ends}) == 1
    assert ends[0]["states"] and all(end["states"] == ends[0]["states"] for end in ends)
    assert [end["damaged"] for end in ends] == [0, 0, 1] and ends[0]["changes"] == 2
    assert ends[0]["lacked"] / 2 < ends[0]["sent"] < 0.92 * ends[0]["lacked"], ends[0]


# ---- a newcomer is watched, too -------------------------------------------------------------------------------------


LATE = re.compile(r"rank 2 is late: it is at \S*test_newcomers\.py:\d+; ranks? [01].* wait")


def watched(rank: int, world: int, folder: str) -> tuple[tuple[int, int], tuple[int, int], bool]:
    """Train until the last rank has joined and is late, which rank 0 tells; return where the watcher was and is."""
    told, end = Path(folder, "told"), Path(folder, "end")
    while rank == world - 1 and not Path(folder, "begun").exists():
        time.sleep(0.01)
    # A wait is long if it is three times as long as others were, which on a busy machine takes its time.
    begin(rank, folder, world - 1, timeout="60")
    watcher = fl.watch(patience=1.5)
    assert watcher is not None
    first = watcher.place

    def look() -> None:
        while not told.exists():
            if rank == 0 and any(map(LATE.match, watcher.lines)):
                told.touch()
            time.sleep(0.05)

    threading.Thread(target=look, daemon=True).start()
    members = fl.membership()
    model = nn.Linear(40, 8)
    optimizer = fl.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model, codec="int8")
    while not end.exists() or members.step < int(end.read_text()):
        model(torch.ones(2, 40)).square().mean().backward()
        if rank == world - 1 and members.size == world and members.has_joined and not end.exists():
            while not told.exists():
                time.sleep(0.05)
            end.with_name("draft").write_text(str(members.step + 3))
            end.with_name("draft").rename(end)
        optimizer.step()
        optimizer.zero_grad()
        Path(folder, "begun").touch()
    last = watcher.place
    fl.shutdown()
    return first, last, watcher.is_closed


def test_a_newcomer_is_watched_and_named_where_it_is_late(tmp_path: Path) -> None:
    places = run_ranks(watched, 3, str(tmp_path), backend=None)
    assert places == [((0, 2), (0, 3), True), ((1, 2), (1, 3), True), ((0, 1), (2, 3), True)]
