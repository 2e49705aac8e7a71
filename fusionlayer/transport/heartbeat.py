"""A side channel over the store, by which ranks find out which of them are alive and which calls they are in.

The first rank that knows why a transport has failed puts that into the store before it leaves. All others repeat it,
so that no rank blames one that has only left for the same reason.

Ranks answer when asked. One daemon thread per process reads, for each transport, two keys of the store per interval. It
writes only after a waiting rank has asked for signs of life. So a job that runs well costs one small read per interval
(40 us by TCP on one host), and a FileStore, which keeps every write, does not grow.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch.distributed as dist

from ..processes import Identity
from ._calls import Call
from ._causes import Cause
from ._monitor import STORE_PATIENCE, monitor
from ._signs import EVIDENT, Diagnosis, Sign, judge, lost_store
from ._states import UNREADABLE, decode_cause, decode_state, encode_cause, encode_state

__all__ = ["Watch"]

_logger = logging.getLogger("fusionlayer")

_POLL = 0.1
_MEETING_POLL = _LOOK_POLL = 0.01
# Seconds between two looks, while ranks meet, at what those that have come may tell.
_NEWS_POLL = 0.1
# Seconds for which ranks go on connecting after one is gone: it may have done its part, and had nothing more to do.
_GRACE = 0.5
# Seconds that a failed call waits for the store if the process that keeps it is seen to be gone or stopped.
_HOPELESS = 0.5
# Seconds that a failed call waits for the store if the processes of this host show who is lost.
_CERTAIN = 1.5
# Seconds for which a rank that differs from another one waits for the calls of the rest.
_COMPARING = 0.5
# Seconds that the process with the store gives the others to read the cause before it reports its own failure.
_ANNOUNCE = 0.5


class _Progress(NamedTuple):
    """The call that this rank is in.

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


class Watch:
    """Tells the other ranks where this rank is in its transport, and finds out why a call does not end.

    The thread that makes calls uses ``enter``, ``leave`` and ``diagnose``. Everything that reads or writes the store
    after ``meet`` runs on the monitor's thread. There is no lock: one assignment replaces a field, and a thread that
    still sees the old value sees the new one at its next look. ``_finding`` is set before ``_found``.

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
        self.rank = rank
        self.size = size
        self.interval = min(max(timeout / 8, 0.25), 5.0)
        self._name = name
        self._store_rank = store_rank
        # A store ends with its last reference, and the others must be able to read why this process leaves.
        self._kept = store if store_rank == rank else None
        self._met_by = store
        self._store: dist.Store
        self._lost_store = lost_store(store, store_rank)
        self._is_overdue = is_overdue
        self._stall_warning = stall_warning
        self._interrupt = interrupt
        self._identity = Identity.own()
        self._identities = {**known, rank: self._identity}
        self._has_complained = False
        # Keys of this transport's store that it need not keep once all ranks have left, beside those of the watch.
        self.keys: set[str] = set()
        self._place = _Progress(0, None, 0.0, ())
        self._serial = 0
        self._answered = ""
        self._farewell: dict[str, Any] | None = None
        self._inquiry: _Inquiry | None = None
        self._inquiries = 0
        self._next_look = 0.0
        self._warned = False
        self._wanted = False
        self._otherwise = Diagnosis((), "", True)
        self._known: Diagnosis | None = None
        self._cause: Diagnosis | None = None
        self._seen_first: list[Sign] = []
        self._seen_at = 0.0
        self._found = threading.Event()
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
        own = dist.PrefixStore(self._name, monitor.own_store(self._met_by))
        store = monitor.meeting_store(self._met_by, timeout)
        self._store = dist.PrefixStore(self._name, store)
        self._store.set("ask", "")
        self._store.compare_set("cause", "", "")
        self.write_state()
        self._store.set(f"who/{self.rank}", self._identity.encode())
        finding = self._await_all(deadline, timeout)
        if finding is not None:
            self._farewell = _failed(finding)
            self.write_state()
            return store, finding
        for state in self.read_states(self.others()).values():
            if "text" in state:
                return store, Diagnosis(tuple(state["ranks"]), state["text"], True)
        self._store = own
        monitor.add(self)
        return store, None

    def _await_all(self, deadline: float, timeout: float) -> Diagnosis | None:
        """Return when the identities of all ranks are known, None then; or why some cannot be."""
        missing, come, before = self.others(), [self.rank], monitor.cause
        next_news = 0.0
        while missing and not self._store.check([f"who/{rank}" for rank in missing]):
            now = time.monotonic()
            if now >= next_news or now > deadline:
                next_news = now + _NEWS_POLL
                news = [rank for rank in missing if self._store.check([f"who/{rank}"])]
                self._learn(news)
                come += news
                missing = [rank for rank in missing if rank not in news]
                for state in self.read_states(come).values():
                    if "text" in state:
                        return Diagnosis(tuple(state["ranks"]), state["text"], True)
                # A rank does not come, because it has failed in another transport. This process hears of that, too.
                # What it has heard before may be over.
                if self.see_gone() or (missing and monitor.cause is not before and self.because()):
                    return self.judge_here()
            if missing and now > deadline:
                told = self.because()
                if told and set(told.ranks) <= set(missing):
                    return told
                text = f"ranks {missing} did not come within {timeout:g} s; make it on every rank of the group"
                return Diagnosis(tuple(missing), text, True)
            time.sleep(_MEETING_POLL)
        self._learn(missing)
        return None

    def _learn(self, ranks: Iterable[int]) -> None:
        for rank in ranks:
            self._identities[rank] = Identity.decode(self._store.get(f"who/{rank}"))

    def see_gone(self) -> bool:
        """Return whether the process of a rank has been gone for a while. ``diagnose`` then knows who was first.

        Ranks that fail for the same reason end soon after the first one, so it is worth looking often.
        """
        if not self._seen_first:
            self._seen_first = [sign for sign in self._look_around() if sign.kind == "gone"]
            self._seen_at = time.monotonic()
        return bool(self._seen_first) and time.monotonic() - self._seen_at > _GRACE

    def judge_here(self) -> Diagnosis:
        """Return what the processes of this host show, without the store; else that the store does not answer."""
        told = self._cause or self.because() or self._known
        if told:
            return told
        seen = self._seen_first or self._look_around()
        # Its keeper stays until the others have read why it leaves. So a keeper that is lost without a word came first.
        return judge([sign for sign in seen if sign.rank == self._store_rank] or seen, self._place.call) or (
            self._lost_store
        )

    @property
    def known(self) -> dict[int, Identity]:
        """The processes of the ranks that have met here."""
        return dict(self._identities)

    def enter(self, call: Call, sequence: int) -> None:
        """Note that a call begins. The calling thread calls it for each message, so it does not touch the store."""
        now = time.monotonic()
        self._next_look = now + max(self.interval, 1.0)
        self._warned = False
        recent = self._place.recent
        if call.partner is None:
            recent = (*recent[-1:], (sequence, call))
        self._place = _Progress(sequence, call, now, recent)

    def enter_again(self) -> None:
        """Note that this rank waits for the last collective: its call has returned, but not all its work is done."""
        recent = self._place.recent
        if recent:
            sequence, call = recent[-1]
            self.enter(call, sequence)
            self._place = self._place._replace(recent=recent)

    def leave(self) -> None:
        """Note that the call has succeeded."""
        self._place = self._place._replace(call=None, since=0.0)

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
        self._farewell = {"state": "failed"} if known is None else _failed(known)
        self._otherwise, self._known = otherwise, known
        self._wanted = True
        self._interrupt()
        monitor.wake()
        started = time.monotonic()
        while True:
            # Processes of this host are looked up without the store, since the store may be what is lost. And they are
            # looked up often, to see which one is gone first: ranks that fail for the same reason end soon after it.
            self._seen_first = self._seen_first or self._look_around()
            if self._found.wait(_LOOK_POLL):
                break
            waited = time.monotonic() - started
            finding = self.judge_here()
            if waited > _HOPELESS and set(self._lost_store.ranks) & {sign.rank for sign in self._seen_first}:
                return finding
            if waited > (_CERTAIN if finding is not self._lost_store else 3 * self.interval + STORE_PATIENCE):
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
            # Where all ranks have left, the last one has deleted all keys.
            states = self.read_states(self.others()) if self._store.check(["ask"]) else {}
        except RuntimeError:
            return False
        return any(
            state["state"] == "open" and not state.get("heard") and not self._look_at(rank)
            for rank, state in states.items()
            if rank not in self._cause.ranks
        )

    def end(self, finding: Diagnosis | None = None) -> None:
        """Tell the other ranks that this rank makes no more calls; ``finding``: why it failed, None if it closed.

        Any thread may call it. It never waits: the monitor's thread writes the message.
        """
        if finding is None:
            self._farewell = {"state": "closed"}
        else:
            self._farewell = _failed(finding)
        monitor.remove(self)

    def because(self) -> Diagnosis | None:
        """Return why this rank leaves, or will, if a transport of the process has failed. Any thread."""
        return monitor.cause and monitor.cause.among(self._identities) or None

    # What follows runs on the monitor's thread.

    def tick(self) -> None:
        """Answer a question of another rank, and continue this rank's own inquiry."""
        if self._is_overdue():
            # No call waits for this work, so close the links: the next call then reports the failure.
            self._interrupt()
        ask, cause = self._read_news()
        self._hear(cause)
        if ask != self._answered or self._farewell:
            self._answered = ask
            self.write_state()
        if self._cause or (self._wanted and self._known):
            self._conclude(self._cause or self._known)
            return
        if self._inquiry is None and (self._wanted or self._is_time_to_look()):
            self._inquiries += 1
            self._inquiry = _Inquiry(self, self._place, f"{self.rank}.{self._inquiries}")
        if self._inquiry is not None and self._inquiry.step():
            self._conclude(judge(self._inquiry.signs, self._place.call))
        elif self._inquiry is not None and self._inquiry.place is not self._place:
            # The call that the inquiry was about has ended meanwhile.
            self._inquiry = None

    def store_failed(self) -> None:
        """Judge by this host's process table alone, as the store does not answer."""
        self._conclude(self.judge_here())

    def pause(self) -> float:
        """Return the seconds until the next tick is due."""
        if self._inquiry is not None or self._wanted:
            return _POLL
        if self._place.call is None:
            return self.interval
        return min(max(self._next_look - time.monotonic(), _POLL), self.interval)

    def write_state(self) -> None:
        """Write where this rank is, for the other ranks to read."""
        self._serial += 1
        place = self._place
        because = self.because()
        more = {
            "heard": self._cause is not None,
            "because": {"ranks": because.ranks, "text": because.text} if because else None,
            **(self._farewell or {}),
        }
        text = encode_state(self._serial, place.sequence, place.call, place.recent, more)
        self._store.set(f"at/{self.rank}", text)

    def leave_store(self) -> None:
        """Write the final state. The last rank that leaves deletes all keys: nobody reads them any more."""
        self.write_state()
        if self._store.add("left", 1) == self.size:
            mine = [f"{kind}/{rank}" for kind in ("at", "who") for rank in range(self.size)]
            for key in ("ask", "cause", "left", *mine, *self.keys):
                self._store.delete_key(key)

    def read_states(self, ranks: Sequence[int]) -> dict[int, Mapping[str, Any]]:
        """Return the last states that these ranks have written, ``UNREADABLE`` for one that makes no sense."""
        keys = [f"at/{rank}" for rank in ranks]
        try:
            texts = self._store.multi_get(keys)
        except RuntimeError:
            # Either the store is lost, and so is the next call, or a key is, and the others still tell something.
            texts = [self._store.get(key) if self._store.check([key]) else b"" for key in keys]
        states = {rank: decode_state(text, self.size) for rank, text in zip(ranks, texts, strict=True)}
        if UNREADABLE in states.values():
            self._complain("what a rank has written about itself")
        return states

    def _read_news(self) -> tuple[str, bytes]:
        """Return the last question to all ranks, and the first cause of a failure; b"" is none."""
        try:
            ask, cause = self._store.multi_get(["ask", "cause"])
        except RuntimeError:
            lost = [key for key in ("ask", "cause") if not self._store.check([key])]
            if not lost:
                raise
            self._complain("what ranks ask or tell each other")
            for key in lost:
                self._store.set(key, "")
            return "", b""
        return ask.decode(errors="replace"), cause

    def _complain(self, what: str) -> None:
        # Once this rank leaves, the last one to leave may delete the keys at any time.
        if not self._has_complained and self._farewell is None:
            self._has_complained = True
            _logger.warning("rank %d: %s is missing in the store or makes no sense", self.rank, what)

    def ask(self, question: str) -> None:
        """Ask the other ranks to write their states again."""
        self._store.set("ask", question)

    def others(self) -> list[int]:
        """Return all ranks but this one."""
        return [rank for rank in range(self.size) if rank != self.rank]

    def interpret(
        self, place: _Progress, rank: int, state: Mapping[str, Any], fresh: bool, waited: float
    ) -> Sign | None:
        """Return the evidence against a rank, from the state that it has written; None if there is none.

        Args:
            place: where this rank was when it asked.
            rank: the other rank.
            state: what the other rank has written last.
            fresh: whether it has written that since it was asked.
            waited: seconds since it was asked.
        """
        sequence, call = place.sequence, place.call
        behind = state["sequence"] < sequence
        # Two calls are compared that have the same number. A rank may have completed one in which a peer still waits.
        mine, theirs = call, state["call"]
        if behind and theirs and theirs.partner is None:
            mine = next((own for number, own in place.recent if number == state["sequence"]), None)
        elif call and call.partner is None:
            theirs = next((c for number, c in state["recent"] if number == sequence), None)
        if "text" in state:
            return Sign(rank, "told", state["text"], tuple(state["ranks"]))
        because = state.get("because")
        told = Sign(rank, "told", because["text"], tuple(because["ranks"])) if because else None
        if state["state"] == "closed":
            amid = state["call"] is not None and state["sequence"] == sequence
            if behind or amid or (call is not None and call.partner == rank):
                text = f"rank {rank} closed its transport {'in' if amid else 'after'} collective {state['sequence']}"
                return told or Sign(rank, "left", text)
            return None
        failed = state["state"] == "failed"
        trouble = None if failed else self._look_at(rank)
        if trouble:
            return told or trouble
        if not (fresh or failed):
            name = f"rank {rank} ({self._identities[rank]})"
            return Sign(rank, "silent", f"{name} gives no sign of life, {waited:.1f} s after it was asked")
        if mine and theirs:
            conflict = mine.conflict(self.rank, theirs, rank)
            if conflict:
                ranks = tuple(sorted((self.rank, rank)))
                return Sign(rank, "conflict", f"{conflict}; make the same calls on every rank", ranks, theirs)
        if failed:
            # What this rank has seen itself is more, unless it blames a rank for that.
            more = f"; {self._otherwise.text}" if self._otherwise.text and not self._otherwise.ranks else ""
            return Sign(rank, "failed", f"rank {rank} failed and does not know why{more}")
        if behind:
            at = f"at collective {state['sequence']} while rank {self.rank} is at {sequence}"
            return Sign(rank, "late", f"rank {rank} is alive but late: {at}")
        if call and call.partner == rank and (theirs is None or theirs.partner != self.rank):
            return Sign(rank, "late", f"rank {rank} is alive but late: it has not made the matching call")
        return Sign(rank, "alike", "") if mine and theirs else None

    def _look_at(self, rank: int) -> Sign | None:
        identity = self._identities.get(rank)
        trouble = identity.trouble(self._identity) if identity else None
        return trouble and Sign(rank, trouble, f"rank {rank} is {trouble} ({identity})") or None

    def _look_around(self) -> list[Sign]:
        return [sign for rank in self.others() if (sign := self._look_at(rank))]

    def _hear(self, cause: bytes) -> None:
        """Take what the store has as the first cause; b"" is none."""
        if cause and self._cause is None:
            told = decode_cause(cause, self.size)
            if told is None:
                self._complain("the cause of a failure")
                return
            self._cause = Diagnosis(*told, True)
            self.write_state()
            monitor.note(Cause.of(self._cause, self._identities))

    def _settle(self, finding: Diagnosis) -> Diagnosis:
        """Put this rank's finding into the store, unless another rank came first; return the first one."""
        if self._cause is None and finding.ranks:
            try:
                self._hear(self._store.compare_set("cause", "", encode_cause(finding.ranks, finding.text)))
            except RuntimeError:
                monitor.note(Cause.of(finding, self._identities))
        return self._cause or finding

    def _is_time_to_look(self) -> bool:
        now = time.monotonic()
        call, since = self._place.call, self._place.since
        if call is None or now < self._next_look:
            return False
        # The next look is after twice the time waited so far, but not after the warning is due.
        warning = since + self._stall_warning
        self._next_look = min(2 * now - since, warning if warning > now else float("inf"))
        return True

    def _conclude(self, finding: Diagnosis | None) -> None:
        """Hand the finding to a waiting ``diagnose``. If none waits, make the call in flight fail, or log a warning."""
        sequence, call, since, _ = self._inquiry.place if self._inquiry else self._place
        moved_on = call is None or self._place.since != since
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
            _logger.warning("rank %d: collective %d lasts %.0f s: %s", self.rank, sequence, waited, why)


def _failed(finding: Diagnosis) -> dict[str, Any]:
    return {"state": "failed", "ranks": finding.ranks, "text": finding.text}


class _Inquiry:
    """One round of asking the other ranks of a transport where they are. Runs on the monitor's thread."""

    def __init__(self, watch: Watch, place: _Progress, question: str) -> None:
        self.place = place
        self.signs: list[Sign] = []
        self._watch = watch
        self._serials = {rank: state["serial"] for rank, state in watch.read_states(watch.others()).items()}
        self._open = watch.others()
        watch.ask(question)
        self._started = time.monotonic()

    def step(self) -> bool:
        """Read the answers; return whether ``signs`` is complete. Does not wait: the monitor has other watches."""
        waited = time.monotonic() - self._started
        patient = waited < 2 * self._watch.interval + _POLL
        still_open = []
        waiting_for = set()
        for rank, state in self._watch.read_states(self._open).items():
            fresh = state["serial"] > self._serials[rank]
            sign = self._watch.interpret(self.place, rank, state, fresh, waited)
            if sign is not None and patient and sign.kind in ("silent", "failed"):
                waiting_for.add(sign.kind)
                still_open.append(rank)
            elif sign is not None:
                self.signs.append(sign)
        self._open = still_open
        kinds = {sign.kind for sign in self.signs} - {"alike"}
        # Where calls differ, those of all ranks show which one is the odd one.
        if kinds == {"conflict"} and still_open and waited < _COMPARING:
            return False
        # A rank that has failed may still write why. There is no need to wait for that if other signs tell the cause.
        known = kinds and "silent" not in waiting_for
        return not still_open or bool(known) or not kinds.isdisjoint(EVIDENT)
