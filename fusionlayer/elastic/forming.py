"""How the remaining members, and newcomers, agree on the next generation.

The member with the lowest rank that still lives leads. The others report their progress to its store. When all that
live have done so, the leader writes the next generation there. If the leader is lost meanwhile, they go to the next.

Two halves of a job must not both continue. So a generation needs more than half of the last one's members, or proof
that each of the others has ended.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from torch.distributed import Store

from ..base.errors import TransportError
from ..health.processes import Ends
from ..process import outages
from .generation import Generation, Member, MemberAddress, MemberReport, decode_member, encode_member
from .member_store import DistantStore, is_reachable, names

_logger = logging.getLogger("fusionlayer")

# Seconds between two looks at a number in a store: a share of the time waited so far, at least, and ``_LOOK`` at most.
_POLL, _POLL_SHARE = 0.004, 0.125
# Seconds between two looks at whether a process still lives: on this host, and by a connection to another.
_LOOK, _PROBE = 0.05, 0.5
# Seconds that a member has to report which others blame for the change and which no process can see to have ended.
_BLAMED = 5.0
# Processes that ask to join at once.
_MOST_VISITORS = 1024
# Seconds that a request to a store may take. One on another host takes a millisecond, but no member is left out because
# its host is busy.
PATIENCE = _BLAMED
# Keys of a member's store: the newest generation that it knows; how many processes have come, and have identified
# themselves; how often the generation was written, and how many reports: numbers, for which others wait.
NEWEST, TICKETS, KNOCKS = "newest", "tickets", "knocks"
_WRITTEN, _REPORTS = "written", "reports"


def publish(store: Store, generation: Generation) -> None:
    """Write the newest generation that a member knows to its store."""
    store.set(NEWEST, generation.encode())
    store.add(_WRITTEN, 1)


class _GenerationReader:
    """The newest generation at another member's store. It has a text for each member, so it is read when it is new."""

    def __init__(self, store: DistantStore) -> None:
        self._store, self._seen, self._started = store, -1, time.monotonic()

    def read(self) -> Generation | None:
        """Return the generation if it was written since it was read last."""
        seen, self._seen = self._seen, self._store.add(_WRITTEN, 0)
        return None if seen == self._seen else Generation.decode(self._store.get(NEWEST))

    def pause(self) -> None:
        """Sleep until the next ``read`` is due."""
        _pause(self._started)


def _pause(started: float) -> None:
    time.sleep(min(max(_POLL, _POLL_SHARE * (time.monotonic() - started)), _LOOK))


class Former:
    """Forms the next generation, as its leader or by another's lead."""

    def __init__(self, me: Member, store: Store, timeout: float, open_next: Callable[[], MemberAddress]) -> None:
        self._me = me
        self._store = store
        self._timeout = timeout
        self._open_next = open_next
        self._ends = Ends()
        self._handled: set[int] = set()
        self._heard = 0

    def form(self, report: MemberReport, blamed: Sequence[str] = ()) -> Generation:
        """Return the generation that follows that of ``report``, which has this member's progress."""
        end = time.monotonic() + 2 * self._timeout
        silent: set[str] = set()
        while time.monotonic() < end:
            base = report.generation
            if base.rank_of(self._me.id) is None:
                raise self._excluded(base)
            publish(self._store, base)
            leader = next(
                (each for each in base.members if each == self._me or not (each.id in silent or self._is_gone(each))),
                self._me,
            )
            try:
                if leader == self._me:
                    found = self._lead(report, blamed, silent)
                else:
                    found = self._follow(leader, report, silent)
            except _Lost:
                silent.add(leader.id)
                continue
            if isinstance(found, Generation):
                return found
            report = replace(report, generation=found.generation)  # others know a newer one
        raise Final(f"no generation after {report.generation.number} within {2 * self._timeout:g} s")

    def has_visitors(self) -> bool:
        """Return whether processes ask at this member's store to join."""
        return self._store.add(KNOCKS, 0) > self._heard

    # ---- by another's lead ------------------------------------------------------------------------------------------

    def _follow(self, leader: Member, report: MemberReport, silent: Collection[str]) -> Generation | MemberReport:
        """Report to ``leader`` and return what it forms; or a report of a newer one that has ended already."""
        base, end = report.generation, time.monotonic() + 2 * self._timeout
        try:
            store = DistantStore(leader.address, PATIENCE)
            store.set(f"report/{self._me.id}", report.encode())
            store.add(_REPORTS, 1)
            look, there = time.monotonic() + _LOOK, _GenerationReader(store)
            while time.monotonic() < end:
                newest = there.read()
                if newest is not None and newest.number > base.number:
                    if newest.rank_of(self._me.id) is None:
                        raise self._excluded(newest)
                    # A generation whose store has failed is only the predecessor of the next one.
                    keeper = newest.members[0]
                    has_ended = keeper.id in silent or self._is_gone(keeper)
                    return replace(report, generation=newest) if has_ended else newest
                there.pause()
                if time.monotonic() > look:
                    look = time.monotonic() + _LOOK
                    if self._is_gone(leader):
                        raise _Lost
        except (TransportError, RuntimeError) as error:
            if isinstance(error, Final):
                raise
            raise _Lost from error
        raise _Lost

    # ---- as the leader ----------------------------------------------------------------------------------------------

    def _lead(self, report: MemberReport, blamed: Sequence[str], silent: set[str]) -> Generation | MemberReport:
        """Wait for the reports of all live members; return the next generation, or a report of one that knows a newer.

        ``silent`` members have not answered when this one wanted to follow them. If only they are missing, and it
        cannot continue without them, they are asked again: they may be late, and lead now. Once one answers, it is no
        longer among them, and this returns ``report``.
        """
        base = report.generation
        others = [each for each in base.members if each != self._me]
        reports = {self._me.id: report}
        started, look = time.monotonic(), 0.0
        again = started + _PROBE
        ended: set[str] = set()
        seen = -1
        while True:
            before, seen = seen, self._store.add(_REPORTS, 0)
            for each in others if seen != before else ():
                if each.id not in reports and self._store.check([f"report/{each.id}"]):
                    told = self._told(f"report/{each.id}")
                    if told is None:
                        continue
                    if told.generation.number > base.number:
                        return told
                    if told.generation.number == base.number:
                        reports[each.id] = told
            missing = [each for each in others if each.id not in reports]
            now = time.monotonic()
            if missing and now > look:
                look = now + _LOOK
                ended |= {each.id for each in missing if self._is_gone(each)}
            waited = now - started
            given_up = [each for each in missing if waited > self._timeout or each.id in blamed and waited > _BLAMED]
            unknown = [each for each in missing if each.id not in ended]
            too_few = 2 * len(reports) <= len(base.members)
            if all(each in given_up for each in unknown):
                break
            if too_few and now > again and all(each.id in silent for each in unknown):
                if is_reachable(unknown[0].address, PATIENCE):
                    silent.discard(unknown[0].id)
                    return report
                again = time.monotonic() + _PROBE
            _pause(started)
        if unknown and too_few:
            names = ", ".join(str(each.process) for each in unknown)
            raise Final(
                f"{len(reports)} of {len(base.members)} members are left, and it is unknown whether the others go on "
                f"({names}); more than half have to be: start the job again from a checkpoint",
                [rank for each in unknown if (rank := base.rank_of(each.id)) is not None],
            )
        formed = self._next(base, reports, others)
        for each in others:
            self._store.delete_key(f"report/{each.id}")
        publish(self._store, formed)
        return formed

    def _told(self, key: str) -> MemberReport | None:
        """Return a member's report; None if another value stands there, which is deleted."""
        try:
            return MemberReport.decode(self._store.get(key))
        except TransportError as error:
            _logger.warning("a report is ignored: %s", error)
            self._store.delete_key(key)
            return None

    def _next(self, base: Generation, reports: dict[str, MemberReport], others: Sequence[Member]) -> Generation:
        """Return the generation of the members that have reported, with processes that ask to join if all are between
        steps."""
        stay = tuple(each for each in base.members if each.id in reports)
        fresh = tuple(each.id for each in stay if each.id in base.fresh and reports[each.id].done < 0)
        old = {member: told for member, told in reports.items() if member not in fresh}
        if not old:
            raise Final("no process is left that has the job's state; start again from a checkpoint")
        # A member that has the results of a step may have made its update, so the step counts, and others get them.
        done = max(told.done for told in old.values())
        behind = tuple(each.id for each in stay if each.id in old and old[each.id].done < done)
        come: tuple[Member, ...] = ()
        if not behind and all(told.between for told in old.values()):
            come = tuple(each for each in self._visitors() if base.rank_of(each.id) is None)
        lost = [f"rank {base.rank_of(each.id)} ({each.process})" for each in others if each.id not in reports]
        _logger.warning(
            "generation %d of the job: %d members%s%s; it goes on after step %d",
            base.number + 1,
            len(stay) + len(come),
            f", without {', '.join(lost)}" if lost else "",
            f", with {', '.join(str(each.process) for each in come)}" if come else "",
            done,
        )
        fresh += tuple(each.id for each in come)
        return Generation(base.number + 1, stay + come, fresh, done, self._open_next(), behind)

    def _visitors(self) -> list[Member]:
        """Return the processes that ask to join and still live."""
        found: dict[str, Member] = {}  # one may have asked twice
        self._heard = self._store.add(KNOCKS, 0)
        # Any process that reaches the store can count up, and write there.
        last = min(self._store.add(TICKETS, 0), max(self._handled, default=0) + _MOST_VISITORS)
        for number in range(1, last + 1):
            key = f"knock/{number}"
            if number not in self._handled and self._store.check([key]):
                self._handled.add(number)
                try:
                    member = decode_member(self._store.get(key))
                except TransportError as error:
                    _logger.warning("a process that asks to join is ignored: %s", error)
                    continue
                finally:
                    self._store.delete_key(key)
                if not self._is_gone(member):
                    found[member.id] = member
        return [*found.values()]

    def _is_gone(self, member: Member) -> bool:
        """Return whether the process of a member has ended, as far as can be seen from here."""
        return self._ends.has_ended(member.process, names(member.address), member.address.port)

    def _excluded(self, newest: Generation) -> TransportError:
        return Final(
            f"generation {newest.number} of the job goes on without this process, which was too late or not to be "
            "reached; start it again, and it joins anew"
        )


def ask_to_join(me: Member, addresses: Callable[[], Sequence[MemberAddress]], timeout: float) -> Generation:
    """Return the generation that takes ``me`` in, when the members are between two steps."""
    end = time.monotonic() + timeout
    known: Sequence[MemberAddress] = ()
    why = "no member is known"
    while time.monotonic() < end:
        for address in [*known, *addresses()]:
            try:
                newest = Generation.decode(DistantStore(address, PATIENCE).get(NEWEST))
                known = [each.address for each in newest.members]
                store = DistantStore(known[0], PATIENCE)
                store.set(f"knock/{store.add(TICKETS, 1)}", encode_member(me))
                store.add(KNOCKS, 1)
                there = _GenerationReader(store)
                while time.monotonic() < end:
                    found = there.read()
                    if found is not None and found.rank_of(me.id) is not None:
                        return found
                    known = [each.address for each in found.members] if found else known
                    there.pause()
                why = "the members did not end a step"
            except (TransportError, RuntimeError) as error:
                why = outages.first_line(error)
        time.sleep(_PROBE)
    raise Final(f"cannot join the job within {timeout:g} s: {why}; does it run, and was its address given?")


class _Lost(Exception):
    """The member that leads does not answer."""


class Final(TransportError):
    """This member cannot continue; a retry is useless."""
