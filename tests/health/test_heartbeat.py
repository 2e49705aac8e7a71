"""What is made of the signs of life, without any ranks."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from fusionlayer.health.calls import Call
from fusionlayer.health.heartbeat import Heartbeat
from fusionlayer.health.inquiry import Inquiry, Position
from fusionlayer.health.judge import Evidence, verdict
from fusionlayer.health.processes import Culprits, Processes
from fusionlayer.health.state import ChannelState, Finding, RankState, StateRequest, encode
from fusionlayer.health.store import StatusKeys, lost_store
from fusionlayer.process.processes import Identity
from fusionlayer.transport import Transport
from fusionlayer.transport.linked import LinkedTransport
from tests.loops import looped

GONE = Evidence(1, "gone", "rank 1 is gone")
STOPPED = Evidence(2, "stopped", "rank 2 is stopped")
SILENT = Evidence(3, "silent", "rank 3 is silent")
LATE = Evidence(4, "late", "rank 4 is late")
FAILED = Evidence(5, "disconnected", "rank 5 failed")
TOLD = Evidence(6, "failed", "rank 9 is gone", (9,))
ALIKE = Evidence(4, "alike", "")
WHOLE = StateRequest(1, 1, 3, 1, whole=1)


def differs(rank: int, n: int) -> Evidence:
    return Evidence(rank, "conflict", f"rank {rank} differs", tuple(sorted((3, rank))), Call.all_reduce(torch.zeros(n)))


@looped(
    "evidence, ranks",
    [
        ([FAILED, LATE, SILENT, TOLD, STOPPED, GONE], (9,)),
        ([FAILED, LATE, SILENT, STOPPED, GONE], (1,)),
        ([FAILED, LATE, SILENT, STOPPED], (2,)),
        ([FAILED, LATE, SILENT], (3,)),
        ([FAILED, LATE], (4,)),
        ([FAILED, Evidence(7, "disconnected", "rank 7 failed")], (5, 7)),
        # Rank 3 judges: who makes another call than all others is the odd one, rank 3 itself or another.
        ([FAILED, ALIKE, differs(1, 5)], (1,)),
        ([FAILED, differs(1, 5)], (1, 3)),
        ([differs(1, 5), differs(2, 5)], (3,)),
        ([differs(1, 5), differs(2, 6)], (1, 3)),
        ([differs(1, 5), differs(2, 5), ALIKE], (1, 3)),
    ],
)
def test_a_cause_is_blamed_before_its_consequences(evidence: list[Evidence], ranks: tuple[int, ...]) -> None:
    finding = verdict(evidence, None)
    assert finding is not None and finding.ranks == ranks


def test_a_cause_names_the_same_ranks_in_one_order_on_all() -> None:
    """Each rank knows itself first."""
    processes = {rank: Identity(100 + rank, "host", "", "") for rank in range(3)}
    cause = Culprits.of(Finding("failed", (1, 2), "a message was damaged"), processes)
    for own in range(3):
        found = cause.among({own: processes[own], **processes})
        assert found is not None and found.ranks == (1, 2)
    assert cause.among({0: processes[0]}) is None


def test_nothing_speaks_against_anybody() -> None:
    assert verdict([], None) is None


def test_the_partner_of_a_message_is_blamed_before_others() -> None:
    call = Call("message with tag 0", sends=(4,), partner=4)
    assert verdict([STOPPED, LATE], call) == Finding("late", (4,), LATE.text)
    assert verdict([STOPPED], call) == Finding("stopped", (2,), STOPPED.text)


def test_a_stopped_rank_may_come_back_and_a_dead_one_may_not() -> None:
    stopped, gone = verdict([STOPPED], None), verdict([GONE], None)
    assert stopped is not None and gone is not None
    assert (stopped.final, gone.final) == (False, True)


def test_a_lost_store_is_blamed_on_its_keeper() -> None:
    store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True, wait_for_workers=False)
    nested = dist.PrefixStore("a", dist.PrefixStore("b", store))
    kept_by_a_rank = lost_store(nested, 3)
    assert kept_by_a_rank.ranks == (3,) and f":{store.port}, kept by rank 3" in kept_by_a_rank.text
    assert lost_store(nested, None).ranks == ()
    assert lost_store(dist.HashStore(), 0).ranks == ()


@pytest.fixture
def sleeper() -> Iterator[tuple[subprocess.Popen[bytes], Identity]]:
    process = subprocess.Popen([sys.executable, "-c", "import time; print(flush=True); time.sleep(60)"], stdout=-1)
    assert process.stdout is not None
    process.stdout.readline()
    own = Identity.own()
    stat = Path(f"/proc/{process.pid}/stat").read_text()
    started = stat[stat.rindex(")") + 2 :].split()[19]
    yield process, replace(own, pid=process.pid, started=started)
    process.kill()
    process.wait()
    process.stdout.close()


@pytest.mark.skipif(not os.path.exists("/proc/self/stat"), reason="without /proc nothing can be seen of a process")
def test_processes_of_this_host_are_looked_at(sleeper: tuple[subprocess.Popen[bytes], Identity]) -> None:
    process, identity = sleeper
    own = Identity.own()
    assert identity.trouble(own) is None
    assert replace(identity, started="1").trouble(own) == "gone"  # another process has its pid now
    assert replace(identity, place="another host", started="1").trouble(own) is None
    process.send_signal(signal.SIGSTOP)
    while identity.trouble(own) is None:
        time.sleep(0.01)
    assert identity.trouble(own) == "stopped"
    process.kill()
    while identity.trouble(own) != "gone":  # though nobody has waited for it yet
        time.sleep(0.01)
    process.wait()
    assert identity.trouble(own) == "gone"


def exchange(sends: list[int], recvs: list[int], rank: int) -> Call:
    xs, ys = ([torch.zeros(n, dtype=torch.uint8) for n in lengths] for lengths in (sends, recvs))
    return Call.exchange(rank, len(sends), dict(enumerate(zip(xs, ys, strict=True))))


def test_calls_that_fit_and_calls_that_do_not() -> None:
    first, second = exchange([0, 5], [0, 6], 0), exchange([6, 1], [5, 1], 1)
    assert first.conflict(0, second, 1) is None and second.conflict(1, first, 0) is None
    wrong = exchange([7, 1], [5, 1], 1)
    expected = "rank 1 sends 7 bytes to rank 0, which expects 6 bytes"
    assert first.conflict(0, wrong, 1) == expected and wrong.conflict(1, first, 0) == expected
    assert (
        first.conflict(0, Call.all_reduce(torch.zeros(3)), 1)
        == "rank 0 is in exchange, rank 1 in all_reduce of 3 x float32"
    )
    assert Call.all_reduce(torch.zeros(3)).conflict(0, Call.all_reduce(torch.zeros(3)), 1) is None


def make_keys(*ranks: int, size: int) -> list[StatusKeys]:
    store = dist.HashStore()
    return [StatusKeys(store, "", rank, size) for rank in ranks]


def write(keys: StatusKeys, answers: str, sequence: int, call: Call | None, *recent: Call, life: str = "runs") -> None:
    """Write a state, whose last calls are ``recent``."""
    first = sequence - len(recent) + 1
    position = Position(sequence, call, 0.0, tuple(enumerate(recent, first)))
    channel = position.channel(keys.rank, whole=answers.endswith(".1"))
    keys.write(RankState(keys.rank, Identity.own(), 1, life, channels={"": channel}, answers=answers))


def test_a_call_that_this_rank_has_completed_is_compared_too() -> None:
    """Who sent less than the others expect may be done, and come to wait for them in a later call."""
    keys, theirs = make_keys(1, 0, size=2)
    processes = Processes(1, 2, {0: Identity.own()})
    short, expected = exchange([0, 0], [9, 0], 1), exchange([0, 9], [0, 9], 0)
    position = Position(3, short, 0.0, ((2, short), (3, short)))

    def evidence(call: Call) -> Evidence:
        write(theirs, "", 2, call, call)
        inquiry = Inquiry(keys, processes, position, WHOLE, 8.0)
        assert not inquiry.step(Finding("unknown", (), "")) and not inquiry.evidence, "rank 0 has not answered"
        write(theirs, WHOLE.question, 2, call, call)
        assert inquiry.step(Finding("unknown", (), ""))
        (sign,) = inquiry.evidence
        return sign

    sign = evidence(expected)
    assert (sign.kind, sign.ranks) == ("conflict", (0, 1))
    assert sign.text.startswith("rank 1 sends 0 bytes to rank 0, which expects 9 bytes")
    assert evidence(exchange([0, 9], [0, 0], 0)).kind == "late", "the calls fit"


def test_all_ranks_are_heard_before_one_of_two_that_differ_is_blamed() -> None:
    """However long that takes: a busy machine may keep one of them from answering."""
    keys, *others = make_keys(0, 1, 2, size=3)
    mine, other = Call.all_reduce(torch.zeros(3)), Call.all_reduce(torch.zeros(4))
    position, nothing = Position(2, mine, 0.0, ((2, mine),)), Finding("unknown", (), "")
    for last in ("alike", "failed", "late"):
        for each, call in zip(others, (other, mine), strict=True):
            write(each, "", 2, call, call)
        inquiry = Inquiry(keys, Processes(0, 3, {2: Identity.own()}), position, StateRequest(0, 1, 2, 1), 8.0)
        asked = inquiry.request.question
        write(others[0], asked, 2, other, other)
        assert not inquiry.step(nothing)
        inquiry._started -= 10.0
        assert not inquiry.step(nothing), "rank 2 has not answered"
        write(others[1], asked, 1, None, mine)
        assert not inquiry.step(nothing), "rank 2 has not come to the call"
        if last == "late":
            inquiry._started -= 10.0
        else:
            write(others[1], asked, 2, mine, mine, mine, life="failed" if last == "failed" else "runs")
        assert inquiry.step(nothing)
        finding = verdict(inquiry.evidence, mine)
        assert finding is not None and finding.ranks == ((0, 1) if last == "late" else (1,)), last
    # Where no calls differ, a late rank is a finding at once.
    inquiry = Inquiry(keys, Processes(0, 3, {}), position, StateRequest(0, 2, 2, 1), 8.0)
    for each, sequence in zip(others, (2, 1), strict=True):
        write(each, inquiry.request.question, sequence, mine if sequence == 2 else None, mine)
    assert inquiry.step(nothing)
    finding = verdict(inquiry.evidence, mine)
    assert finding is not None and finding.ranks == (2,)


def test_messages_that_pair_and_messages_that_do_not() -> None:
    send, recv = Call.send(torch.zeros(3), 0, 1, 7, 3), Call.recv(torch.zeros(3), 1, 0, 7, 3)
    assert send.conflict(0, recv, 1) is None and recv.conflict(1, send, 0) is None
    longer = Call.recv(torch.zeros(4), 1, 0, 7, 3)
    assert send.conflict(0, longer, 1) == "rank 0 sends 12 bytes to rank 1, which expects 16 bytes"
    assert longer.conflict(1, send, 0) == send.conflict(0, longer, 1)
    other_tag, other_rank = Call.recv(torch.zeros(4), 1, 0, 8, 3), Call.recv(torch.zeros(4), 1, 2, 7, 3)
    assert send.conflict(0, other_tag, 1) is None and send.conflict(0, other_rank, 1) is None
    assert "both wait to send" in str(send.conflict(0, Call.send(torch.zeros(3), 1, 0, 7, 3), 1))


class Unlinked(LinkedTransport):
    """A transport without links, which makes calls that send nothing."""

    def duplicate(self) -> Transport:
        raise NotImplementedError

    def subset(self, ranks: Sequence[int]) -> Transport:
        raise NotImplementedError

    def key_of(self, call: Call, sequence: int) -> int:
        keys: list[int] = []
        self._begin(0, 2, 1.0)
        self.sequence = sequence - 1
        self._run(call, keys.append)
        return keys[0]


def test_keys_tell_calls_apart() -> None:
    key_of = Unlinked().key_of
    a, b = Call.all_reduce(torch.zeros(3)), Call.all_reduce(torch.zeros(3, dtype=torch.int32))
    assert (
        len({key_of(a, 1), key_of(a, 2), key_of(b, 1), key_of(b, 2), key_of(Call.broadcast(torch.zeros(3), 0, 2), 1)})
        == 5
    )
    byte = torch.zeros(1, dtype=torch.uint8)
    whole, mean = (Call.exchange(0, 2, dict.fromkeys((0, 1), (byte, byte)), purpose) for purpose in ("a sum", "a mean"))
    assert key_of(whole, 1) != key_of(mean, 1), "calls of equal sizes for different purposes"
    assert whole.conflict(0, mean, 1) == "rank 0 is in a sum, rank 1 in a mean"
    assert whole.conflict(0, a, 1) == "rank 0 is in a sum, rank 1 in all_reduce of 3 x float32"


def test_the_first_finding_is_that_of_all_ranks() -> None:
    store = dist.HashStore()
    watches = [
        Heartbeat(store, "", rank, 3, 8.0, 5.0, None, is_overdue=lambda: False, interrupt=lambda: None)
        for rank in range(3)
    ]
    with ThreadPoolExecutor(3) as threads:
        assert [finding for _, finding in threads.map(lambda watch: watch.meet(10.0), watches)] == [None] * 3
    findings = [Finding("conflict", (2 - rank,), f"rank {2 - rank} is odd") for rank in range(3)]
    told = [watch.diagnose(own, known=own) for watch, own in zip(watches, findings, strict=True)]
    for watch in watches:
        watch.end()
    assert told == [findings[0]] * 3


@pytest.mark.parametrize("kind", ["stopped", "late"])
def test_a_wait_ends_when_another_rank_has_failed_even_where_its_cause_may_pass(kind: str) -> None:
    """As that of the rank which had been stopped, and now waits for ranks that have given up."""
    store, interrupted = dist.HashStore(), threading.Event()
    mine, other = (
        Heartbeat(store, kind, rank, 2, 8.0, 900.0, None, is_overdue=lambda: False, interrupt=act)
        for rank, act in enumerate((interrupted.set, lambda: None))
    )
    with ThreadPoolExecutor() as threads:
        assert [finding for _, finding in threads.map(lambda each: each.meet(5.0), (mine, other))] == [None, None]
    mine.enter(Call("barrier"), 1)
    cause = Finding(kind, (0,), f"rank 0 is {kind}")
    other.diagnose(cause, known=cause)
    assert interrupted.wait(60)
    mine.end()
    other.end()


def test_who_looks_for_a_cause_ends_when_its_transport_is_closed() -> None:
    """As a lane's is, because another lane has failed first; the other rank has failed too, and does not know why."""
    store = dist.HashStore()
    watches = [
        Heartbeat(store, "e", rank, 2, 1000.0, 900.0, None, is_overdue=lambda: False, interrupt=lambda: None)
        for rank in range(2)
    ]
    with ThreadPoolExecutor() as threads:
        assert [finding for _, finding in threads.map(lambda watch: watch.meet(5.0), watches)] == [None, None]
    first, second = watches
    second._farewell = "failed", None
    second.write_state()
    first._interval = 1000.0
    otherwise, found = Finding("disconnected", (1,), "the connection was lost"), []
    looking = threading.Thread(target=lambda: found.append(first.diagnose(otherwise)), daemon=True)
    looking.start()
    while not first._inquirer.is_busy and looking.is_alive():
        time.sleep(0.001)
    first.end()
    looking.join(180)
    assert found == [otherwise]
    second.end()


@pytest.mark.parametrize(
    "keeper, silent, blamed", [(0, True, (0,)), (0, False, (2,)), (2, True, (2,)), (None, True, (2,))]
)
def test_a_rank_that_has_gone_explains_a_silent_store_only_if_it_keeps_it(
    monkeypatch: pytest.MonkeyPatch, keeper: int | None, silent: bool, blamed: tuple[int, ...]
) -> None:
    """Rank 2 has gone, perhaps because rank 0 was stopped, of which this rank, 1, knows no process yet."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    known = {2: replace(Identity.own(), started="long ago")}
    watch = Heartbeat(store, "w", 1, 3, 2.0, 60.0, keeper, known, is_overdue=lambda: False, interrupt=lambda: None)
    monkeypatch.setattr(watch, "because", lambda: None)  # what this process remembers of other tests
    assert watch.judge_here(is_silent=silent).ranks == blamed


RIGHT = json.loads(encode(RankState(1, Identity.own(), 9, channels={"": ChannelState((), 1, 0, Call("exchange"))})))
GARBAGE = [
    b"",
    b"{",
    b"null",
    b"[]",
    b"\xff\xfe",
    b"[" * 100_000,
    b'{"life": "runs"}',
    b" " * ((1 << 24) + 1),
    *(
        json.dumps(RIGHT | wrong).encode()
        for wrong in (
            {"serial": "9"},
            {"channels": {"": {"ranks": [], "entered": 1, "done": 0, "call": {"what": 1}}}},
            {"channels": {"": {"ranks": [], "entered": 1, "done": 0, "recent": [[1, None]]}}},
            {"channels": {"": {"ranks": [], "entered": 1, "done": 0, "call": {"what": "exchange", "sends": [1]}}}},
            {"channels": {"": {"ranks": [], "entered": 1, "done": 0, "call": {"what": "message", "partner": 2}}}},
            {"finding": {"kind": "failed", "ranks": [7], "text": "x"}},
        )
    ),
]


def test_any_value_in_the_store_is_survived_and_the_last_to_leave_deletes_all(caplog: pytest.LogCaptureFixture) -> None:
    store = dist.HashStore()
    watches = [
        Heartbeat(store, "w", rank, 2, 2.0, 60.0, None, is_overdue=lambda: False, interrupt=lambda: None)
        for rank in range(2)
    ]
    with ThreadPoolExecutor() as threads:
        assert [finding for _, finding in threads.map(lambda watch: watch.meet(5.0), watches)] == [None, None]
    first, second = watches
    for text in GARBAGE:
        store.set("w/at/1", text)
        assert first.keys.read([1]) == {}, text[:100]
    second.write_state = lambda: store.set("w/at/1", "{}")  # type: ignore[method-assign]
    first.enter(Call.all_reduce(torch.zeros(3)), 1)
    store.set("w/ask", "\0" * 100_000)
    store.set("w/cause", '{"kind": "gone", "ranks": [7], "text": "x"}')
    finding = first.diagnose(otherwise=Finding("unknown", (), ""))
    assert finding.ranks == (1,) and "gives no sign of life" in finding.text
    store.delete_key("w/at/1")
    assert first.keys.read([1]) == {}
    store.delete_key("w/ask")
    deadline = time.monotonic() + 180
    while not store.check(["w/ask"]):
        assert time.monotonic() < deadline, "the thread that watches has ended"
        time.sleep(0.05)
    warned = [record.message for record in caplog.records if "makes no sense" in record.message]
    assert 1 <= len(warned) == len(set(warned)) <= 2, "once on each rank"
    assert Identity.decode(b"not what a rank writes").trouble(Identity.own()) is None
    for watch in watches:
        watch.end()
    while store.num_keys():
        assert time.monotonic() < deadline, "keys are left"
        time.sleep(0.05)
