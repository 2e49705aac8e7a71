"""A side channel over the store, by which ranks find out which of them are alive and which calls they are in.

Ranks answer when asked. One daemon thread per process reads, for each transport, two keys of the store per interval. It
writes only after a waiting rank has asked for signs of life. So a job that runs well costs one small read per interval
(40 us by TCP on one host), and a FileStore, which keeps every write, does not grow.

The first rank that knows why a transport has failed puts that into the store before it leaves. All others repeat it,
so that no rank blames one that has only left for the same reason.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any

import torch.distributed as dist

from ..process.processes import Identity
from .call_state import encode_state
from .calls import Call
from .evidence import Diagnosis, judge, lost_store
from .inquiry import POLL, Inquiry, Processes, Progress
from .monitor import STORE_PATIENCE, monitor
from .root_cause import Cause
from .store import StatusKeys

__all__ = ["Heartbeat"]

_logger = logging.getLogger("fusionlayer")

_MEETING_POLL = _LOOK_POLL = 0.01
# Seconds between two looks, while ranks meet, at what those that have come may tell.
_NEWS_POLL = 0.1
# Seconds that a failed call waits for the store if the process that keeps it is seen to be gone or stopped.
_HOPELESS = 0.5
# Seconds that a failed call waits for the store if the processes of this host show who is lost.
_CERTAIN = 1.5
# Seconds that the process with the store gives the others to read the cause before it reports its own failure.
_ANNOUNCE = 0.5


class Heartbeat:
    """Tells the other ranks where this rank is in its transport, and finds out why a call does not end.

    The thread that makes calls uses ``enter``, ``leave`` and ``diagnose``. After ``meet`` the monitor's thread alone
    reads and writes the store, except in ``is_awaited``. There is no lock: one assignment replaces a field, and a
    thread that still sees the old value sees the new one at its next look. ``_finding`` is set before ``_found``.

    Args:
        store: the store through which the ranks of the transport have met. The watch uses a client of its own.
        name: prefix of the keys; only this transport uses it, and it is equal on its ranks.
        rank: this rank.
        size: number of ranks.
        timeout: seconds a call may wait; the interval is an eighth of it, at least 0.25 and at most 5 seconds.
        stall_warning: seconds of waiting after which a warning is logged.
        store_rank: rank whose process keeps a TCP store, or None.
        known: processes of ranks that have met before, by another name.
        is_overdue: returns whether work whose call has returned has run out of time. The monitor's thread calls it.
        interrupt: makes the call in flight fail. The monitor's thread calls it.

    Attributes:
        processes: those of the ranks that have met.
        board: what the ranks write for each other.
        progress: where this rank is in its calls. The calling thread assigns it, once before and once after each call.
    """

    def __init__(
        self,
        store: dist.Store,
        name: str,
        rank: int,
        size: int,
        timeout: float,
        stall_warning: float,
        store_rank: int | None,
        known: Mapping[int, Identity] = MappingProxyType({}),
        *,
        is_overdue: Callable[[], bool],
        interrupt: Callable[[], None],
    ) -> None:
        self._rank = rank
        self._interval = min(max(timeout / 8, 0.25), 5.0)
        self.processes = Processes(rank, size, known)
        self.board = StatusKeys(name, rank, size)
        self._store_rank = store_rank
        # A store ends with its last reference, and the others must be able to read why this process leaves.
        self._kept = store if store_rank == rank else None
        self._met_by = store
        self._lost_store = lost_store(store, store_rank)
        self._is_overdue = is_overdue
        self._stall_warning = stall_warning
        self._interrupt = interrupt
        self.progress = Progress(0, None, 0.0, ())
        self._serial = 0
        self._answered = ""
        self._inquiry: Inquiry | None = None
        self._inquiries = 0
        self._since = self._next_look = 0.0
        self._warned = False
        self._wanted = self._has_ended = False
        self._otherwise = Diagnosis((), "", True)
        self._known: Diagnosis | None = None
        self._cause: Diagnosis | None = None
        self._found = threading.Event()
        self._has_left = threading.Event()
        self._finding: Diagnosis | None = None

    def meet(self, timeout: float) -> tuple[dist.Store, Diagnosis | None]:
        """Learn the identities of the other ranks. All ranks call it together.

        It blocks for ever if the store's keeper is stopped, so a thread of its own calls it.

        Args:
            timeout: seconds in which all ranks must come.

        Returns:
            A client of the store, for the links, and why the ranks cannot meet, or None.
        """
        deadline = time.monotonic() + timeout
        board = self.board
        own, store = monitor.own_store(self._met_by), monitor.meeting_store(self._met_by, timeout)
        board.use(store)
        board.begin()
        self.write_state()
        board.introduce(self.processes.own)
        finding = self._await_all(deadline, timeout)
        if finding is not None:
            board.farewell = _failed(finding)
            self.write_state()
            return store, finding
        told = _told(board.read_states(board.others))
        if told is not None:
            return store, told
        board.use(own)
        monitor.add(self)
        return store, None

    def _await_all(self, deadline: float, timeout: float) -> Diagnosis | None:
        """Return when the identities of all ranks are known, None then; or why some cannot be."""
        board, missing, come, before = self.board, self.board.others, [self._rank], monitor.cause
        next_news = 0.0
        while missing and not board.have_come(missing):
            now = time.monotonic()
            if now >= next_news or now > deadline:
                next_news = now + _NEWS_POLL
                news = [rank for rank in missing if board.have_come([rank])]
                self._learn(news)
                come += news
                missing = [rank for rank in missing if rank not in news]
                told = _told(board.read_states(come))
                if told is not None:
                    return told
                # A rank does not come, because it has failed in another transport. This process hears of that, too.
                # What it has heard before may be over.
                if self.processes.see_gone() or (missing and monitor.cause is not before and self.because()):
                    return self.judge_here()
            if missing and now > deadline:
                told = self.because()
                if told and set(told.ranks) <= set(missing):
                    return told
                # A rank that is known from an earlier meeting is stopped or gone: others may be missing because of it.
                seen = judge(self.processes.seen(), None)
                if seen:
                    return seen
                text = f"ranks {missing} did not come within {timeout:g} s; make it on every rank of the group"
                return Diagnosis(tuple(missing), text, True)
            time.sleep(_MEETING_POLL)
        self._learn(missing)
        return None

    def _learn(self, ranks: Iterable[int]) -> None:
        for rank in ranks:
            self.processes.of[rank] = self.board.identity(rank)

    def judge_here(self, is_silent: bool = False) -> Diagnosis:
        """Return what the processes of this host show, without the store; else that the store does not answer.

        ``is_silent``: it does not, for certain. A rank that has gone explains that only if it is the store's keeper.
        """
        told = self._cause or self.because() or self._known
        if told:
            return told
        seen = self.processes.seen()
        # Its keeper stays until the others have read why it leaves. So a keeper that is lost without a word came first.
        keeper = [sign for sign in seen if sign.rank == self._store_rank]
        if is_silent and not keeper and self._store_rank not in (None, self._rank):
            return self._lost_store
        return judge(keeper or seen, self.progress.call) or self._lost_store

    def enter(self, call: Call, sequence: int) -> None:
        """Note that a collective begins. The calling thread calls it."""
        recent = (*self.progress.recent[-1:], (sequence, call))
        self.progress = Progress(sequence, call, time.monotonic(), recent)

    def enter_again(self) -> None:
        """Note that this rank waits for the last collective: its call has returned, but not all its work is done."""
        recent = self.progress.recent
        if recent:
            sequence, call = recent[-1]
            self.progress = Progress(sequence, call, time.monotonic(), recent)

    def leave(self) -> None:
        """Note that the call has succeeded."""
        self.progress = self.progress._replace(call=None, since=0.0)

    def diagnose(self, otherwise: Diagnosis, known: Diagnosis | None = None) -> Diagnosis:
        """Interrupt the call in flight, and return why it has failed. It is in the store then, if there is one.

        The calling thread calls it and waits for the monitor's thread, which asks the other ranks. That takes a tenth
        of a second if they answer, and at most three intervals and the patience with a store if they do not.

        Args:
            otherwise: the reason if nothing speaks against any rank.
            known: why this rank fails, if that is no question. Another rank may have failed before.
        """
        # Other ranks may ask before the cause is known, and must not wait for this one any longer. So it comes before
        # the links are closed.
        self.board.farewell = {"state": "failed"} if known is None else _failed(known)
        self._otherwise, self._known = otherwise, known
        self._wanted = True
        self._interrupt()
        monitor.wake()
        started = time.monotonic()
        while True:
            # Processes of this host are looked up without the store, since the store may be what is lost. And they are
            # looked up often, to see which one is gone first: ranks that fail for the same reason end soon after it.
            first = self.processes.see_first()
            if self._found.wait(_LOOK_POLL):
                break
            if self._has_ended:  # the monitor's thread does not look for the cause any more
                return self._cause or known or otherwise
            waited = time.monotonic() - started
            finding = self.judge_here()
            if waited > _HOPELESS and set(self._lost_store.ranks) & {sign.rank for sign in first}:
                return finding
            if waited > (_CERTAIN if finding is not self._lost_store else 3 * self._interval + STORE_PATIENCE):
                return finding
        assert self._finding is not None
        while self._cause and time.monotonic() - started < _ANNOUNCE and self.is_awaited():
            time.sleep(_LOOK_POLL)
        return self._finding

    def is_awaited(self) -> bool:
        """Return whether this process keeps the store, and some rank has yet to read there why this rank has failed.

        A rank that is to blame, is gone or has left by itself need not read it. The calling thread, or that of the
        exit, calls it once this rank has failed.
        """
        if self._kept is None or self._cause is None:
            return False
        try:
            states = {} if self.board.is_left() else self.board.read_states(self.board.others)
        except RuntimeError:
            return False
        return any(
            state["state"] == "open" and not state.get("heard") and not self.processes.look_at(rank)
            for rank, state in states.items()
            if rank not in self._cause.ranks
        )

    def end(self, finding: Diagnosis | None = None) -> None:
        """Tell the other ranks that this rank makes no more calls; ``finding``: why it failed, None if it closed.

        Any thread may call it. It never waits: the monitor's thread writes the message.
        """
        self.board.farewell = {"state": "closed"} if finding is None else _failed(finding)
        monitor.remove(self)
        self._has_ended = True

    @property
    def has_failed(self) -> bool:
        """Whether this rank's end of the transport has failed, or another one, and this rank knows why. Any thread."""
        return self._cause is not None or (self.board.farewell or {}).get("state") == "failed"

    def because(self) -> Diagnosis | None:
        """Return why this rank leaves, or will, if a transport of the process has failed. Any thread."""
        return monitor.cause and monitor.cause.among(self.processes.of) or None

    def where(self) -> tuple[str, int, Call | None]:
        """Return the transport's name, the number of its last collective, and the call that it is in. Any thread."""
        progress = self.progress
        return self.board.name, progress.sequence, progress.call

    # What follows runs on the monitor's thread.

    def tick(self) -> None:
        """Answer a question of another rank, and continue this rank's own inquiry."""
        if self._is_overdue():
            # No call waits for this work, so close the links: the next call then reports the failure.
            self._interrupt()
        ask, cause = self.board.read_news()
        self._hear(cause)
        if ask != self._answered or self.board.farewell:
            self._answered = ask
            self.write_state()
        if self._cause or (self._wanted and self._known):
            self._conclude(self._cause or self._known)
            return
        if self._inquiry is None and (self._wanted or self._is_time_to_look()):
            self._inquiries += 1
            question = f"{self._rank}.{self._inquiries}"
            self._inquiry = Inquiry(self.board, self.processes, self._rank, self.progress, question, self._interval)
        if self._inquiry is not None and self._inquiry.step(self._otherwise):
            self._conclude(judge(self._inquiry.signs, self.progress.call))
        elif self._inquiry is not None and self._inquiry.progress is not self.progress:
            # The call that the inquiry was about has ended meanwhile.
            self._inquiry = None

    def store_failed(self) -> None:
        """Judge by this host's process table alone, as the store does not answer."""
        self._conclude(self.judge_here())

    def pause(self) -> float:
        """Return the seconds until the next tick is due."""
        if self._inquiry is not None or self._wanted:
            return POLL
        if self.progress.call is None:
            return self._interval
        return min(max(self._next_look - time.monotonic(), POLL), self._interval)

    def write_state(self) -> None:
        """Write where this rank is, for the other ranks to read."""
        self._serial += 1
        progress, because = self.progress, self.because()
        more = {
            "heard": self._cause is not None,
            "because": _blame(because) if because else None,
            **(self.board.farewell or {}),
        }
        self.board.write_state(encode_state(self._serial, progress.sequence, progress.call, progress.recent, more))

    def leave_store(self) -> None:
        """Write the final state, and leave nothing in the store that nobody needs."""
        try:
            self.write_state()
            self.board.leave(monitor.has_time)
        finally:
            self._has_left.set()

    def await_left(self) -> None:
        """Wait until the final state is written, if the store answers. The calling thread calls it after ``end``."""
        self._has_left.wait(STORE_PATIENCE)

    def _hear(self, cause: bytes) -> None:
        """Take what the store has as the first cause; b"" is none."""
        told = self.board.decode(cause) if cause and self._cause is None else None
        if told is not None:
            self._cause = told
            self.write_state()
            monitor.note(Cause.of(told, self.processes.of))

    def _settle(self, finding: Diagnosis) -> Diagnosis:
        """Put this rank's finding into the store, unless another rank came first; return the first one."""
        if self._cause is None and finding.ranks:
            try:
                self._hear(self.board.settle(finding))
            except RuntimeError:
                monitor.note(Cause.of(finding, self.processes.of))
        return self._cause or finding

    def _is_time_to_look(self) -> bool:
        now = time.monotonic()
        call, since = self.progress.call, self.progress.since
        if since != self._since:
            self._since, self._warned = since, False
            self._next_look = since + max(self._interval, 1.0)
        if call is None or now < self._next_look:
            return False
        # The next look is after twice the time waited so far, but not after the warning is due.
        warning = since + self._stall_warning
        self._next_look = min(2 * now - since, warning if warning > now else float("inf"))
        return True

    def _conclude(self, finding: Diagnosis | None) -> None:
        """Hand the finding to a waiting ``diagnose``. If none waits, make the call in flight fail, or log a warning."""
        sequence, call, since, _ = self._inquiry.progress if self._inquiry else self.progress
        moved_on = call is None or self.progress.since != since
        self._inquiry = None
        waited = time.monotonic() - since
        if self._wanted:
            self._wanted = False
            self._finding = self._settle(finding or self._otherwise)
            self._found.set()
        elif moved_on:
            return
        elif finding is not None and finding.final:
            self._interrupt()
        elif waited >= self._stall_warning and not self._warned:
            self._warned = True
            why = finding.text if finding else "every rank is in it, and waits"
            _logger.warning("rank %d: collective %d lasts %.0f s: %s", self._rank, sequence, waited, why)


def _told(states: Mapping[int, Mapping[str, Any]]) -> Diagnosis | None:
    """Return what a rank that has failed already says of it; None if none has."""
    for state in states.values():
        if "text" in state:
            return Diagnosis(tuple(state["ranks"]), state["text"], True)
    return None


def _failed(finding: Diagnosis) -> dict[str, Any]:
    return {"state": "failed", **_blame(finding)}


def _blame(finding: Diagnosis) -> dict[str, Any]:
    return {"ranks": finding.ranks, "text": finding.text}
