"""Who is to blame, from where ranks are."""

import pickle
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist

from fusionlayer.health.calls import Call
from fusionlayer.health.judge import judge
from fusionlayer.health.recorder import Recorder, _blocks
from fusionlayer.health.reporter import Reporter
from fusionlayer.health.state import BLOCK, ChannelState, LinkState, RankState, decode, encode
from fusionlayer.health.store import StatusKeys
from fusionlayer.health.tcp import Links, TcpCounters
from fusionlayer.health.waits import UsualWait
from fusionlayer.process.processes import Identity
from tests.loops import looped

ME = Identity.own()


def ranks(*entered: int, done: int = 7, where: str = "train.py:9") -> dict[int, RankState]:
    """Return ranks of one group; those that have entered more calls than are done have waited for long."""
    every = tuple(range(len(entered)))
    return {
        rank: RankState(
            rank,
            ME,
            1,
            idle=6.0,
            waits=calls > done,
            doing="is in all_reduce" if calls > done else "is",
            where=where if calls > done else f"data.py:{rank}",
            channels={
                "group 0": ChannelState(every, calls, done, Call("all_reduce of (4) float32") if calls > done else None)
            },
        )
        for rank, calls in enumerate(entered)
    }


def with_calls(states: dict[int, RankState], *whats: str, first: int = 7) -> dict[int, RankState]:
    """Return the ranks with the calls that each has made, "a, b"."""
    found = {}
    for (rank, state), what in zip(states.items(), whats, strict=True):
        calls = tuple((first + i, Call(each, where=f"train.py:{rank}{i}")) for i, each in enumerate(what.split(", ")))
        channel = replace(state.channels["group 0"], recent=calls)
        found[rank] = replace(state, channels={"group 0": channel})
    return found


def test_a_healthy_job_has_no_finding() -> None:
    assert judge(ranks(7, 7, 7), {}) == []
    busy = ranks(8, 8, 7)
    assert judge({rank: replace(state, waits=False) for rank, state in busy.items()}, {}) == []


def test_the_rank_that_has_not_come_is_late_and_its_line_is_named() -> None:
    (found,) = judge(ranks(8, 7, 8), {})
    assert (found.kind, found.ranks) == ("late", (1,))
    assert "is at data.py:1" in found.text and "ranks 0, 2 wait" in found.text and "train.py:9" in found.text
    loading = ranks(8, 8, 7)
    loading[2] = replace(loading[2], doing="waits for data")
    (found,) = judge(loading, {})
    assert found.ranks == (2,) and "waits for data at data.py:2" in found.text


def test_a_rank_that_has_ended_is_in_no_call_whatever_its_last_state_shows() -> None:
    states = ranks(9, 8, 9)
    states[1] = replace(states[1], life="ended", waits=False)
    (found,) = judge(states, {})
    assert (found.kind, found.ranks) == ("ended", (1,)) and "rank 1 has ended; ranks 0, 2 wait for it" in found.text


def test_a_rank_is_not_reported_late_from_a_state_older_than_the_wait(tmp_path: Path) -> None:
    reporter = Reporter(0, 3, ME, tmp_path / "status.json")
    for state in ranks(8, 7, 8).values():
        reporter.hear(state, 100.0 if state.rank == 1 else 104.0)
    reporter.report(104.5, None)  # rank 1 was read 4.5 s ago, when the others had begun to wait
    assert [line.partition(";")[0] for line in reporter.lines] == ["rank 1 is late: it is at data.py:1"]
    reporter = Reporter(0, 3, ME, tmp_path / "status.json")
    waiting = {rank: replace(state, idle=3.0) for rank, state in ranks(8, 7, 8).items()}
    for state in waiting.values():
        reporter.hear(state, 100.0 if state.rank == 1 else 102.5)
    reporter.report(102.5, None)
    assert reporter.lines == []
    loading = replace(waiting[1], serial=2, doing="waits for data")
    reporter.hear(loading, 103.0)
    reporter.report(103.0, None)
    assert len(reporter.lines) == 1 and "it waits for data" in reporter.lines[0]
    # A rank that writes nothing for 5 s is reported with what is known of it.
    reporter = Reporter(0, 3, ME, tmp_path / "status.json")
    for state in ranks(8, 7, 8).values():
        reporter.hear(replace(state, idle=5.5), 100.0 if state.rank == 1 else 104.9)
    reporter.report(104.9, None)
    assert reporter.lines == []
    reporter.report(105.0, None)
    assert len(reporter.lines) == 1


def test_lines_that_come_after_a_conflict_was_reported_are_reported_too(tmp_path: Path) -> None:
    reporter, keys = Reporter(0, 3, ME, tmp_path / "status.json"), StatusKeys(dist.HashStore(), "", 0, 3)
    keys.begin()
    calls = with_calls(ranks(7, 7, 7), "all_reduce of (4) float32", "barrier", "all_reduce of (4) float32")
    for state in calls.values():
        bare = {
            name: replace(each, recent=((7, replace(each.recent[0][1], where="")),))
            for name, each in state.channels.items()
        }
        reporter.hear(replace(state, channels=bare), 100.0)
    reporter.report(100.0, keys)
    assert reporter.lines == [] and keys.news()[0].startswith("group 0 7")
    for now in (104.0, 105.0):
        reporter.report(now, keys)
        assert (
            len(reporter.lines) == 1
            and "rank 1 in barrier" in reporter.lines[0]
            and "train.py" not in reporter.lines[0]
        )
    for state in calls.values():
        reporter.hear(replace(state, serial=2), 106.0)
    for now in (106.0, 107.0):
        reporter.report(now, keys)
        assert len(reporter.lines) == 2 and "rank 1 in barrier at train.py:10" in reporter.lines[1]


def test_who_waits_for_another_is_not_blamed() -> None:
    states = ranks(8, 7, 7)
    other = ChannelState((1, 2), 3, 2, Call("all_gather of (2) float32"))
    states[1] = replace(states[1], waits=True, channels={**states[1].channels, "group 1": other})
    states[2] = replace(states[2], channels={**states[2].channels, "group 1": replace(other, entered=2)})
    assert [found.ranks for found in judge(states, {})] == [(2,)]


def test_ranks_that_wait_for_each_other_are_told_so() -> None:
    states = ranks(8, 7)
    group = ChannelState((0, 1), 4, 3, Call("barrier"))
    states[0] = replace(states[0], channels={**states[0].channels, "group 1": replace(group, entered=3)})
    states[1] = replace(states[1], waits=True, channels={**states[1].channels, "group 1": group})
    (found,) = judge(states, {})
    assert (found.kind, found.ranks) == ("conflict", (0, 1)) and "barrier" in found.text


def test_of_ranks_that_wait_for_each_other_the_one_in_another_group_is_odd() -> None:
    states = ranks(8, 7, 8)
    group = ChannelState((0, 1, 2), 4, 3, Call("barrier"))
    for rank, state in states.items():
        mine = group if rank == 1 else replace(group, entered=3)
        states[rank] = replace(state, waits=True, channels={**state.channels, "group 1": mine})
    (found,) = judge(states, {})
    assert (found.kind, found.ranks) == ("conflict", (1,)) and "calls: rank 1" in found.text


def linked(slow: dict[int, int], held_up: dict[int, tuple[int, ...]]) -> dict[int, RankState]:
    """Return ranks that wait in one call, of which some have a slow link to another, or connections that wait."""
    states = ranks(8, 8, 8)
    return {
        rank: replace(
            state,
            ends=(f"10.0.0.{rank}:1",),
            links=tuple(LinkState("here", f"10.0.0.{to}:1", 1e6, 1e7) for of, to in slow.items() if of == rank),
            held_up=tuple(f"10.0.0.{to}:1" for to in held_up.get(rank, ())),
        )
        for rank, state in states.items()
    }


def test_of_a_slow_link_the_end_is_blamed_whose_other_connections_wait_too() -> None:
    cases = [
        ({1: 0}, {}, (0, 1)),
        ({1: 0}, {1: (0,), 2: (1,)}, (1,)),  # acknowledgements of what rank 2 sends wait where rank 1's data wait
        ({1: 0}, {1: (0,), 0: (2,)}, (0,)),
        ({1: 0, 2: 1}, {}, (1,)),
        ({1: 0}, {0: (1,)}, (0, 1)),
    ]
    for slow, held_up, blamed in cases:
        (found,) = judge(linked(slow, held_up), {})
        assert (found.kind, found.ranks) == ("slow", blamed), (slow, held_up)


def test_connections_whose_round_trips_become_long_are_told_while_data_go() -> None:
    links = Links()
    ends = ("10.0.0.1:1", "10.0.0.2:1")
    trips = [0.001, 0.001, 0.0012, 0.05, 0.05, 0.001]
    told = []
    for number, trip in enumerate(trips):
        links.look(float(number), {ends: TcpCounters((number + 1) << 20, 0, 0.1 * number, trip)})
        told.append(links.held_up)
    assert told == [(), (), (), (ends[1],), (ends[1],), ()]
    links.look(9.0, {ends: TcpCounters(6 << 20, 0, 0.6, 0.05)})
    assert links.held_up == (), "nothing was sent"


def test_a_link_is_slow_only_while_it_has_much_to_send() -> None:
    ends, mega = ("10.0.0.1:1", "10.0.0.2:1"), 1 << 20
    for busy, is_slow in ((0.1, False), (0.9, True)):
        links, sent, spent, found = Links(), 0, 0.0, []
        for number in range(12):  # 10 MB/s, and then a tenth of that
            share, rate = (1.0, 10 * mega) if number < 6 else (busy, mega)
            sent, spent = sent + int(rate * share), spent + share
            found.append(bool(links.look(float(number), {ends: TcpCounters(sent, 0, spent)})))
        assert not any(found[:6]) and found[-1] == is_slow, busy


def test_groups_whose_names_come_late_are_looked_for_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job that fails within its first seconds is told with its calls, though names are looked for ever less."""
    recorder, world = Recorder(), dist.distributed_c10d._world
    group, entry = object(), {"process_group": ("", ""), "pg_id": 0, "is_p2p": True}
    status = {"0": {"last_enqueued_collective": 3, "last_completed_collective": 2}}
    recorder._dumps = [lambda *given: pickle.dumps({"pg_status": status, "entries": [entry] if given[0] else []})]
    monkeypatch.setitem(world.pg_names, group, "0")  # type: ignore[arg-type]
    monkeypatch.setitem(world.pg_group_ranks, group, {0: 0, 1: 1})  # type: ignore[arg-type]
    assert "group 0" not in recorder.progress()
    entry["process_group"] = ("0", "default_pg")
    assert "group 0" not in recorder.progress()
    assert recorder.progress(anew=True)["group 0"] == ChannelState((0, 1), 3, 2)


def test_a_receive_blames_the_rank_that_it_waits_for() -> None:
    states = ranks(7, 7, 7)
    states[0] = replace(states[0], waits=True, peer=2, doing="is in recv")
    (found,) = judge(states, {})
    assert found.ranks == (2,) and "in recv from it" in found.text


@looped("kind", ["gone", "stopped", "silent"])
def test_a_process_in_trouble_comes_before_those_that_wait_for_it(kind: str) -> None:
    (found,) = judge(ranks(8, 7, 8), {1: kind})
    assert (found.kind, found.ranks) == (kind, (1,)) and "data.py:1" in found.text


def test_the_odd_call_is_named_with_its_line() -> None:
    same, other = "all_reduce of (4) float32", "all_reduce of (5) float32"
    (found,) = judge(with_calls(ranks(8, 8, 8), same, f"{other}", same), {})
    assert (found.kind, found.ranks) == ("conflict", (1,))
    assert "rank 1 in all_reduce of (5) float32 at train.py:10" in found.text and "ranks 0, 2" in found.text


def test_of_two_ranks_the_one_is_odd_whose_call_nobody_has_made_before() -> None:
    same, other = "all_reduce of (4) float32", "all_reduce of (4) float64"
    for odd, calls in ((1, (same, other)), (0, (other, same))):
        (found,) = judge(with_calls(ranks(8, 8), *(f"{same}, {call}" for call in calls)), {})
        assert found.ranks == (odd,)
    (found,) = judge(with_calls(ranks(8, 8), f"{same}, barrier", f"{same}, {other}"), {})
    assert found.ranks == (0, 1)


def test_calls_whose_shapes_may_differ_are_alike() -> None:
    assert judge(with_calls(ranks(7, 7), "all_to_all of (4) float32", "all_to_all of (6) float32"), {}) == []


def test_calls_that_are_over_are_compared_by_blocks() -> None:
    states = ranks(900, 1000, done=1000)
    for rank, total in enumerate((11, 12)):
        channel = replace(states[rank].channels["group 0"], blocks={"3": total, "4": 5})
        states[rank] = replace(states[rank], channels={"group 0": channel})
    (found,) = judge(states, {})
    assert "from 192 to 255" in found.text and found.calls == "group 0 192 255"


@looped(
    "what, alike", [("gather of ({}) uint8", True), ("scatter of ({}) uint8", True), ("reduce of ({}) uint8", False)]
)
def test_blocks_of_equal_calls_are_equal_though_shapes_may_differ(what: str, alike: bool) -> None:
    first, second = (_blocks([(i, Call(what.format(n))) for i in range(2 * BLOCK)]) for n in (1, 2))
    assert len(first) == 2 and (first == second) == alike
    assert [*_blocks([(i, Call("barrier")) for i in range(1, 3 * BLOCK - 1)])] == ["1"], "others are not whole"


def test_an_exception_is_the_cause_of_connections_that_are_lost() -> None:
    states = ranks(8, 7, 8)
    states[0] = replace(states[0], life="failed", error="RuntimeError: Connection closed by peer [::1]")
    states[1] = replace(states[1], life="failed", error="ValueError: bad label", where="train.py:3")
    (found,) = judge(states, {})
    assert (found.kind, found.ranks) == ("failed", (1,)) and "bad label at train.py:3" in found.text
    states[1] = replace(states[1], life="ended", error="")
    (found,) = judge(states, {})
    assert (found.kind, found.ranks) == ("ended", (1,))


@looped("text", [b"", b"{", b"[]", b"3", b'{"rank": 1}', b"\xff\xfe", b'{"rank": {}, "process": 1}'])
def test_what_no_rank_has_written_is_no_state(text: bytes) -> None:
    assert decode(text, 1, 2) is None


def test_a_state_comes_back_as_it_was_written_and_only_from_its_rank() -> None:
    state = with_calls(ranks(8, 8), "barrier", "barrier")[1]
    assert decode(encode(state).encode(), 1, 2) == state
    assert decode(encode(state).encode(), 0, 2) is None
    assert decode(encode(replace(state, peer=2)).encode(), 1, 2) is None


def test_a_wait_is_long_only_if_it_is_longer_than_usual() -> None:
    usual = UsualWait(5.0)
    for step in range(50):
        usual.note(step * 1.0, {"group 0": (step, step)})
    assert not usual.is_long(53.0) and usual.is_long(54.5)
    slow = UsualWait(5.0)
    for step in range(50):
        slow.note(step * 4.0, {"group 0": (step, step)})
    assert not slow.is_long(49 * 4.0 + 11) and slow.is_long(49 * 4.0 + 13)


def test_one_long_wait_does_not_become_usual() -> None:
    usual = UsualWait(5.0)
    now = 0.0
    for step in range(50):
        now += 60.0 if step == 20 else 1.0
        usual.note(now, {"group 0": (step, step)})
    assert usual.is_long(now + 6.0)
