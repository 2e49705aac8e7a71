"""Finds out which rank is to blame for a call that does not end: it asks all of them where they are, and compares."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, NamedTuple

from ..process.processes import Identity
from .calls import Call
from .evidence import EVIDENT, Diagnosis, Evidence
from .store import StatusKeys

__all__ = ["POLL", "Inquiry", "Processes", "Progress"]

# Seconds between two steps of an inquiry.
POLL = 0.1
# Intervals that a rank has to answer: it looks once in each whether it was asked.
_PATIENCE = 2.0
# Seconds for which ranks go on connecting after one is gone: it may have done its part, and had nothing more to do.
_GRACE = 0.5


class Progress(NamedTuple):
    """Where a rank is in its calls.

    The calling thread replaces it as a whole, so that the monitor's thread reads fields that belong together.

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


class Processes:
    """The processes of a transport's ranks, as far as they can be looked up on this host. It needs no store.

    Args:
        rank: this rank.
        size: number of ranks.
        known: processes of other ranks that are known already.

    Attributes:
        of: the known processes by rank, this one's included.
        own: this process.
    """

    def __init__(self, rank: int, size: int, known: Mapping[int, Identity]) -> None:
        self.own = Identity.own()
        self.of = {**known, rank: self.own}
        self._others = [other for other in range(size) if other != rank]
        self._first: list[Evidence] = []
        self._first_at = 0.0

    def look_at(self, rank: int) -> Evidence | None:
        """Return the sign that the process of a rank is gone or stopped, or None."""
        identity = self.of.get(rank)
        trouble = identity.trouble(self.own) if identity else None
        return trouble and Evidence(rank, trouble, f"rank {rank} is {trouble} ({identity})") or None

    def look_around(self) -> list[Evidence]:
        """Return a sign for each process that is gone or stopped."""
        return [sign for rank in self._others if (sign := self.look_at(rank))]

    def see_gone(self) -> bool:
        """Return whether a process has been gone for a while. ``seen`` then returns which ones went first.

        Ranks that fail for the same reason end soon after the first one, so it is worth looking often.
        """
        if not self._first:
            self._first = [sign for sign in self.look_around() if sign.kind == "gone"]
            self._first_at = time.monotonic()
        return bool(self._first) and time.monotonic() - self._first_at > _GRACE

    def see_first(self) -> list[Evidence]:
        """Look around, unless something was seen before; return what was seen first."""
        self._first = self._first or self.look_around()
        return self._first

    def seen(self) -> list[Evidence]:
        """Return what was seen first, or else what is seen now, and do not keep that."""
        return self._first or self.look_around()


class Inquiry:
    """One round of asking the other ranks of a transport where they are. Runs on the monitor's thread.

    Args:
        board: where the ranks write it.
        processes: theirs.
        rank: this rank.
        progress: where this rank is.
        question: a text that no inquiry has asked before.
        interval: seconds within which each rank looks whether it was asked.

    Attributes:
        progress: as given.
        signs: the evidence so far.
    """

    def __init__(
        self, board: StatusKeys, processes: Processes, rank: int, progress: Progress, question: str, interval: float
    ) -> None:
        self.progress = progress
        self.signs: list[Evidence] = []
        self._board, self._processes, self._rank = board, processes, rank
        self._patience = _PATIENCE * interval + POLL
        self._serials = {other: state["serial"] for other, state in board.read_states(board.others).items()}
        self._open = board.others
        board.ask(question)
        self._started = time.monotonic()

    def step(self, otherwise: Diagnosis) -> bool:
        """Read the answers; return whether ``signs`` is complete. Does not wait: the monitor has other watches.

        Args:
            otherwise: what this rank has seen itself of the failure.
        """
        waited = time.monotonic() - self._started
        patient = waited < self._patience
        still_open = []
        awaited: list[Evidence] = []
        for rank, state in self._board.read_states(self._open).items():
            fresh = state["serial"] > self._serials[rank]
            sign = self._interpret(rank, state, fresh, waited, otherwise)
            if sign is not None and patient and sign.kind in ("silent", "failed", "late"):
                awaited.append(sign)
                still_open.append(rank)
            elif sign is not None:
                self.signs.append(sign)
        self._open = still_open
        answers = [sign for sign in awaited if sign.kind != "silent"]
        kinds = {sign.kind for sign in self.signs} - {"alike"}
        # Where calls differ, those of all ranks show which one is the odd one: a late rank may yet come to its call.
        conflict = kinds == {"conflict"}
        enough = [sign for sign in answers if sign.kind == "failed"] if conflict else answers
        decided = not conflict and not kinds.isdisjoint(EVIDENT)
        # A rank that has failed may still write why. There is no need to wait for that if other signs tell the cause.
        tells = bool(kinds) or any(sign.kind == "late" for sign in answers)
        if decided or not still_open or (tells and len(enough) == len(awaited)):
            self.signs += answers
            return True
        return False

    def _interpret(
        self, rank: int, state: Mapping[str, Any], fresh: bool, waited: float, otherwise: Diagnosis
    ) -> Evidence | None:
        """Return the evidence against a rank, from the state that it has written; None if there is none.

        Args:
            rank: the other rank.
            state: what the other rank has written last.
            fresh: whether it has written that since it was asked.
            waited: seconds since it was asked.
            otherwise: what this rank has seen itself of the failure.
        """
        sequence, call = self.progress.sequence, self.progress.call
        behind = state["sequence"] < sequence
        # Two calls are compared that have the same number. A rank may have completed one in which a peer still waits.
        mine, theirs = call, state["call"]
        if behind and theirs and theirs.partner is None:
            mine = next((own for number, own in self.progress.recent if number == state["sequence"]), None)
        elif call and call.partner is None:
            theirs = next((c for number, c in state["recent"] if number == sequence), None)
        if "text" in state:
            return Evidence(rank, "told", state["text"], tuple(state["ranks"]))
        because = state.get("because")
        told = Evidence(rank, "told", because["text"], tuple(because["ranks"])) if because else None
        if state["state"] == "closed":
            amid = state["call"] is not None and state["sequence"] == sequence
            if behind or amid or (call is not None and call.partner == rank):
                text = f"rank {rank} closed its transport {'in' if amid else 'after'} collective {state['sequence']}"
                hint = "it left its loop earlier or failed: see its log, make equally many steps on all ranks"
                return told or Evidence(rank, "left", text if amid else f"{text}; {hint}")
            return None
        failed = state["state"] == "failed"
        trouble = None if failed else self._processes.look_at(rank)
        if trouble:
            return told or trouble
        if not (fresh or failed):
            name = f"rank {rank} ({self._processes.of[rank]})"
            return Evidence(rank, "silent", f"{name} gives no sign of life, {waited:.1f} s after it was asked")
        if mine and theirs:
            conflict = mine.conflict(self._rank, theirs, rank)
            if conflict:
                ranks = tuple(sorted((self._rank, rank)))
                return Evidence(rank, "conflict", f"{conflict}; make the same calls on every rank", ranks, theirs)
        if failed:
            # What this rank has seen itself is more, unless it blames a rank for that.
            more = f"; {otherwise.text}" if otherwise.text and not otherwise.ranks else ""
            return Evidence(rank, "failed", f"rank {rank} failed and does not know why{more}", call=mine and theirs)
        if behind:
            at = f"at collective {state['sequence']} while rank {self._rank} is at {sequence}"
            return Evidence(rank, "late", f"rank {rank} is alive but late: {at}; it is busy, or left its loop earlier")
        if call and call.partner == rank and (theirs is None or theirs.partner != self._rank):
            return Evidence(rank, "late", f"rank {rank} is alive but late: it has not made the matching call")
        return Evidence(rank, "alike", "") if mine and theirs else None
