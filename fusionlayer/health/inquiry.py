"""Finds out which rank is at fault when a call does not end: it asks all ranks where they are, and compares."""

from __future__ import annotations

import threading
import time
from typing import NamedTuple

from .calls import Call
from .judge import EVIDENT, Evidence
from .processes import Processes
from .state import ChannelState, Finding, RankState
from .store import StatusKeys

__all__ = ["POLL", "Inquiry", "Position", "Question"]

# Seconds between two steps of an inquiry.
POLL = 0.1
# Intervals that a rank has to answer: it looks once in each whether it was asked.
_PATIENCE = 2.0


class Position(NamedTuple):
    """Where a rank is in its calls.

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

    @property
    def channel(self) -> ChannelState:
        """The position as a rank writes it for others."""
        return ChannelState((), self.sequence, self.sequence - (self.call is not None), self.call, self.recent)


class Question:
    """Why a call has failed: asked by the thread that makes calls, answered by the monitor's thread.

    Args:
        otherwise: the reason if there is no evidence against any rank.
        known: why this rank fails, if that is no question.
    """

    def __init__(self, otherwise: Finding, known: Finding | None) -> None:
        self.otherwise, self.known = otherwise, known
        self.finding = otherwise
        self.answered = threading.Event()

    def answer(self, finding: Finding) -> None:
        """Hand the answer over: ``finding`` is written before ``answered`` is set."""
        self.finding = finding
        self.answered.set()


class Inquiry:
    """One round of asking the other ranks of a transport where they are. Runs on the monitor's thread.

    Args:
        keys: where the ranks write it.
        processes: theirs.
        position: where this rank is.
        question: a text that no inquiry has asked before.
        interval: seconds within which each rank looks whether it was asked.

    Attributes:
        position: as given.
        evidence: what was found so far.
    """

    def __init__(
        self, keys: StatusKeys, processes: Processes, position: Position, question: str, interval: float
    ) -> None:
        self.position = position
        self.evidence: list[Evidence] = []
        self._keys, self._processes, self._rank = keys, processes, keys.rank
        self._patience = _PATIENCE * interval + POLL
        self._serials = {rank: state.serial for rank, state in keys.read_all(keys.others).items()}
        self._open = keys.others
        keys.ask(question)
        self._started = time.monotonic()

    def step(self, otherwise: Finding) -> bool:
        """Read the answers; return whether ``evidence`` is complete. Does not wait: the monitor has other transports.

        Args:
            otherwise: what this rank has seen itself of the failure.
        """
        waited = time.monotonic() - self._started
        patient = waited < self._patience
        still_open = []
        awaited: list[Evidence] = []
        for rank, state in self._keys.read_all(self._open).items():
            found = self._interpret(rank, state, waited, otherwise)
            if found is not None and patient and found.kind in ("silent", "disconnected", "late"):
                awaited.append(found)
                still_open.append(rank)
            elif found is not None:
                self.evidence.append(found)
        self._open = still_open
        answers = [each for each in awaited if each.kind != "silent"]
        kinds = {each.kind for each in self.evidence} - {"alike"}
        # Where calls differ, those of all ranks show which one is the odd one: a straggler may yet come to its call.
        conflict = kinds == {"conflict"}
        enough = [each for each in answers if each.kind == "disconnected"] if conflict else answers
        decided = not conflict and not kinds.isdisjoint(EVIDENT)
        # A rank that has failed may still write why. That is not awaited if other evidence shows the cause.
        suffices = bool(kinds) or any(each.kind == "late" for each in answers)
        if decided or not still_open or (suffices and len(enough) == len(awaited)):
            self.evidence += answers
            return True
        return False

    def _interpret(self, rank: int, state: RankState, waited: float, otherwise: Finding) -> Evidence | None:
        """Return the evidence against a rank, from the state that it has written; None if there is none.

        Args:
            rank: the other rank.
            state: what the other rank has written last.
            waited: seconds since it was asked.
            otherwise: what this rank has seen itself of the failure.
        """
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
        if not (failed or state.serial > self._serials[rank]):
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
            # What this rank has seen itself is added, unless it names a rank.
            more = f"; {otherwise.text}" if otherwise.text and not otherwise.ranks else ""
            text = f"rank {rank} failed and does not know why{more}"
            return Evidence(rank, "disconnected", text, call=mine and theirs)
        if behind:
            at = f"at collective {channel.entered} while rank {self._rank} is at {sequence}"
            return Evidence(rank, "late", f"rank {rank} is alive but late: {at}; it is busy, or left its loop earlier")
        if call and call.partner == rank and (theirs is None or theirs.partner != self._rank):
            return Evidence(rank, "late", f"rank {rank} is alive but late: it has not made the matching call")
        return Evidence(rank, "alike", "") if mine and theirs else None
