"""What it costs by the number of ranks to find out who is to blame: counted, with a clock of its own."""

import os
import sys
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from fusionlayer.health import heartbeat, inquiry, processes, watcher
from fusionlayer.health.calls import Call
from fusionlayer.health.heartbeat import Heartbeat
from fusionlayer.health.inquiry import Position
from fusionlayer.health.judge import Evidence
from fusionlayer.health.processes import Processes
from fusionlayer.health.recorder import Recorder
from fusionlayer.health.state import ChannelState, Finding, RankState, decode, encode
from fusionlayer.health.watcher import Watcher
from fusionlayer.process.processes import Identity
from tests.counting import Clock, CountingStore
from tests.tiers import tiered


class Job:
    """Heartbeats of ranks that have met, eight to a host, without the thread that gives them turns."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, world: int) -> None:
        self.clock = Clock(monkeypatch, [heartbeat, inquiry])
        values: dict[str, bytes] = {}
        self.stores = [CountingStore(values) for _ in range(world)]
        self.ended: set[int] = set()
        hosts = {rank: replace(Identity.own(), place=str(rank // 8)) for rank in range(world)}
        self.beats = []
        for rank, store in enumerate(self.stores):
            end, late = (lambda rank=rank: self.ended.add(rank)), (lambda: False)
            each = Heartbeat(store, "w", rank, world, 60.0, 9.0, None, hosts, is_overdue=late, interrupt=end)
            each.keys.begin()
            each.write_state()
            self.beats.append(each)
        for store in self.stores:
            store.requests = store.nbytes = 0

    def enter(self, rank: int, call: Call) -> None:
        self.beats[rank].enter(call, 2)
        position = self.beats[rank].position
        self.beats[rank].position = position._replace(since=self.clock.now + 0.01 * rank / len(self.beats))

    def run(self, seconds: float, *silent: int) -> None:
        self.clock.run({rank: each.tick for rank, each in enumerate(self.beats) if rank not in silent}, seconds)


@pytest.mark.parametrize("world", tiered([256, 1024], fast=lambda world: world == 256))
def test_a_stall_costs_each_rank_little_and_the_job_linearly(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, world: int
) -> None:
    job, call = Job(monkeypatch, world), Call.rows(world, 4096, "the sum of a bucket")
    for rank in range(world):
        if rank != world // 2:
            job.enter(rank, call)
    job.run(13.0)
    nbytes, requests = ([getattr(store, of) for store in job.stores] for of in ("nbytes", "requests"))
    assert max(nbytes) < 2500 * world
    assert sorted(nbytes)[-2] < 4000 and sorted(requests)[-2] < 20, "one rank reads the states of all"
    assert max(requests) < 60
    assert not job.ended and len(caplog.records) == world - 1
    late = f"rank {world // 2} is alive but late: at collective 0 while rank "
    assert all(late in record.message for record in caplog.records), "all name it"


def test_lengths_that_differ_between_two_others_are_found_though_states_lack_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rank 5 sends less than rank 9 expects, rank 0 asks first, and no state has a length until sums differ."""
    world = 16
    job = Job(monkeypatch, world)
    for rank in range(world):
        sends = tuple(7 * (10 * rank + to) - (rank == 5 and to == 9) for to in range(world))
        job.enter(rank, Call("exchange", sends, tuple(7 * (10 * source + rank) for source in range(world))))
    job.run(4.0)
    text = len(job.stores[0].values["w/at/3"])
    job.run(8.0)
    assert len(job.stores[0].values["w/at/3"]) > text + 8 * world
    assert 0 in job.ended
    finding = job.beats[0]._inquirer.finding
    assert finding is not None and (finding.kind, finding.ranks) == ("conflict", (5, 9))
    assert f"rank 5 sends {7 * 59 - 1} bytes to rank 9, which expects {7 * 59} bytes" in finding.text


def test_another_rank_asks_when_the_one_that_has_asked_falls_silent(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    job, call = Job(monkeypatch, 16), Call.rows(16, 4096)
    for rank in range(15):
        job.enter(rank, call)
    job.run(5.02)
    asked = job.stores[0].values["w/ask"].decode()
    assert asked.startswith("0.1.") and "\n" not in asked, "the others await what rank 0 finds"
    job.run(30.0, 0)
    assert any("rank 0 (process" in record.message and "no sign of life" in record.message for record in caplog.records)


def test_a_message_is_blamed_on_its_partner_whoever_asks(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Stages of a pipeline: each waits for the one before, of which the first is late."""
    job = Job(monkeypatch, 4)
    for rank in (1, 2, 3):
        job.beats[rank].position = Position(0, Call("message with tag 0", (), (4,), rank - 1), job.clock.now, ())
    job.run(13.0)
    blamed = {record.args[0]: str(record.args[3]) for record in caplog.records}
    assert {rank: text.partition(" is")[0] for rank, text in blamed.items()} == {
        rank: f"rank {rank - 1}" for rank in (1, 2, 3)
    }


def test_the_process_with_the_store_reads_no_more_of_ranks_that_know_why_it_leaves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(heartbeat.monitor, "note", lambda culprits: None)  # or later tests would find them guilty
    job = Job(monkeypatch, 64)
    keeper = job.beats[0]
    keeper._kept, cause = job.stores[0], Finding("failed", (0,), "rank 0 failed")
    keeper._hear(keeper.keys.settle(cause))
    assert keeper.is_awaited()
    job.run(6.0, 0, 7)  # rank 7 does not look
    assert keeper.is_awaited()
    job.stores[0].nbytes = 0
    assert keeper.is_awaited() and job.stores[0].nbytes < 1000
    job.run(6.0, 0)
    assert not keeper.is_awaited()


@pytest.mark.parametrize("world", tiered([256, 1024], fast=lambda world: world == 256))
def test_watching_costs_each_rank_but_the_first_the_same_whatever_their_number(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, world: int
) -> None:
    """Ranks are eight to a host, and all are in a call of the group of all."""
    monkeypatch.setattr(threading.Thread, "start", lambda thread: None)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    channel = ChannelState(tuple(range(world)), 8, 8, recent=((8, Call("barrier")),))
    monkeypatch.setattr(Recorder, "progress", lambda *_, **__: {"group 0": channel})
    monkeypatch.setattr(Recorder, "detailed", lambda _, channels, **__: channels)
    monkeypatch.setattr(watcher, "counters", dict)
    values: dict[str, bytes] = {}
    stores = [CountingStore(values) for _ in range(world)]
    here = Identity.own()
    jobs = []
    for rank, store in enumerate(stores):
        job = Watcher(store, rank, world, 5.0, tmp_path / str(rank))
        process = here if rank < 8 else replace(here, place=str(rank // 8))
        job._state = replace(job._state, process=process)
        job._reporter._process = process
        jobs.append(job)
    for second in range(12):
        for job in jobs:
            job._tick(1000.0 + second)
        if second == 3:  # the ranks of a host know each other
            for store in stores:
                store.requests = store.nbytes = 0
    for job in jobs:
        job._release()
    assert max(store.requests for store in stores[1:]) <= 12
    assert max(store.nbytes for store in stores[1:]) < 3000
    assert stores[0].nbytes < 8 * 700 * world, "the first rank reads what all write"
    assert jobs[7]._reporter.unknown == () == jobs[world - 1]._reporter.unknown


def test_a_state_has_groups_as_ranges() -> None:
    groups = {"all": range(1024), "row": range(8, 16), "column": range(3, 1024, 8), "pair": (5, 700), "one": (9,)}
    channels = {name: ChannelState(tuple(ranks), 2, 1) for name, ranks in groups.items()}
    state = RankState(3, Identity.own(), 1, channels=channels)
    text = encode(state)
    assert len(text) < 700 and decode(text.encode(), 3, 1024) == state
    many = text.replace("[3, 1027, 8]", "[0, 1000000000000, 1]").encode()
    assert decode(many, 3, 1024) is None and decode(text.encode(), 3, 1000) is None


def test_the_ranks_of_a_host_share_the_time_of_looks_at_its_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    own = Identity.own()
    moments = {"wall": 0.0, "cpu": 0.0}
    monkeypatch.setattr(
        processes, "time", SimpleNamespace(monotonic=lambda: moments["wall"], thread_time=lambda: moments["cpu"])
    )
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(2))

    def waits(ranks: int) -> float:
        """Return the seconds between two looks, each of which takes 1 ms of CPU time."""
        moments["wall"] = 0.0
        seen = Processes(0, ranks, dict.fromkeys(range(1, ranks), own))
        looks = []

        def look() -> list[Evidence]:
            moments["cpu"] += 0.001
            looks.append(moments["wall"])
            return []

        monkeypatch.setattr(seen, "look_around", look)
        while len(looks) < 2:
            seen.see_gone()
            moments["wall"] += 0.01
        return looks[1] - looks[0]

    assert waits(2) == pytest.approx(0.05, abs=0.011)  # 2 % of a core
    assert waits(100) == pytest.approx(2.5, abs=0.011)  # all ranks together 2 % of two cores
