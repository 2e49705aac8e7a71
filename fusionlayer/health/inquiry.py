"""Finds out which rank is at fault when a call does not end: one rank asks all where they are, and compares.

The others take over its findings. If every waiting rank asked and read, one stall would cost N^2 states.
"""

from __future__ import annotations

import threading
import time
from typing import NamedTuple

from .calls import MODULUS, Call
from .judge import EVIDENT, Evidence, verdict
from .processes import Processes
from .state import ChannelState, Finding, RankState, StateRequest, decode_finding, encode
from .store import StatusKeys

# Seconds between two steps of an inquiry: at first, and at most. Long waits are checked more seldom.
POLL = 0.1
_MOST_POLL, _POLL_SHARE = 1.0, 0.25
# Intervals within which a rank has to answer: it checks once in each whether it was asked.
_PATIENCE = 2.0


class Position(NamedTuple):
    """A rank's position in its calls.

    Attributes:
        sequence: number of its last collective.
        call: the call that it is in; None if it is in none.
        since: when that call began, in seconds of the monotonic clock.
        recent: its last two collectives, with their numbers. A rank may have completed one in which a peer still waits.
    """

    sequence: int
    call: Call | None
    since: float
    recent: tuple[tuple[int, Call], ...]

    def channel(self, rank: int, whole: bool = False) -> ChannelState:
        """Return the position as ``rank`` writes it for others; ``whole``: with the lengths of all messages."""
        call, recent = self.call, self.recent
        if not whole:
            call, recent = call and call.brief(rank), tuple((number, each.brief(rank)) for number, each in recent)
        return ChannelState((), self.sequence, self.sequence - (self.call is not None), call, recent)


class Question:
    """Why a call has failed: asked by the thread that makes calls, answered by the monitor's thread."""

    def __init__(self, otherwise: Finding, known: Finding | None) -> None:
        self.otherwise, self.known = otherwise, known
        self.finding = otherwise
        self.answered = threading.Event()

    def answer(self, finding: Finding) -> None:
        """Hand the answer over: ``finding`` is written before ``answered`` is set."""
        self.finding = finding
        self.answered.set()


class Inquirer:
    """Finds out why this rank's call does not end, by its own inquiry or another rank's.

    One rank at a time asks. Without it, each rank sees processes of this host that are gone or stopped, and the state
    of the one rank with which it exchanges a message. The monitor's thread uses it.

    Attributes:
        finding: that of the last inquiry which is over; None if nothing speaks against any rank.
        is_witness: whether this rank has seen evidence itself. If not, the call that it is in may be another one.
    """

    def __init__(self, keys: StatusKeys, processes: Processes, interval: float) -> None:
        self.finding: Finding | None = None
        self.is_witness = False
        self._keys, self._processes, self._interval = keys, processes, interval
        self._inquiry: Inquiry | None = None
        self._number, self._next = 0, 0.0
        # The question that stands in the store, since when this rank knows it, and when its last inquiry was over.
        self._asked, self._asked_at, self._ended_at = "", 0.0, 0.0

    def read(self, asked: str) -> StateRequest | None:
        """Note the question that stands in the store; return it as a request."""
        if asked != self._asked:
            self._asked, self._asked_at = asked, time.monotonic()
        return StateRequest.parse(asked)

    @property
    def is_busy(self) -> bool:
        """Whether an inquiry lasts."""
        return self._inquiry is not None

    @property
    def pause(self) -> float:
        """Seconds until ``look`` is due again."""
        return max(self._next - time.monotonic(), POLL)

    def end(self) -> Position | None:
        """End the inquiry; return the position that it was about, None if there is no inquiry."""
        inquiry, self._inquiry = self._inquiry, None
        self._next, self._ended_at = 0.0, time.monotonic()
        return inquiry.position if inquiry else None

    def look(self, position: Position, otherwise: Finding | None) -> bool:
        """Begin an inquiry or continue with it; return whether it is over, with its ``finding``. Never blocks."""
        request, inquiry, now = StateRequest.parse(self._asked), self._inquiry, time.monotonic()
        if inquiry is not None and inquiry.position is not position:
            self._close(inquiry, None)  # that call has ended meanwhile
            self.end()
            return False
        urgency = 2 * (otherwise is not None) + (position.call is None or position.call.partner is None)
        # A rank that has asked and reaches no outcome may have failed itself.
        is_overdue = inquiry is not None and not inquiry.is_own and inquiry.is_overdue
        if inquiry is None or request is None or request.urgency < urgency or (is_overdue and request.outcome is None):
            request = self._claim(request, urgency, position)
        if inquiry is None or request.question != inquiry.request.question:
            inquiry = self._inquiry = Inquiry(self._keys, self._processes, position, request, self._interval)
        elif now < self._next and request.outcome is None:
            return False
        self._next = now + min(max(POLL, _POLL_SHARE * inquiry.waited), _MOST_POLL)
        is_over = inquiry.step(otherwise or Finding("unknown", (), ""), request.outcome)
        if inquiry.is_unbalanced:
            whole = request._replace(whole=1)
            self.read(self._keys.ask(whole.text, request.text))
            return False
        if is_over:
            self.finding, self.is_witness = inquiry.finding, bool(inquiry.evidence)
            self._close(inquiry, self.finding)
        return is_over

    def _claim(self, request: StateRequest | None, urgency: int, position: Position) -> StateRequest:
        """Return another rank's request whose outcome this rank may take over, or else a new one."""
        if request is not None and request.urgency >= urgency:
            age = time.monotonic() - self._asked_at
            is_new = self._asked_at > max(position.since, self._ended_at) and request.sequence == position.sequence
            if age < _PATIENCE * self._interval if request.outcome is None else is_new:
                return request
        self._number += 1
        own = StateRequest(self._keys.rank, self._number, position.sequence, urgency)
        # Another rank may have asked since this one has looked. Values that are no request may be overwritten.
        return self.read(self._keys.ask(own.text, self._asked)) or self.read(self._keys.ask(own.text)) or own

    def _close(self, inquiry: Inquiry, finding: Finding | None) -> None:
        """Write the result of this rank's own inquiry, for the others."""
        if inquiry.is_own:
            done = inquiry.request._replace(outcome=encode(finding) if finding else "")
            self.read(self._keys.ask(done.text, inquiry.request.text))


class Inquiry:
    """One round of asking the other ranks of a transport where they are. Runs on the monitor's thread.

    Attributes:
        position: where this rank is.
        request: the question to all ranks, from this rank or another one.
        interval: seconds within which each rank looks whether it was asked.

    Attributes:
        position, request: as given.
        evidence: the findings so far.
        finding: the conclusion, once the inquiry is over; None if nothing speaks against any rank.
    """

    def __init__(
        self, keys: StatusKeys, processes: Processes, position: Position, request: StateRequest, interval: float
    ) -> None:
        self.position, self.request = position, request
        self.evidence: list[Evidence] = []
        self.finding: Finding | None = None
        self._keys, self._processes, self._rank = keys, processes, keys.rank
        self._patience = _PATIENCE * interval + POLL
        partner = position.call.partner if position.call else None
        self._open = keys.others if self.is_own else [] if partner is None else [partner]
        self._channels = {self._rank: position.channel(self._rank, whole=True)}
        self._started = time.monotonic()

    @property
    def is_own(self) -> bool:
        """Whether this rank asks and reads for all."""
        return self.request.rank == self._rank

    @property
    def waited(self) -> float:
        """Seconds for which the inquiry has lasted."""
        return time.monotonic() - self._started

    @property
    def is_overdue(self) -> bool:
        """Whether an outcome ought to be there."""
        return self.waited > self._patience + _MOST_POLL

    def step(self, otherwise: Finding, outcome: str | None = None) -> bool:
        """Read new answers; return whether the inquiry is over. Does not wait: the monitor has other transports."""
        is_over = self._collect(otherwise) if self.is_own else self._follow(otherwise, outcome)
        if self.is_own and not any(each.kind == "conflict" for each in self.evidence):
            unfit = self._unfit()
            self.evidence += unfit
            is_over = is_over or bool(unfit)
        found = decode_finding(outcome.encode(), self._keys.size) if outcome and not self.is_own else None
        self.finding = verdict(self.evidence, self.position.call) or found
        return is_over

    def _follow(self, otherwise: Finding, outcome: str | None) -> bool:
        """Check this rank's own observations; return whether they are enough, or the asking rank has an outcome."""
        ranks = {each.rank for each in self._processes.look_around()}
        if outcome is not None:
            ranks.update(self._open)
        found = (self._interpret(*each, self.waited, otherwise) for each in self._keys.read_all(ranks).items())
        self.evidence = [each for each in found if each is not None]
        return outcome is not None or not {*EVIDENT}.isdisjoint(each.kind for each in self.evidence)

    def _collect(self, otherwise: Finding) -> bool:
        """Read the answers; return whether ``evidence`` is complete."""
        waited = self.waited
        patient = waited < self._patience
        still_open = []
        awaited: list[Evidence] = []
        for rank, state in self._keys.read_all(self._open).items():
            if state.answers == self.request.question or (state.life == "failed" and not self.request.whole):
                self._channels[rank] = state.channel
            found = self._interpret(rank, state, waited, otherwise)
            if found is not None and patient and found.kind in ("silent", "disconnected", "late"):
                awaited.append(found)
                still_open.append(rank)
            elif found is not None:
                self.evidence.append(found)
        self._open = still_open
        answers = [each for each in awaited if each.kind != "silent"]
        kinds = {each.kind for each in self.evidence} - {"alike"}
        # If calls differ, those of all ranks show which one is different: a straggler may yet come to its call.
        conflict = kinds == {"conflict"}
        enough = [each for each in answers if each.kind == "disconnected"] if conflict else answers
        decided = not conflict and not kinds.isdisjoint(EVIDENT)
        # A rank that has failed may still write why. It is not awaited if other evidence shows the cause.
        suffices = bool(kinds) or any(each.kind == "late" for each in answers)
        if decided or not still_open or (suffices and len(enough) == len(awaited)):
            self.evidence += answers
            return True
        return False

    @property
    def is_unbalanced(self) -> bool:
        """Whether some rank does not send the bytes that another one expects, and the lengths that would show this are
        missing."""
        if not self.is_own or self.request.whole or (self.finding and self.finding.kind in EVIDENT[:3]):
            return False
        calls = self._alike
        brief = (calls[rank].brief(rank) for rank in calls)
        return len(calls) == self._keys.size and sum(call.balance for call in brief) % MODULUS != 0

    @property
    def _alike(self) -> dict[int, Call]:
        """The collective of the ranks that have made the least progress, for each rank that has made it."""
        number = min(channel.entered for channel in self._channels.values())
        made = {rank: dict(channel.recent).get(number) for rank, channel in self._channels.items()}
        return {rank: call for rank, call in made.items() if call is not None}

    def _unfit(self) -> list[Evidence]:
        """Return the first two other ranks of which one sends less than the other expects, if lengths are known."""
        calls = {rank: call for rank, call in sorted(self._alike.items()) if call.sends}
        if len(calls) < self._keys.size:
            return []
        for receiver, given in enumerate(zip(*(call.sends for call in calls.values()), strict=True)):
            for sender, (n, expected) in enumerate(zip(given, calls[receiver].recvs, strict=True)):
                conflict = n != expected and calls[sender].conflict(sender, calls[receiver], receiver)
                if conflict:
                    ranks = tuple(sorted((sender, receiver)))
                    return [Evidence(sender, "conflict", f"{conflict}; make the same calls on every rank", ranks)]
        return []

    def _interpret(self, rank: int, state: RankState, waited: float, otherwise: Finding) -> Evidence | None:
        """Return the evidence against a rank, from the state that it has written; None if there is none."""
        known = state.finding or state.leaving
        stated = Evidence(rank, "failed", known.text, known.ranks) if known else None
        if state.finding:
            return stated
        if state.life == "ended":
            return self._left(rank, state.channel, stated)
        failed = state.life == "failed"
        trouble = None if failed else self._processes.look_at(rank)
        if trouble:
            return stated or trouble
        # One that has failed need not answer, but for the lengths of its messages.
        silent = state.answers != self.request.question and not (failed and (not self.request.whole or self.is_overdue))
        if silent:
            name = f"rank {rank} ({self._processes.of[rank]})"
            return Evidence(rank, "silent", f"{name} gives no sign of life, {waited:.1f} s after it was asked")
        return self._compared(rank, state.channel, failed, otherwise)

    def _left(self, rank: int, theirs: ChannelState, stated: Evidence | None) -> Evidence | None:
        """Return the evidence against a rank that has closed its transport."""
        sequence, call = self.position.sequence, self.position.call
        amid = theirs.call is not None and theirs.entered == sequence
        if not (theirs.entered < sequence or amid or (call is not None and call.partner == rank)):
            return None
        text = f"rank {rank} closed its transport {'in' if amid else 'after'} collective {theirs.entered}"
        hint = "it left its loop earlier or failed: see its log, make equally many steps on all ranks"
        return stated or Evidence(rank, "ended", text if amid else f"{text}; {hint}")

    def _compared(self, rank: int, channel: ChannelState, failed: bool, otherwise: Finding) -> Evidence | None:
        """Return the evidence that follows from the calls of a rank that has answered, or has failed."""
        sequence, call = self.position.sequence, self.position.call
        behind = channel.entered < sequence
        # Two calls are compared that have the same number. A rank may have completed one in which a peer still waits.
        mine, theirs = call, channel.call
        if behind and theirs and theirs.partner is None:
            mine = dict(self.position.recent).get(channel.entered)
        elif call and call.partner is None:
            theirs = dict(channel.recent).get(sequence)
        if mine and theirs:
            conflict = mine.conflict(self._rank, theirs, rank)
            if conflict:
                ranks = tuple(sorted((self._rank, rank)))
                return Evidence(rank, "conflict", f"{conflict}; make the same calls on every rank", ranks, theirs)
        if failed:
            # This rank's own observations are added, unless they name a rank.
            more = f"; {otherwise.text}" if otherwise.text and not otherwise.ranks else ""
            text = f"rank {rank} failed and does not know why{more}"
            return Evidence(rank, "disconnected", text, call=mine and theirs)
        if behind:
            at = f"at collective {channel.entered} while rank {self._rank} is at {sequence}"
            return Evidence(rank, "late", f"rank {rank} is alive but late: {at}; it is busy, or left its loop earlier")
        if call and call.partner == rank and (theirs is None or theirs.partner != self._rank):
            return Evidence(rank, "late", f"rank {rank} is alive but late: it has not made the matching call")
        return Evidence(rank, "alike", "") if mine and theirs else None
