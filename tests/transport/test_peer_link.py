"""Copies out of the memory of other ranks' devices: the link alone, its ranks in one process, threads for devices."""

from __future__ import annotations

import ctypes
import os
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import Tensor

from fusionlayer.base.errors import UsageError
from fusionlayer.transport.links import copy_engines, peer_memory
from fusionlayer.transport.links.base import DeviceError, Link, LinkError, LinkMessage
from fusionlayer.transport.links.copy_engines import CopyEngines
from fusionlayer.transport.links.peer import PeerLink
from fusionlayer.transport.links.peer_memory import Counter, Counters, Gather, OutOfReach
from tests.native.conftest import find_compiler

from .conformance import message
from .device_on_host import SOURCE, Host, Shared, compiled, device_on_host

SLOT = 1024
CUDA = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "include"


class Nothing(Link):
    """Stands in for NCCL, which has nothing to do here."""

    device = torch.device("cpu")
    ended = 0
    found: LinkError | None = None

    def exchange(self, *_: object) -> None:
        raise NotImplementedError

    all_reduce = broadcast = exchange

    def close(self) -> None:
        self.ended += 1

    def overdue(self) -> LinkError | None:
        return self.found


def gathers(size: int) -> list[Gather]:
    """Return a function for each rank, to be called on a thread of its own."""
    every, meeting = [b""] * size, threading.Barrier(size)

    def made(rank: int) -> Gather:
        def gather(mine: bytes) -> list[bytes]:
            every[rank] = mine
            meeting.wait(180)
            told = [*every]
            meeting.wait(180)
            return told

        return gather

    return [made(rank) for rank in range(size)]


_used: list[Ranks] = []


class Ranks:
    """Links of several ranks, which the thread of the test calls in the order that it likes."""

    def __init__(self, host: Host, size: int, timeout: float = 10.0, nbytes: int = 0) -> None:
        self.host, self.size = host, size
        self.tensors: list[Tensor] = []  # the device uses them until the end of the test
        given = [(Nothing(), rank, size, timeout, nbytes or 2 * size * SLOT, g) for rank, g in enumerate(gathers(size))]
        with ThreadPoolExecutor(size) as pool:
            self.links = list(pool.map(lambda each: PeerLink(*each), given))
        _used.append(self)

    def send(self, rank: int, to: int, data: Tensor) -> None:
        self._exchange(rank, [LinkMessage(to, data, 0)], [])

    def recv(self, rank: int, source: int, nbytes: int) -> Tensor:
        got = torch.zeros(nbytes, dtype=torch.uint8)
        self._exchange(rank, [], [LinkMessage(source, got, 0)])
        return got

    def drain(self, rank: int) -> None:
        self.links[rank].drain()

    def hold(self, rank: int) -> None:
        """Let a rank's device wait, until ``let_go``."""
        self.host.on(rank)
        link = self.links[rank]
        place = link._counters.address(rank, Counter.SENT, rank)
        link._engines.signal(self.host.stream().cuda_stream, [], [(place, 1)])

    def let_go(self, rank: int) -> None:
        counters = self.links[rank]._counters
        at = counters._mapped[rank] + counters._offset(Counter.SENT, rank)
        ctypes.c_uint32.from_address(at).value = 1

    def _exchange(self, rank: int, outgoing: list[LinkMessage], incoming: list[LinkMessage]) -> None:
        self.tensors += [each.data for each in (*outgoing, *incoming)]
        self.host.on(rank)
        self.links[rank].exchange(outgoing, incoming)


@pytest.fixture
def host() -> Iterator[Host]:
    with device_on_host(compiled()) as made:
        yield made
        for link in (link for ranks in _used for link in ranks.links):
            link.close()
            wait_for_device(link)  # which may still write to tensors of the test
        _used.clear()


def wait_for_device(link: PeerLink) -> None:
    end = time.monotonic() + 180
    while link._is_at_work():
        assert time.monotonic() < end, "the device still waits"
        time.sleep(0.001)


def test_what_a_rank_sends_after_it_gave_up_is_never_taken_for_whole(host: Host) -> None:
    """Rank 0 closes with a third message before it, for which there is no slot yet. Let go, it fills one."""
    ranks = Ranks(host, 2)
    ranks.hold(1)
    given = [message(0, number, SLOT) for number in range(3)]
    for data in given:
        ranks.send(0, 1, data)
    got = [ranks.recv(1, 0, SLOT) for _ in given]
    assert ranks.links[0]._is_at_work(), "it has to wait for a slot"
    ranks.links[0].close()
    wait_for_device(ranks.links[0])
    assert str(ranks.links[1].overdue()) == "rank 0 has given up", "the monitor ends the others' calls"
    ranks.let_go(1)
    with pytest.raises(LinkError, match="rank 0 has given up") as told:
        ranks.drain(1)
    wait_for_device(ranks.links[1])
    assert told.value.peer == 0 and not torch.equal(got[0], given[0]), "the slot was not used again too early"
    assert ranks.links[1].others.ended == ranks.links[0].others.ended == 1  # type: ignore[attr-defined]
    with pytest.raises(LinkError):
        ranks.send(1, 0, given[0])


@pytest.mark.parametrize("drains", [True, False])
def test_an_orderly_end_leaves_others_what_was_sent(host: Host, drains: bool) -> None:
    ranks = Ranks(host, 2)
    ranks.hold(1)
    ranks.send(0, 1, given := message(0, 1, 2 * SLOT))
    got = ranks.recv(1, 0, 2 * SLOT)
    ranks.drain(0) if drains else wait_for_device(ranks.links[0])
    ranks.links[0].close()
    ranks.let_go(1)
    ranks.drain(1)
    assert torch.equal(got, given) and ranks.links[1].overdue() is None


def test_a_link_that_is_closed_in_the_middle_of_a_call_lets_the_device_go(host: Host) -> None:
    ranks = Ranks(host, 2)
    link = ranks.links[0]
    copy = link._engines.copy

    def close_first(*arguments: int) -> None:
        link.close()
        copy(*arguments)

    with mock.patch.object(link._engines, "copy", close_first):
        ranks.send(0, 1, message(0, 1, 5 * SLOT))
    wait_for_device(link)
    with pytest.raises(LinkError, match="the connections are closed"):
        ranks.drain(0)
    with pytest.raises(LinkError, match="rank 0 has given up"):
        ranks.recv(1, 0, 10)


def test_counters_tell_who_is_late(host: Host) -> None:
    """Rank 1 sends and takes, rank 2 does not come; then rank 2 sends, and does not take."""
    late = []
    for comes in (False, True):
        ranks = Ranks(host, 3, timeout=0.05)
        data, room = message(0, 0, 3 * SLOT), torch.zeros(3 * SLOT, dtype=torch.uint8)
        for rank in (0, 1):
            other = 1 - rank
            ranks._exchange(
                rank,
                [LinkMessage(other, data, 0), LinkMessage(2, data, 0)],
                [LinkMessage(other, room, 0), LinkMessage(2, room, 0)],
            )
        if comes:
            for rank in (0, 1):
                ranks.send(2, rank, data[: 2 * SLOT])
        while (found := ranks.links[0].overdue()) is None:
            time.sleep(0.005)
        late.append((found.peer, str(found)))
        with pytest.raises(LinkError, match="rank 2 has not"):
            ranks.drain(0)
        for link in ranks.links:
            link.close()
    assert late[0] == (2, "rank 2 has not sent its message 1 in time")
    assert late[1] == (2, "rank 2 has not taken its message 1 in time")


def test_a_device_that_refuses_is_told_as_itself(host: Host) -> None:
    ranks = Ranks(host, 2)
    with mock.patch.object(ranks.links[1]._counters, "address", lambda *_: 8), pytest.raises(DeviceError) as told:
        ranks.send(1, 0, message(1, 0, 10))
    words = "the device of rank 1 has failed: CUDA error: cuStreamBatchMemOp: CUDA_ERROR_INVALID_VALUE"
    assert str(told.value) == words and told.value.ranks == (1,)


def test_what_the_other_link_finds_ends_this_one(host: Host) -> None:
    link = Ranks(host, 2).links[0]
    found = link.others.found = DeviceError(0, "an assert")  # type: ignore[attr-defined]
    assert link.overdue() is found
    link.close()
    with pytest.raises(DeviceError, match="the device of rank 0 has failed: an assert"):
        link.drain()


def test_what_cannot_be_counted_is_refused(host: Host) -> None:
    ranks = Ranks(host, 2)
    ranks.links[0]._sent[1] = Counters.MOST - 2
    with pytest.raises(UsageError, match="make a new one"):
        ranks.send(0, 1, message(0, 1, 2 * SLOT))
    with pytest.raises(OutOfReach, match="100 bytes have no room for the messages of 2 ranks"):
        Ranks(host, 2, nbytes=100)


def test_counters_of_devices_are_numbers_of_32_bits_that_never_end(host: Host) -> None:
    """Two ranks start as if they had moved nearly all that can be counted."""
    ranks = Ranks(host, 2)
    start = Counters.MOST - 10
    for rank, link in enumerate(ranks.links):
        link._sent, link._taken = [start] * 2, [start] * 2
        for counter in Counter:
            at = link._counters._mapped[rank] + link._counters._offset(counter, 1 - rank)
            ctypes.c_uint32.from_address(at).value = start
    ranks.send(0, 1, given := message(0, 1, 5 * SLOT))
    got = ranks.recv(1, 0, 5 * SLOT)
    for rank in (0, 1):
        ranks.drain(rank)
    assert torch.equal(got, given)


@pytest.mark.parametrize(
    "where, what",
    [(copy_engines.ctypes, "CDLL"), (Shared, "reach"), (peer_memory, "map_memory"), (CopyEngines, "reach")],
    ids=["driver", "memory", "pages", "registration"],
)
def test_all_ranks_hear_which_one_cannot_reach_the_others(
    host: Host, where: object, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = getattr(where, what)

    def on_rank_0_alone(*arguments: object) -> object:
        if threading.current_thread().name == "rank 1":
            raise OSError("no access")
        return usual(*arguments)

    monkeypatch.setattr(where, what, on_rank_0_alone)
    told = ["", ""]

    def make(rank: int, gather: Gather) -> None:
        try:
            PeerLink(Nothing(), rank, 2, 10.0, 1 << 16, gather)
        except OutOfReach as error:
            told[rank] = str(error)

    threads = [threading.Thread(target=make, args=(r, g), name=f"rank {r}") for r, g in enumerate(gathers(2))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(180)
    assert told == ["rank 1: no access"] * 2


def test_a_device_whose_streams_cannot_wait_is_out_of_reach(host: Host) -> None:
    can_wait = ctypes.c_int.in_dll(host.library, "host_can_wait")
    can_wait.value = 0
    try:
        with pytest.raises(OutOfReach, match="rank 0: the streams of cuda:0 cannot wait for numbers of 64 bits"):
            Ranks(host, 2)
    finally:
        can_wait.value = 1


def test_many_counters_go_to_the_driver_in_several_calls(host: Host) -> None:
    ranks = Ranks(host, 2)
    engines, counters = ranks.links[0]._engines, ranks.links[0]._counters
    at = counters.address(0, Counter.SENT, 1)
    host.on(0)
    stream = host.stream().cuda_stream
    engines.signal(stream, [(at, number) for number in range(600)], [(at, 599)])
    mark = host.event()
    mark.record(host.stream())
    while not mark.query():
        time.sleep(0.001)
    assert counters.value(Counter.SENT, 1) == 599
    with pytest.raises(RuntimeError, match="cuMemcpyAsync: CUDA_ERROR_INVALID_VALUE"):
        engines.copy(stream, at, at, 1)


@pytest.mark.skipif(not (CUDA / "cuda.h").exists(), reason=f"no cuda.h in {CUDA}: set CUDA_HOME")
def test_the_driver_is_declared_as_by_cuda() -> None:
    options = ("-xc", "-std=gnu11", "-fsyntax-only", "-Wall", "-Werror", "-DWITH_CUDA_H", f"-I{CUDA}")
    subprocess.run([find_compiler(), *options, str(SOURCE)], check=True)
    assert ctypes.sizeof(copy_engines._CopyOperation) == 48
    assert [getattr(copy_engines._CopyOperation, n).offset for n in ("address", "value", "flags")] == [8, 16, 24]
