"""A side channel through the store, by which ranks find out which of them are alive and in which calls.

Ranks answer when asked. One daemon thread per process reads, for each transport, two keys of the store per interval. It
writes only after a waiting rank has asked for signs of life. So a healthy job costs one small read per interval (40 us
by TCP on one host), and a FileStore, which keeps every write, does not grow.

The first rank that knows why a transport has failed puts the cause into the store before it leaves. All others repeat
it, so that no rank names one that left only because of the same failure.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from types import MappingProxyType

import torch.distributed as dist

from ..process.processes import Identity
from .calls import Call
from .inquiry import POLL, Inquirer, Position, Question
from .judge import verdict
from .meeting import await_all
from .monitor import STORE_PATIENCE, monitor
from .processes import Culprits, Processes
from .state import ChannelState, Finding, RankState
from .store import StatusKeys, lost_store

_logger = logging.getLogger("fusionlayer")

_LOOK_POLL = 0.01
# Seconds that a failed call waits for the store if the process that keeps it is seen to be gone or stopped.
_HOPELESS = 0.5
# Seconds that a failed call waits for the store if the processes of this host show which rank has failed.
_CERTAIN = 1.5
# Seconds for which the process with the store lets the others read the cause before it reports its own failure.
_ANNOUNCE = 0.5


class Heartbeat:
    """Lets the other ranks know where this rank is in its transport, and finds out why a call does not end.

    The thread that makes calls uses ``position``, ``enter``, ``leave`` and ``diagnose``. After ``meet`` the monitor's
    thread alone reads and writes the store, except in ``is_awaited``. ``monitor.lock`` guards the shared state of
    several threads.

    Args:
        store: the store through which the ranks of the transport have met. A client of its own is used.
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
        keys: the status keys that ranks write for each other.
        position: where this rank is in its calls. The thread that makes calls assigns it before and after each call,
            under ``monitor.lock``.
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
        self.keys = StatusKeys(store, name, rank, size)
        self._store_rank = store_rank
        # A store ends with its last reference, and the others must be able to read why this process leaves.
        self._kept = store if store_rank == rank else None
        self._met_by = store
        self._lost_store = lost_store(store, store_rank)
        self._is_overdue = is_overdue
        self._stall_warning = stall_warning
        self._interrupt = interrupt
        # monitor.lock guards these five.
        self.position = Position(0, None, 0.0, ())
        self._question: Question | None = None
        self._farewell: tuple[str, Finding | None] | None = None
        self._cause: Finding | None = None
        self._has_ended = False
        self._has_left = threading.Event()
        # Ranks that have yet to read the cause of a failure here, as far as ``is_awaited`` knows.
        self._unheard = self.keys.others
        # The monitor's thread alone uses the rest, and the thread that meets before it. The last known position, and
        # whether this rank has warned of it.
        self._seen, self._next_look, self._warned = self.position, 0.0, False
        self._serial = 0
        self._inquirer = Inquirer(self.keys, self.processes, self._interval)
        # The last question of another rank, and this rank's last report to the others.
        self._answered = ""
        self._written: tuple[str, object] = ("", None)

    def meet(self, timeout: float) -> tuple[dist.Store, Finding | None]:
        """Learn the processes of the other ranks. All ranks call it together.

        It blocks forever if the process that keeps the store is stopped, so a thread of its own calls it.
        """
        deadline, before = time.monotonic() + timeout, monitor.culprits
        own, store = monitor.own_store(self._met_by), monitor.take_meeting_store(self._met_by, timeout)

        def explain(missing: list[int], is_late: bool) -> Finding | None:
            # A rank does not come, because it has failed in another transport. This process is notified of that, too.
            # Earlier reports may be outdated.
            known = self.because() if is_late or monitor.culprits is not before else None
            return known if known and (not is_late or set(known.ranks) <= set(missing)) else None

        self.keys.use(store)
        self.keys.begin()
        self.keys.arrive(self._state())
        hint = f"{timeout:g} s; make it on every rank of the group"
        others = partial(StatusKeys, own, self.keys.name, self._rank, self.keys.size)
        finding = await_all(self.keys, others, self.processes, deadline, hint, explain)
        if finding is None:
            self.keys.use(own)
            monitor.add(self)
        return store, finding

    def judge_here(self, is_silent: bool = False) -> Finding:
        """Return findings on the processes of this host, without the store; else that the store does not answer.

        ``is_silent``: it does not, for certain. A rank that has gone explains that only if it keeps the store.
        """
        with monitor.lock:
            cause, question, call = self._cause, self._question, self.position.call
        known = cause or self.because() or (question and question.known)
        if known:
            return known
        seen = self.processes.seen()
        # The process that keeps the store stays until the others have read why it leaves. So its sudden end came first.
        keeper = [each for each in seen if each.rank == self._store_rank]
        if is_silent and not keeper and self._store_rank not in (None, self._rank):
            return self._lost_store
        return verdict(keeper or seen, call) or self._lost_store

    def enter(self, call: Call, sequence: int) -> None:
        """Note that a collective begins. The calling thread calls it."""
        with monitor.lock:
            recent = (*self.position.recent[-1:], (sequence, call))
            self.position = Position(sequence, call, time.monotonic(), recent)

    def enter_again(self) -> None:
        """Note that this rank waits for the last collective: its call has returned, but not all its work is done."""
        with monitor.lock:
            recent = self.position.recent
            if recent:
                self.position = Position(*recent[-1], time.monotonic(), recent)

    def leave(self) -> None:
        """Note that the call has succeeded."""
        with monitor.lock:
            sequence, _, _, recent = self.position
            self.position = Position(sequence, None, 0.0, recent)

    def diagnose(self, otherwise: Finding, known: Finding | None = None) -> Finding:
        """Interrupt the call in flight, and return why it has failed. It is in the store then, if there is one.

        The calling thread calls it and waits for the monitor's thread, which asks the other ranks. This takes a tenth
        of a second if they answer, else at most five intervals and the patience with a store.

        Args:
            otherwise: the reason if there is no evidence against any rank.
            known: why this rank fails, if that is no question. Another rank may have failed before.
        """
        question = Question(otherwise, known)
        with monitor.lock:
            # Other ranks may ask before the cause is known, and must not wait for this one any longer. So it comes
            # before the links are closed.
            self._farewell = "failed", known
            self._question = question
        self.keys.complains = False
        self._interrupt()
        monitor.wake()
        started = time.monotonic()
        while True:
            # Processes of this host are looked up without the store, since the store may have failed itself. And they
            # are looked up often, to see which one is gone first: ranks that fail for the same reason end soon after.
            first = self.processes.see_first()
            if question.answered.wait(_LOOK_POLL):
                break
            with monitor.lock:
                has_ended, cause = self._has_ended, self._cause
            if has_ended:  # the monitor's thread does not look for the cause any more
                return cause or known or otherwise
            waited = time.monotonic() - started
            finding = self.judge_here()
            if waited > _HOPELESS and set(self._lost_store.ranks) & {each.rank for each in first}:
                return finding
            if waited > (_CERTAIN if finding is not self._lost_store else 5 * self._interval + STORE_PATIENCE):
                return finding
        while time.monotonic() - started < _ANNOUNCE and self.is_awaited():
            time.sleep(_LOOK_POLL)
        return question.finding

    def is_awaited(self) -> bool:
        """Return whether this process keeps the store, and some rank has yet to read there why this rank has failed.

        A rank that is at fault, is gone or has left by itself need not read it. The calling thread, or that of the
        exit, calls it once this rank has failed.
        """
        with monitor.lock:
            cause = self._cause
        if self._kept is None or cause is None:
            return False
        try:
            states = self.keys.read(rank for rank in self._unheard if rank not in cause.ranks)
        except RuntimeError:
            return False
        # A rank keeps each state that it has read, so it does not read it again: there are many, 50 times a second.
        self._unheard = [rank for rank, state in states.items() if state.life == "runs" and not state.heard]
        return any(not self.processes.look_at(rank) for rank in self._unheard)

    def end(self, finding: Finding | None = None) -> None:
        """Let the other ranks know that this rank makes no more calls; ``finding``: why it failed, None if it closed.

        Any thread may call it. It never waits: the monitor's thread writes the message.
        """
        with monitor.lock:
            self._farewell = ("ended", None) if finding is None else ("failed", finding)
        self.keys.complains = False
        monitor.remove(self)
        with monitor.lock:
            self._has_ended = True

    @property
    def has_failed(self) -> bool:
        """Whether this rank's end of the transport has failed, or another one, and this rank knows why. Any thread."""
        with monitor.lock:
            return self._cause is not None or (self._farewell is not None and self._farewell[0] == "failed")

    def because(self) -> Finding | None:
        """Return why this rank leaves, or will, if a transport of the process has failed. Any thread."""
        culprits = monitor.culprits
        return culprits and culprits.among(self.processes.of) or None

    def where(self) -> tuple[str, ChannelState]:
        """Return the transport's name, and this rank's position in it. Any thread."""
        with monitor.lock:
            return self.keys.name, self.position.channel(self._rank)

    # The following runs on the monitor's thread.

    def tick(self) -> float:
        """Answer a question of another rank, and continue this rank's own inquiry; return when to do so again."""
        try:
            self._work()
        except RuntimeError:
            # The store does not answer, so the process table of this host alone shows anything.
            self._conclude(self.judge_here())
        return self._pause()

    def _work(self) -> None:
        if self._is_overdue():
            # No call waits for this work, so close the links: the next call then reports the failure.
            self._interrupt()
        ask, cause = self.keys.news()
        self._hear(cause)
        with monitor.lock:
            question, farewell, cause, position = self._question, self._farewell, self._cause, self.position
        request = self._inquirer.read(ask)
        self._answered = request.question if request else ""
        if (self._answered, farewell) != self._written:
            self.write_state()
            self._written = self._answered, farewell
        known = cause or (question and question.known)
        if known:
            self._conclude(known, has_failed=True)
            return
        is_due = self._inquirer.is_busy or question or self._is_time_to_look(position)
        if is_due and self._inquirer.look(position, question.otherwise if question else None):
            self._conclude(self._inquirer.finding)

    def _pause(self) -> float:
        """Return the seconds until the next tick is due."""
        with monitor.lock:
            asks, call = self._question is not None, self.position.call
        if self._inquirer.is_busy or asks:
            return self._inquirer.pause
        if call is None:
            return self._interval
        return min(max(self._next_look - time.monotonic(), POLL), self._interval)

    def write_state(self) -> None:
        """Write where this rank is, for the other ranks to read."""
        self.keys.write(self._state())

    def _state(self) -> RankState:
        self._serial += 1
        with monitor.lock:
            life, finding = self._farewell or ("runs", None)
            state = RankState(
                self._rank,
                self.processes.own,
                self._serial,
                life,
                channels={"": self.position.channel(self._rank, whole=self._answered.endswith(".1"))},
                finding=finding,
                heard=self._cause is not None,
                answers=self._answered,
            )
        leaving = self.because()
        return replace(state, leaving=leaving) if leaving else state

    def leave_store(self) -> float:
        """Write the final state, and leave nothing in the store that no rank needs; return 0."""
        with suppress(RuntimeError):
            self.write_state()
            self.keys.leave(monitor.has_time)
        self._has_left.set()
        return 0.0

    def await_left(self) -> None:
        """Wait until the final state is written, if the store answers. The calling thread calls it after ``end``."""
        self._has_left.wait(STORE_PATIENCE)

    def _hear(self, cause: Finding | None) -> None:
        """Take over the store's first cause."""
        with monitor.lock:
            is_new = cause is not None and self._cause is None
            if is_new:
                self._cause = cause
        if is_new and cause is not None:
            self.write_state()
            monitor.note(Culprits.of(cause, self.processes.of))

    def _settle(self, finding: Finding) -> Finding:
        """Put this rank's finding into the store, unless another rank came first; return the first one."""
        with monitor.lock:
            cause = self._cause
        if cause is None and finding.ranks:
            try:
                self._hear(self.keys.settle(finding))
            except RuntimeError:
                monitor.note(Culprits.of(finding, self.processes.of))
        with monitor.lock:
            return self._cause or finding

    def _is_time_to_look(self, position: Position) -> bool:
        now = time.monotonic()
        if position is not self._seen:
            self._seen, self._warned = position, False
            self._next_look = position.since + max(self._interval, 1.0)
        if position.call is None or now < self._next_look:
            return False
        # The next check is after twice the time waited so far, but not after the warning is due.
        warning = position.since + self._stall_warning
        self._next_look = min(2 * now - position.since, warning if warning > now else float("inf"))
        return True

    def _conclude(self, finding: Finding | None, has_failed: bool = False) -> None:
        """Answer a waiting ``diagnose``. If none waits, make the call in flight fail, or log a warning.

        ``has_failed``: some rank has failed because of the finding, so to wait longer is useless whatever it is.
        """
        with monitor.lock:
            question, position = self._question, self.position
        sequence, call, since, _ = self._inquirer.end() or position
        waited = time.monotonic() - since
        if question is not None:
            question.answer(self._settle(finding or question.otherwise))
            with monitor.lock:
                self._question = None
        elif call is None or position.since != since:
            return  # it has moved on
        elif finding is not None and (has_failed or (finding.final and self._inquirer.is_witness)):
            self._interrupt()
        elif waited >= self._stall_warning and not self._warned:
            self._warned = True
            why = finding.text if finding else "every rank is in it, and waits"
            _logger.warning("rank %d: collective %d lasts %.0f s: %s", self._rank, sequence, waited, why)
