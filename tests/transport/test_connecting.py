"""Ranks that are lost, stopped or never come while connections are made: the others learn in time who it was."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fusionlayer import context, launch
from fusionlayer.base.errors import TransportError
from fusionlayer.health.heartbeat import Heartbeat
from fusionlayer.launch import stores
from fusionlayer.transport import star
from fusionlayer.transport.c10d import C10dTransport
from fusionlayer.transport.links import shared_memory
from fusionlayer.transport.links.gloo_store import GlooStore
from tests.harness import checkpoint, outcomes_of, stay_last
from tests.ports import free_port
from tests.tiers import tiered

pytestmark = pytest.mark.medium

TIMEOUT = 3.0

# Where the lost rank is when the signal comes: the function that it is about to call, what stands in its arguments, and
# how often it has called it so before.
PHASES: dict[str, tuple[object, str, str, int]] = {
    "rendezvous": (launch, "_await_all", "", 0),
    "meeting for the group": (Heartbeat, "meet", "", 0),
    "group": (dist, "init_process_group", "", 0),
    "group, at its end": (Heartbeat, "end", "", 0),
    "meeting": (Heartbeat, "meet", "", 1),
    "settings": (stores.EndingStore, "add", "settings/", 0),
    "mesh, before its address is known": (stores.EndingStore, "set", "gloo/", 0),
    "mesh": (stores.EndingStore, "wait", "gloo/", 0),
    "mesh, half connected": (GlooStore, "get", "gloo/", 1),
    "mesh, at its end": (stores.EndingStore, "wait", "linked/all", 0),
    "invitation": (shared_memory.Invitation, "accept", "", 0),
    "welcome": (shared_memory.Invitation, "welcome", "", 0),
    "star": (star, "connect", "", 0),
    "duplicate": (C10dTransport, "duplicate", "", 0),
    "lane's mesh": (GlooStore, "get", "gloo/", 4),
    "subset": (C10dTransport, "subset", "", 0),
}


def stop_before(patch: pytest.MonkeyPatch, phase: str) -> None:
    place, name, key, before = PHASES[phase]
    original: Callable[..., Any] = getattr(place, name)
    calls: list[None] = []

    def wrapped(*args: Any, **options: Any) -> Any:
        if key in str(args[1:]):
            calls.append(None)
            if len(calls) == before + 1:
                checkpoint(phase)
        return original(*args, **options)

    patch.setattr(place, name, wrapped)


def launched(rank: int, world: int, port: int) -> None:
    """Set the variables of a launcher whose ranks are all on this host."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(world)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


def connect_everything(rank: int, world: int, port: int, lost: int, phase: str) -> None:
    launched(rank, world, port)
    with pytest.MonkeyPatch.context() as patch:
        if rank == lost:
            stop_before(patch, phase)
        try:
            connect()
        except TransportError:
            if rank == 0:
                stay_last()  # its process keeps the store by which the others learn why they fail
            raise


def connect() -> None:
    context.init(TIMEOUT)
    transport = context.transport()
    transport.all_reduce(torch.ones(1 << 19))
    end = star.connect(transport)
    lane = transport.duplicate()
    part = transport.subset(range(transport.size))
    for each in (transport, lane, part):
        each.barrier()
    end.close()


CASES = [(phase, lost, end) for phase in PHASES for lost in (1, 0) for end in (signal.SIGKILL, signal.SIGSTOP)]
FAST = {
    ("rendezvous", 0, signal.SIGSTOP),
    ("meeting for the group", 1, signal.SIGKILL),
    ("group", 1, signal.SIGSTOP),
    ("mesh", 1, signal.SIGKILL),
    ("mesh, half connected", 0, signal.SIGSTOP),
    ("welcome", 1, signal.SIGSTOP),
    ("lane's mesh", 0, signal.SIGKILL),
}


def in_ci(phase: str, lost: int, end: signal.Signals) -> bool:
    """Tell whether CI has the case: each phase once."""
    return (lost, end) == (1, signal.SIGKILL)


@pytest.mark.parametrize("phase, lost, end", tiered(CASES, lambda *case: case in FAST, in_ci))
def test_a_rank_that_is_lost_while_ranks_connect_is_named(phase: str, lost: int, end: signal.Signals) -> None:
    # The harness ends ranks that wait for six time-outs, one after the other, and they count as hung.
    outcomes = outcomes_of(connect_everything, 3, free_port(), lost, phase, signals={(lost, phase): end}, backend=None)
    assert phase in outcomes[lost].checkpoints, outcomes[lost]
    for rank, outcome in enumerate(outcomes):
        if rank != lost:
            assert (outcome.kind, outcome.error[0]) == ("raised", "TransportError"), outcome
            assert outcome.attributes["ranks"] == (lost,), outcome.error
            assert outcome.exit_code in (1, -signal.SIGKILL), outcome


def lose_one_in_the_group(rank: int, world: int, port: int, folder: Path, phase: str) -> None:
    """Connect; rank 1 is lost in ``phase``, when it has the process group. Rank 0 has none yet, and fails with it."""
    launched(rank, world, port)
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            (folder / "draft").write_text(str(os.getpid()))
            (folder / "draft").rename(folder / "lost")
            stop_before(patch, phase)
        if rank == 0:
            make = dist.init_process_group

            def make_late(*args: Any, **options: Any) -> None:
                make(*args, **options)
                while not (folder / "lost").exists() or not _is_lost(int((folder / "lost").read_text())):
                    time.sleep(0.01)
                raise RuntimeError("Connection closed by peer")

            patch.setattr(dist, "init_process_group", make_late)
        try:
            connect()
        except TransportError:
            if rank == 0:
                stay_last()
            raise


def _is_lost(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] in "TZ"
    except FileNotFoundError:
        return True


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_that_is_lost_before_another_has_the_group_is_named_alone(tmp_path: Path, end: signal.Signals) -> None:
    """A rank that waits for both in vain does not say that the other one did not come."""
    phase = "group, at its end"
    outcomes = outcomes_of(
        lose_one_in_the_group, 3, free_port(), tmp_path, phase, signals={(1, phase): end}, backend=None
    )
    assert phase in outcomes[1].checkpoints, outcomes[1]
    for outcome in (outcomes[0], outcomes[2]):
        assert (outcome.error[0], outcome.attributes["ranks"]) == ("TransportError", (1,)), outcome


def connect_in_vain(rank: int, world: int, port: int, folder: Path) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "init_process_group", lambda *args, **options: time.sleep(60))
        try:
            context.init(1.0)
        finally:  # the other is not to see that this one is gone
            (folder / str(rank)).touch()
            end = time.monotonic() + 180
            while len([*folder.iterdir()]) < world and time.monotonic() < end:
                time.sleep(0.01)


def test_ranks_that_meet_and_cannot_connect_are_told_what_to_do(tmp_path: Path) -> None:
    """As with a firewall that passes the port of the store alone: no rank is seen to do anything wrong."""
    for outcome in outcomes_of(connect_in_vain, 2, free_port(), tmp_path, backend=None):
        assert outcome.error[0] == "TransportError", outcome
        assert "no connections within 1 s; if ranks are on several hosts, set GLOO_SOCKET_IFNAME" in outcome.error[1]
        assert "let firewalls pass all TCP ports between them" in outcome.error[1]
