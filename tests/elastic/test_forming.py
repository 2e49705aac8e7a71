"""Members agree on the next generation, whoever is lost meanwhile. They are threads, each with a store of its own."""

import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from fusionlayer.base.errors import TransportError
from fusionlayer.elastic import forming as elastic_forming
from fusionlayer.elastic.forming import NEWEST, PATIENCE, TICKETS, Final, Former, ask_to_join
from fusionlayer.elastic.generation import Generation, Member, MemberAddress, MemberReport, encode_member
from fusionlayer.elastic.member_store import DistantStore, open_store
from fusionlayer.process.processes import Identity
from tests.loops import looped
from tests.transport.relays import Relay


class FormingMember:
    """A member as a thread has it. ``close`` is how it is lost: its port is closed then."""

    def __init__(self, number: int, timeout: float = 180) -> None:
        self.store: Any
        self.store, where = open_store(True, PATIENCE)
        # No process that can be looked up: whether it lives, only its port tells.
        self.me = Member(f"m{number}", where, Identity(0, "elsewhere", "", "").encode())
        self.next: list[Any] = []
        self.former = Former(self.me, self.store, timeout, self._open_next)

    def _open_next(self) -> MemberAddress:
        store, where = open_store(True, PATIENCE)
        self.next.append(store)
        return where

    def close(self) -> None:
        self.store = self.former = None  # type: ignore[assignment]


def begun(count: int, timeout: float = 180) -> tuple[list[FormingMember], Generation]:
    members = [FormingMember(number, timeout) for number in range(count)]
    first = Generation(0, tuple(member.me for member in members), (), 0, members[0].me.address)
    for member in members:
        member.store.set(NEWEST, first.encode())
    return members, first


def at_once(*calls: Callable[[], Any]) -> list[Any]:
    with ThreadPoolExecutor(len(calls)) as pool:
        return [each.result(timeout=180) for each in [pool.submit(call) for call in calls]]


def forming(member: FormingMember, report: MemberReport, blamed: tuple[str, ...] = ()) -> Callable[[], Generation]:
    return lambda: member.former.form(report, blamed)


def ids(generation: Generation) -> list[str]:
    return [each.id for each in generation.members]


@pytest.mark.parametrize("lost", [0, 1, 3])
def test_those_who_are_left_form_the_next_generation_in_their_order(lost: int) -> None:
    members, first = begun(4)
    members[lost].close()
    left = [member for member in members if member.store is not None]
    found = at_once(*(forming(member, MemberReport(first, 7, False)) for member in left))
    assert {each.encode() for each in found} == {found[0].encode()}
    assert ids(found[0]) == [member.me.id for member in left] and found[0].number == 1 and found[0].done == 7


def test_who_waits_for_a_change_reads_a_number_and_the_generation_when_it_is_new(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The generation has a text for each member, and each member waits: the store would send N^2 texts in each poll."""
    members, first = begun(3)
    asked: Counter[str] = Counter()
    has_waited = threading.Event()
    for kind in ("get", "add"):
        ask = getattr(DistantStore, kind)

        def count(self: DistantStore, *given: Any, ask: Any = ask) -> Any:
            asked[given[0]] += 1
            if asked["written"] > 40:
                has_waited.set()
            return ask(self, *given)

        monkeypatch.setattr(DistantStore, kind, count)

    def late() -> Generation:
        assert has_waited.wait(180)
        return forming(members[2], MemberReport(first, 7, False))()

    found = at_once(late, *(forming(member, MemberReport(first, 7, False)) for member in members[:2]))
    assert {each.number for each in found} == {1}
    assert asked["written"] > 40 and asked[NEWEST] <= 6


def test_a_step_counts_if_one_who_is_left_has_its_results_and_who_lacks_them_is_known_to_all() -> None:
    members, first = begun(3)
    for done, counts, behind in (((8, 8, 8), 8, ()), ((8, 7, 7), 8, ("m1", "m2")), ((7, 7, 7), 7, ())):
        reports = [MemberReport(first, each, False) for each in done]
        found = at_once(*(forming(member, report) for member, report in zip(members, reports, strict=True)))
        assert [(each.done, each.behind) for each in found] == [(counts, behind)] * 3
        first = found[0]


def test_nobody_joins_while_a_member_lacks_results() -> None:
    members, first = begun(2)
    guest = FormingMember(9)
    number = members[0].store.add(TICKETS, 1)
    members[0].store.set(f"knock/{number}", encode_member(guest.me))
    reports = MemberReport(first, 5, True), MemberReport(first, 4, True)
    found = at_once(*(forming(member, report) for member, report in zip(members, reports, strict=True)))
    assert [(ids(each), each.behind) for each in found] == [(["m0", "m1"], ("m1",))] * 2


@pytest.mark.parametrize("reader", [1, 3])
def test_a_leader_that_is_lost_before_all_have_read_is_followed_by_the_next(reader: int) -> None:
    """One rank has read the generation that rank 0 has formed; the others, with the next leader, know an older one."""
    members, first = begun(4)
    formed = at_once(*(forming(member, MemberReport(first, 3, False)) for member in members))[0]
    members[0].close()
    found = at_once(*(forming(members[n], MemberReport(formed if n == reader else first, 3, False)) for n in (2, 1, 3)))
    assert {each.number for each in found} == {2} and all(ids(each) == ["m1", "m2", "m3"] for each in found)


def test_a_process_joins_when_all_are_between_two_steps_and_not_before() -> None:
    members, first = begun(2)
    guest = FormingMember(9)
    joining = threading.Thread(target=lambda: joined.append(ask_to_join(guest.me, lambda: [members[1].me.address], 30)))
    joined: list[Generation] = []
    joining.start()
    while not members[0].former.has_visitors():
        pass
    first = at_once(*(forming(member, MemberReport(first, 4, False)) for member in members))[0]
    assert ids(first) == ["m0", "m1"] and members[0].former.has_visitors()
    found = at_once(*(forming(member, MemberReport(first, 5, True)) for member in members))
    joining.join(180)
    assert {each.encode() for each in [*found, *joined]} == {found[0].encode()} and joined
    assert ids(found[0]) == ["m0", "m1", "m9"] and found[0].fresh == ("m9",) and found[0].done == 5
    assert not members[0].former.has_visitors()


def behind_a_relay(member: FormingMember) -> Relay:
    """Let others reach a member's store through a relay, whose port stays open while the store answers nothing."""
    relay = Relay(("127.0.0.1", member.me.address.port))
    member.me = replace(member.me, address=replace(member.me.address, port=relay.address[1]))
    member.former = Former(member.me, member.store, 30.0, member._open_next)
    return relay


def test_a_leader_that_is_stopped_while_others_report_is_left_out_by_more_than_half(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(elastic_forming, "_BLAMED", 0.0)
    members, first = begun(3)
    relay, reported = behind_a_relay(members[0]), set()

    def swallow(place: int, from_caller: bool, passed: int, data: bytes) -> bytes:
        if b"report/" in data:
            reported.add(place)
        return b"" if place in reported else data

    relay.alter = swallow
    first = replace(first, members=tuple(member.me for member in members))
    found = at_once(*(forming(member, MemberReport(first, 7, False), blamed=("m0",)) for member in members[1:]))
    relay.close()
    assert len(reported) == 2
    assert {each.encode() for each in found} == {found[0].encode()}
    assert ids(found[0]) == ["m1", "m2"]


def test_a_leader_that_was_late_is_followed_if_the_others_are_no_more_than_half(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(elastic_forming, "PATIENCE", 1.0)
    members, first = begun(2)
    relay, gate = behind_a_relay(members[0]), threading.Event()
    relay.holding = dict.fromkeys(range(100), gate)
    first = replace(first, members=tuple(member.me for member in members))
    skipped, lead = threading.Event(), members[1].former._lead

    def note(*given: Any) -> Any:
        skipped.set()
        return lead(*given)

    def come_late() -> Generation:
        assert skipped.wait(180)
        gate.set()
        return members[0].former.form(MemberReport(first, 6, False))

    members[1].former._lead = note  # type: ignore[assignment, method-assign]
    found = at_once(come_late, forming(members[1], MemberReport(first, 7, False)))
    relay.close()
    assert {each.encode() for each in found} == {found[0].encode()}
    assert ids(found[0]) == ["m0", "m1"] and found[0].done == 7 and found[0].behind == ("m0",)


def test_no_more_than_half_do_not_go_on_if_nobody_knows_what_became_of_the_others() -> None:
    members, first = begun(2, timeout=0.5)  # the other is silent, and its port is open
    with pytest.raises(TransportError, match="1 of 2 members are left, and it is unknown whether the others go on"):
        members[0].former.form(MemberReport(first, 1, False))
    members[1].close()
    members[0].former._ends._refused.clear()
    assert ids(members[0].former.form(MemberReport(first, 1, False))) == ["m0"]


def test_who_was_left_out_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elastic_forming, "_BLAMED", 0.0)
    members, first = begun(3)
    at_once(*(forming(member, MemberReport(first, 1, False), blamed=("m2",)) for member in members[:2]))
    with pytest.raises(Final, match="generation 1 of the job goes on without this process"):
        members[2].former.form(MemberReport(first, 1, False))


def test_nobody_goes_on_without_a_member_that_has_the_state() -> None:
    members, first = begun(2)
    first = replace(first, fresh=("m1",))
    members[0].close()
    with pytest.raises(Final, match="no process is left that has the job's state"):
        members[1].former.form(MemberReport(first, -1, True))


@looped("text", ["", "{}", "[1]", '{"generation": 3}', "\\x00", '{"number": 0, "members": 7}'])
def test_what_makes_no_sense_is_told(text: str) -> None:
    with pytest.raises(TransportError, match="makes no sense"):
        Generation.decode(text)
    with pytest.raises(TransportError, match="makes no sense"):
        MemberReport.decode(text)
