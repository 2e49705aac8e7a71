"""One thread per process that looks after the watches of all its transports.

The thread is separate from those that make calls, because they may wait in a library that cannot be interrupted.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from queue import Empty, SimpleQueue
from typing import Protocol
from weakref import WeakKeyDictionary

import torch.distributed as dist

from ..process import forks
from .calls import Call
from .root_cause import Cause

__all__ = ["STORE_PATIENCE", "monitor"]

_logger = logging.getLogger("fusionlayer")

# Seconds that a store may take to answer. A store on another host takes a millisecond.
STORE_PATIENCE = 2.0
# Seconds that a process with a store stays for the others to read why it leaves. Each reads it once per interval of its
# watch, 5 seconds at most.
_LINGER = 12.0
_LINGER_POLL = 0.02


class Watched(Protocol):
    """What the thread needs of a watch. Every method may raise RuntimeError: the store does not answer."""

    def tick(self) -> None:
        """Do the work that is due. Runs on the monitor's thread."""

    def pause(self) -> float:
        """Return the seconds until the next tick is due."""

    def store_failed(self) -> None:
        """Handle a tick that could not reach the store. Runs on the monitor's thread."""

    def where(self) -> tuple[str, int, Call | None]:
        """Return the transport's name, the number of its last collective, and the call that it is in. Any thread."""

    def write_state(self) -> None:
        """Write where this rank is, for the other ranks to read."""

    @property
    def has_failed(self) -> bool:
        """Whether the other ranks have to read in the store why this process leaves."""

    def leave_store(self) -> None:
        """Write the final state of a watch that ends, and leave nothing in the store that nobody needs."""

    def end(self) -> None:
        """End the watch at the exit of the process."""

    def is_awaited(self) -> bool:
        """Return whether this process keeps the store, and other ranks have yet to read there why it leaves."""


class _Monitor:
    """Starts the thread with the first watch. The thread ends after the last one."""

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        forks.at_exit(self._stop)  # a forked child may make transports of its own
        # Guards the lists and dicts below and _thread: any thread adds and removes watches while the monitor's thread
        # reads them. Not held while watches tick, since a tick may wait for the store. Reentrant, because the
        # garbage collector may end a dropped transport, and so call remove(), on the thread that holds it.
        self._lock = threading.RLock()
        # A queue of this kind, unlike an event, may be put to in the middle of another call of the same thread.
        self._woken: SimpleQueue[None] = SimpleQueue()
        self._watches: list[Watched] = []
        self._leaving: list[Watched] = []
        self._kept: list[Watched] = []
        # Why a transport of this process has failed, until another one is made. The monitor's thread sets it, any
        # thread reads it.
        self.cause: Cause | None = None
        self._thread: threading.Thread | None = None
        self._stores: WeakKeyDictionary[dist.Store, dist.Store] = WeakKeyDictionary()
        self._meeting_stores: WeakKeyDictionary[dist.Store, dist.Store] = WeakKeyDictionary()
        self._has_stumbled = False
        # When the thread begins no more requests, as the process is about to end.
        self._ends_at = float("inf")

    def begin_child(self) -> None:
        """Forget the parent's watches: this process was forked, and its copy of the lock may be held for ever."""
        forks.keep([*self._stores.values(), *self._meeting_stores.values()])
        self._begin()

    def own_store(self, store: dist.Store) -> dist.Store:
        """Return the monitor's own client of a store. All watches on that store share it.

        A client serves one request at a time, so the thread must not share one with threads that wait in theirs.
        """
        return self._client(self._stores, store, STORE_PATIENCE)

    def meeting_store(self, store: dist.Store, timeout: float) -> dist.Store:
        """Return the client of a store by which this process's transports meet; none of its requests waits for a key.

        It may be slow while many processes start, so it waits ``timeout`` seconds for an answer. All transports share
        it, because a client is a connection, and torch's store looks up the name of each new one: on a network with a
        slow name server nobody gets an answer from the store meanwhile.
        """
        return self._client(self._meeting_stores, store, timeout)

    def _client(
        self, clients: WeakKeyDictionary[dist.Store, dist.Store], store: dist.Store, patience: float
    ) -> dist.Store:
        with self._lock:
            known = clients.get(store)
        if known is None:
            # Not under the lock: a store whose keeper is stopped would keep all other transports waiting.
            known = store.clone()  # type: ignore[attr-defined]
            known.set_timeout(timedelta(seconds=patience))
        with self._lock:
            return clients.setdefault(store, known)

    def add(self, watch: Watched) -> None:
        """Tick this watch from now on. Any thread may call it."""
        with self._lock:
            # The job goes on, and what comes now has other causes.
            self.cause = None
            self._kept.clear()
            self._watches.append(watch)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="fusionlayer heartbeat", daemon=True)
                self._thread.start()
        self.wake()

    def remove(self, watch: Watched) -> None:
        """Stop ticking this watch, and have the thread write its final state. Any thread may call it; never waits."""
        with self._lock:
            if watch in self._watches:
                self._watches.remove(watch)
                self._leaving.append(watch)
                if watch.has_failed:  # another one would only keep the store, which may be a server
                    self._kept.append(watch)
        self.wake()

    def note(self, cause: Cause) -> None:
        """Have all transports say what one of them has found out, in case the process leaves. On the thread."""
        if self.cause is not None:
            return
        self.cause = cause
        with self._lock:
            watches = list(self._watches)
        for watch in watches:
            with suppress(RuntimeError):
                watch.write_state()

    def calls(self) -> list[tuple[str, int, Call | None]]:
        """Return where each transport of this process is. Any thread may call it."""
        with self._lock:
            watches = list(self._watches)
        return [watch.where() for watch in watches]

    def has_time(self) -> bool:
        """Return whether the thread may begin another request. On the thread."""
        return time.monotonic() < self._ends_at

    def wake(self) -> None:
        """Let the thread tick all watches now. Any thread may call it."""
        self._woken.put(None)

    def _run(self) -> None:
        while True:
            # Emptied before the lists are read, so that a watch which comes after the reading is not missed.
            while not self._woken.empty():
                self._woken.get()
            with self._lock:
                leaving, self._leaving = self._leaving, []
                watches = list(self._watches)
                if not (leaving or watches or self._leaving):
                    self._thread = None
                    self._stores.clear()  # no connection outlasts the last transport
                    self._meeting_stores.clear()
                    return
            for watch in leaving:
                if self.has_time():
                    self._attempt(watch.leave_store, lambda: None)
            for watch in watches:
                if self._ends_at == float("inf"):
                    self._attempt(watch.tick, watch.store_failed)
            with suppress(Empty):
                self._woken.get(timeout=min((watch.pause() for watch in watches), default=0))

    def _attempt(self, work: Callable[[], None], store_failed: Callable[[], None]) -> None:
        try:
            try:
                work()
            except RuntimeError:
                store_failed()
        except Exception:
            # The thread must not end: it is the only one that finds out why a call lasts.
            if not self._has_stumbled:
                _logger.exception("the thread that watches the other ranks met an error, and goes on")
            self._has_stumbled = True

    def _stop(self) -> None:
        """Let the thread write all final states and end.

        A thread that returns from a call of torch while Python ends makes C++ abort the process. Over a link of 50 ms
        the final states take seconds. So the thread begins no request after a time, and this waits for the last one.

        If this process has failed and keeps the store, it then stays until the other ranks have read why.
        """
        with self._lock:
            thread, leaving = self._thread, self._watches
            self._leaving += leaving
            self._kept += leaving
            self._watches = []
            self._ends_at = time.monotonic() + STORE_PATIENCE
        for watch in leaving:
            watch.end()
        self.wake()
        if thread is not None:
            thread.join(2 * STORE_PATIENCE + 0.5)
        end = time.monotonic() + _LINGER
        while any(watch.is_awaited() for watch in self._kept) and time.monotonic() < end:
            time.sleep(_LINGER_POLL)


monitor = _Monitor()
os.register_at_fork(after_in_child=monitor.begin_child)
