"""Who is alive, and where is everybody: a side channel over the store by which the ranks have met.

Ranks answer when asked. One daemon thread per process reads, for each transport, one key of the store per interval, and
writes only after a rank that waits has asked for signs of life. So a job that runs well costs one small read per
interval (40 us by TCP on one host) and a FileStore, which forgets nothing, does not grow.
"""

from __future__ import annotations

import atexit
import json
import logging
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch.distributed as dist

from ._calls import Call
from ._processes import Identity

__all__ = ["Finding", "Watch"]

_logger = logging.getLogger("fusionlayer")

_POLL = 0.1
_STORE_PATIENCE = 2.0


@dataclass(frozen=True, slots=True)
class Finding:
    """Why a call does not end.

    Attributes:
        ranks: the ranks held responsible; empty if nothing speaks against any of them.
        text: why, as a clause that names them.
        final: whether to wait on is of no use.
    """

    ranks: tuple[int, ...]
    text: str
    final: bool


@dataclass(frozen=True, slots=True)
class _Sign:
    """What was learnt of one rank; ``kind`` is a key of _KINDS."""

    rank: int
    kind: str
    text: str
    ranks: tuple[int, ...] = ()


class _Place(NamedTuple):
    """Where this rank is: replaced as a whole, so that another thread sees one moment."""

    sequence: int
    call: Call | None
    since: float


# What can be the matter with a rank, and whether it is final; in the order of blame, for a later kind may be the
# consequence of an earlier one.
_KINDS = {
    "gone": True,
    "conflict": True,
    "stopped": False,
    "left": True,
    "failed": True,
    "silent": False,
    "late": False,
}


class Watch:
    """One rank's end of one transport, as the side channel sees it.

    Args:
        store: store by which the ranks of the transport have met; cloned, so that no other use of it is in the way.
        name: prefix of the keys; of this transport alone, equal on its ranks.
        rank: this rank.
        size: number of ranks.
        timeout: seconds a call may wait; the interval is an eighth of it, at least 0.25 and at most 5 seconds.
        stall_warning: seconds of waiting after which a warning is logged.
        keeper: rank whose process keeps a TCP store, or None.
        is_overdue: whether something that no call waits for any more has run out of time; another thread calls it.
        interrupt: ends the wait of the call in flight with an error; another thread calls it.
    """

    def __init__(
        self,
        store: dist.Store,
        name: str,
        rank: int,
        size: int,
        timeout: float,
        stall_warning: float,
        keeper: int | None,
        *,
        is_overdue: Callable[[], bool],
        interrupt: Callable[[], None],
    ) -> None:
        self.rank = rank
        self.size = size
        self.interval = min(max(timeout / 8, 0.25), 5.0)
        self._store = dist.PrefixStore(name, _monitor.own_store(store))
        self._lost_store = _lost_store(store, keeper)
        self._is_overdue = is_overdue
        self._stall_warning = stall_warning
        self._interrupt = interrupt
        self._identity = Identity.own()
        self._identities: dict[int, Identity] = {}
        self._place = _Place(0, None, 0.0)
        self._serial = 0
        self._answered = ""
        self._farewell: dict[str, Any] | None = None
        self._inquiry: _Inquiry | None = None
        self._inquiries = 0
        self._next_look = 0.0
        self._warned = False
        self._wanted = False
        self._found = threading.Event()
        self._finding: Finding | None = None
        self._store.set(f"who/{rank}", json.dumps(asdict(self._identity)))
        self._store.set("ask", "")
        self.write_state()

    def meet(self, timeout: float) -> list[int]:
        """Learn who the other ranks are; return the ranks that did not come within ``timeout`` seconds."""
        deadline = time.monotonic() + timeout
        missing = list(range(self.size))
        while True:
            missing = [rank for rank in missing if not self._store.check([f"who/{rank}"])]
            if not missing or time.monotonic() > deadline:
                break
            time.sleep(0.01)
        if not missing:
            for rank in range(self.size):
                self._identities[rank] = Identity(**json.loads(self._store.get(f"who/{rank}")))
            _monitor.add(self)
        return missing

    def enter(self, call: Call, sequence: int) -> None:
        """A call begins."""
        now = time.monotonic()
        self._next_look = now + max(self.interval, 1.0)
        self._warned = False
        self._place = _Place(sequence, call, now)

    def leave(self) -> None:
        """The call has ended well."""
        self._place = _Place(self._place.sequence, None, 0.0)

    def diagnose(self) -> Finding:
        """Return why the call in flight has failed. Takes a tenth of a second, or three intervals at most."""
        self._farewell = {"state": "failed"}
        self._wanted = True
        _monitor.wake()
        started = time.monotonic()
        while not self._found.wait(_POLL):
            # Processes of this host are looked at without the store, which may be what is lost.
            waited = time.monotonic() - started
            signs = self._look_around()
            if waited > (_STORE_PATIENCE if signs else 3 * self.interval + _STORE_PATIENCE):
                return _judge(signs, self._place.call) or self._lost_store
        assert self._finding is not None
        return self._finding

    def end(self, finding: Finding | None = None) -> None:
        """Leave word why this rank makes no more calls: it closed, or failed for the reason found. Never waits."""
        if finding is None:
            self._farewell = {"state": "closed"}
        else:
            self._farewell = {"state": "failed", "ranks": finding.ranks, "text": finding.text}
        _monitor.remove(self)

    # What follows runs on the monitor's thread.

    def tick(self) -> None:
        """Answer who asks, and go on with what this rank itself wants to know."""
        if self._is_overdue():
            self._interrupt()
        ask = self._store.get("ask").decode()
        if ask != self._answered or self._farewell:
            self._answered = ask
            self.write_state()
        if self._inquiry is None and (self._wanted or self._is_time_to_look()):
            self._inquiries += 1
            self._inquiry = _Inquiry(self, self._place, f"{self.rank}.{self._inquiries}")
        if self._inquiry is not None and self._inquiry.step():
            self._conclude(_judge(self._inquiry.signs, self._place.call))
        elif self._inquiry is not None and self._inquiry.place is not self._place:
            self._inquiry = None

    def store_failed(self) -> None:
        """The store cannot be asked; what this host's process table says must do."""
        self._conclude(_judge(self._look_around(), self._place.call) or self._lost_store)

    def pause(self) -> float:
        """Return the seconds until the next tick is due."""
        if self._inquiry is not None or self._wanted:
            return _POLL
        if self._place.call is None:
            return self.interval
        return min(max(self._next_look - time.monotonic(), _POLL), self.interval)

    def write_state(self) -> None:
        """Tell the other ranks where this one is."""
        self._serial += 1
        sequence, call, _ = self._place
        state = {
            "serial": self._serial,
            "state": "open",
            "sequence": sequence,
            "call": asdict(call) if call else None,
            **(self._farewell or {}),
        }
        self._store.set(f"at/{self.rank}", json.dumps(state))

    def read_state(self, rank: int) -> dict[str, Any]:
        """Return what this rank has last written of itself."""
        state: dict[str, Any] = json.loads(self._store.get(f"at/{rank}"))
        return state

    def ask(self, question: str) -> None:
        """Have the other ranks write of themselves anew."""
        self._store.set("ask", question)

    def others(self) -> list[int]:
        """Return all ranks but this one."""
        return [rank for rank in range(self.size) if rank != self.rank]

    def interpret(self, place: _Place, rank: int, state: dict[str, Any], fresh: bool, waited: float) -> _Sign | None:
        """Return what speaks against a rank that has written ``state``, anew or before it was asked."""
        sequence, call, _ = place
        behind = state["sequence"] < sequence
        theirs = Call(**state["call"]) if state["call"] else None
        if state["state"] == "failed":
            return _Sign(rank, "failed", state.get("text", ""), tuple(state.get("ranks", ())))
        if state["state"] == "closed":
            if behind or (call is not None and call.partner == rank):
                return _Sign(rank, "left", f"rank {rank} closed its transport after collective {state['sequence']}")
            return None
        trouble = self._look_at(rank)
        if trouble:
            return trouble
        if not fresh:
            name = f"rank {rank} ({self._identities[rank]})"
            return _Sign(rank, "silent", f"{name} gives no sign of life, {waited:.1f} s after it was asked")
        if call and theirs and state["sequence"] == sequence:
            conflict = call.conflict(self.rank, theirs, rank)
            if conflict:
                return _Sign(rank, "conflict", f"{conflict}; make the same calls on every rank")
        if behind:
            at = f"at collective {state['sequence']} while rank {self.rank} is at {sequence}"
            return _Sign(rank, "late", f"rank {rank} is alive but late: {at}")
        if call and call.partner == rank and (theirs is None or theirs.partner != self.rank):
            return _Sign(rank, "late", f"rank {rank} is alive but late: it has not made the matching call")
        return None

    def _look_at(self, rank: int) -> _Sign | None:
        trouble = self._identities[rank].trouble(self._identity)
        return trouble and _Sign(rank, trouble, f"rank {rank} is {trouble} ({self._identities[rank]})") or None

    def _look_around(self) -> list[_Sign]:
        return [sign for rank in self.others() if (sign := self._look_at(rank))]

    def _is_time_to_look(self) -> bool:
        now = time.monotonic()
        _, call, since = self._place
        if call is None or now < self._next_look:
            return False
        warning = since + self._stall_warning
        self._next_look = min(2 * now - since, warning if warning > now else float("inf"))
        return True

    def _conclude(self, finding: Finding | None) -> None:
        sequence, call, since = self._inquiry.place if self._inquiry else self._place
        moved_on = call is None or self._place.since != since
        self._inquiry = None
        waited = time.monotonic() - since
        if self._wanted:
            self._wanted = False
            self._finding = finding or Finding((), "", True)
            self._found.set()
        elif moved_on:
            return
        elif finding is not None and finding.final:
            self._interrupt()
        elif waited >= self._stall_warning and not self._warned:
            self._warned = True
            why = finding.text if finding else "every rank is in it, and waits"
            _logger.warning("rank %d: collective %d lasts %.0f s: %s", self.rank, sequence, waited, why)


class _Inquiry:
    """One round of asking the other ranks of a transport where they are."""

    def __init__(self, watch: Watch, place: _Place, question: str) -> None:
        self.place = place
        self.signs: list[_Sign] = []
        self._watch = watch
        self._serials = {rank: watch.read_state(rank)["serial"] for rank in watch.others()}
        self._open = watch.others()
        watch.ask(question)
        self._started = time.monotonic()

    def step(self) -> bool:
        """Read what has been answered; return whether ``signs`` is all that can be learnt."""
        waited = time.monotonic() - self._started
        patient = waited < 2 * self._watch.interval + _POLL
        still_open = []
        for rank in self._open:
            state = self._watch.read_state(rank)
            fresh = state["serial"] > self._serials[rank]
            sign = self._watch.interpret(self.place, rank, state, fresh, waited)
            unclear = sign is not None and (sign.kind == "silent" or (sign.kind == "failed" and not sign.text))
            if unclear and patient:
                still_open.append(rank)
            elif sign is not None:
                self.signs.append(sign)
        self._open = still_open
        return not still_open or any(sign.kind in ("gone", "stopped", "conflict") for sign in self.signs)


def _judge(signs: Iterable[_Sign], call: Call | None) -> Finding | None:
    """Return the finding that the signs amount to, None if they speak against no rank."""
    signs = list(signs)
    if call is not None and call.partner is not None:
        signs = [sign for sign in signs if sign.rank == call.partner] or signs
    for kind, final in _KINDS.items():
        found = [sign for sign in signs if sign.kind == kind]
        if kind == "failed" and found:
            # What the first of them found out holds for all; their own failure is a consequence.
            told = next((sign for sign in found if sign.text), None)
            if told:
                return Finding(told.ranks, told.text, final)
            found = [_Sign(sign.rank, kind, f"rank {sign.rank} failed and has not said why") for sign in found]
        if found:
            return Finding(tuple(sign.rank for sign in found), "; ".join(sign.text for sign in found), final)
    return None


def _lost_store(store: dist.Store, keeper: int | None) -> Finding:
    """Return what it means that the store cannot be asked."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    if not isinstance(store, dist.TCPStore):
        return Finding((), f"the {type(store).__name__} by which the ranks met does not answer", False)
    place = f"the store at {store.host}:{store.port}"
    if keeper is None:
        return Finding((), f"{place}, kept by the launcher, does not answer", False)
    return Finding((keeper,), f"{place}, kept by rank {keeper}, does not answer", False)


class _Monitor:
    """The one thread of the process that looks after all watches."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._woken = threading.Event()
        self._watches: list[Watch] = []
        self._leaving: list[Watch] = []
        self._thread: threading.Thread | None = None
        self._stores: WeakKeyDictionary[dist.Store, dist.Store] = WeakKeyDictionary()
        atexit.register(self._stop)

    def own_store(self, store: dist.Store) -> dist.Store:
        """Return a connection to the same store for this thread, one for all watches."""
        with self._lock:
            if store not in self._stores:
                own: dist.Store = store.clone()  # type: ignore[attr-defined]
                own.set_timeout(timedelta(seconds=_STORE_PATIENCE))
                self._stores[store] = own
            return self._stores[store]

    def add(self, watch: Watch) -> None:
        with self._lock:
            self._watches.append(watch)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="fusionlayer heartbeat", daemon=True)
                self._thread.start()
        self.wake()

    def remove(self, watch: Watch) -> None:
        with self._lock:
            if watch in self._watches:
                self._watches.remove(watch)
                self._leaving.append(watch)
        self.wake()

    def wake(self) -> None:
        self._woken.set()

    def _run(self) -> None:
        while True:
            self._woken.clear()
            with self._lock:
                leaving, self._leaving = self._leaving, []
                watches = list(self._watches)
                if not leaving and not watches:
                    self._thread = None
                    return
            for watch in leaving:
                with suppress(RuntimeError):
                    watch.write_state()
            for watch in watches:
                try:
                    watch.tick()
                except RuntimeError:
                    watch.store_failed()
            self._woken.wait(min((watch.pause() for watch in watches), default=0))

    def _stop(self) -> None:
        """Let the thread say its goodbyes: at exit it must not be in the middle of a call of torch's."""
        with self._lock:
            thread, leaving = self._thread, self._watches
            self._leaving += leaving
            self._watches = []
        for watch in leaving:
            watch.end()
        self.wake()
        if thread is not None:
            thread.join(_STORE_PATIENCE)


_monitor = _Monitor()
