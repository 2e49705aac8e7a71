"""One thread per process for the heartbeats of all its transports.

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
from .processes import Culprits
from .state import ChannelState

_logger = logging.getLogger("fusionlayer")

# Seconds that a store may take to answer. A store on another host takes a millisecond.
STORE_PATIENCE = 2.0
# Seconds for which a process with a store stays, so that the others can read its cause. Each reads it once per interval
# of its heartbeat, 5 seconds at most.
_LINGER = 12.0
_LINGER_POLL = 0.02
# Seconds for which clients of a store are kept for the next transport: each is a connection of the store's keeper.
_KEPT = 5.0


class _MonitoredHeartbeat(Protocol):
    """The part of a ``Heartbeat`` that the thread uses; ``Heartbeat`` has the descriptions."""

    def tick(self) -> float: ...
    def where(self) -> tuple[str, ChannelState]: ...
    def write_state(self) -> None: ...
    def leave_store(self) -> float: ...
    def end(self) -> None: ...
    def is_awaited(self) -> bool: ...
    @property
    def has_failed(self) -> bool: ...


class _Monitor:
    """Starts the thread with the first heartbeat. The thread ends after the last one."""

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        forks.at_exit(self._stop)  # a forked child may make transports of its own
        # Guards the lists and dicts below, _thread, culprits and _ends_at, and what heartbeats hand over between
        # threads: any thread adds and removes them while the monitor's thread reads. Not held while they tick, since a
        # tick may wait for the store. One lock for all. It is reentrant, because the garbage collector may end a
        # dropped transport, and so call remove(), in any line of a thread that holds the lock.
        self.lock = threading.RLock()
        # A queue of this kind, unlike an event, may be put to in the middle of another call of the same thread.
        self._woken: SimpleQueue[None] = SimpleQueue()
        self._beating: list[_MonitoredHeartbeat] = []
        self._leaving: list[_MonitoredHeartbeat] = []
        self._kept: list[_MonitoredHeartbeat] = []
        self._culprits: Culprits | None = None
        self._thread: threading.Thread | None = None
        self._stores: WeakKeyDictionary[dist.Store, dist.Store] = WeakKeyDictionary()
        self._meeting_stores: WeakKeyDictionary[dist.Store, list[dist.Store]] = WeakKeyDictionary()
        self._met_at = 0.0
        self._has_stumbled = False
        # When the thread begins no more requests, as the process is about to end.
        self._ends_at = float("inf")

    def begin_child(self) -> None:
        """Forget the parent's heartbeats: this process was forked, and its copy of the lock may be held for ever."""
        forks.keep([*self._stores.values(), *self._meeting_stores.values()])
        self._begin()

    def own_store(self, store: dist.Store) -> dist.Store:
        """Return the monitor's own client of a store. All heartbeats on that store share it.

        A client serves one request at a time, so the thread must not share one with threads that wait in theirs.
        """
        with self.lock:
            known = self._stores.get(store)
        if known is None:
            # Not under the lock: a store whose keeper is stopped would keep all other transports waiting.
            known = store.clone()  # type: ignore[attr-defined]
            known.set_timeout(timedelta(seconds=STORE_PATIENCE))
        with self.lock:
            return self._stores.setdefault(store, known)

    def take_meeting_store(self, store: dist.Store, timeout: float) -> dist.Store:
        """Return a client of a store for a transport's meeting; no other transport uses it meanwhile.

        Its requests wait for keys that other ranks write, ``timeout`` seconds for an answer. Transports use it one
        after the other, because a client is a connection, and torch's store looks up the name of each new one: on a
        network with a slow name server no client gets an answer from the store meanwhile.
        """
        with self.lock:
            free = self._meeting_stores.get(store)
            known = free.pop() if free else None
        if known is None:
            known = store.clone()  # type: ignore[attr-defined]
        known.set_timeout(timedelta(seconds=timeout))
        return known

    def give_back_meeting_store(self, store: dist.Store, client: dist.Store) -> None:
        """Keep a client for the next transport. One whose request was given up may answer to it, and is dropped."""
        with self.lock:
            self._meeting_stores.setdefault(store, []).append(client)
            self._met_at = time.monotonic()

    def add(self, heartbeat: _MonitoredHeartbeat) -> None:
        """Tick this heartbeat from now on. Any thread may call it."""
        with self.lock:
            # The job continues, and later failures have other causes.
            self._culprits = None
            self._kept.clear()
            self._beating.append(heartbeat)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="fusionlayer heartbeat", daemon=True)
                self._thread.start()
        self.wake()

    def remove(self, heartbeat: _MonitoredHeartbeat) -> None:
        """Have the thread write the final state, and tick this no more. Any thread may call it; it never waits."""
        with self.lock:
            if heartbeat in self._beating:
                self._beating.remove(heartbeat)
                self._leaving.append(heartbeat)
                if heartbeat.has_failed:  # another one would only keep the store, which may be a server
                    self._kept.append(heartbeat)
        self.wake()

    @property
    def culprits(self) -> Culprits | None:
        """Why a transport of this process has failed, until another one is made. Any thread."""
        with self.lock:
            return self._culprits

    def note(self, culprits: Culprits) -> None:
        """Let all transports report the finding of one of them, in case the process leaves. On the thread."""
        with self.lock:
            if self._culprits is not None:
                return
            self._culprits = culprits
            heartbeats = list(self._beating)
        for heartbeat in heartbeats:
            with suppress(RuntimeError):
                heartbeat.write_state()

    def channels(self) -> dict[str, ChannelState]:
        """Return this process's position in each of its transports, by their names. Any thread may call it."""
        with self.lock:
            heartbeats = list(self._beating)
        return dict(heartbeat.where() for heartbeat in heartbeats)

    def _is_ending(self) -> bool:
        with self.lock:
            return self._ends_at != float("inf")

    def has_time(self) -> bool:
        """Return whether the thread may begin another request. On the thread."""
        with self.lock:
            return time.monotonic() < self._ends_at

    def wake(self) -> None:
        """Let the thread tick all heartbeats now. Any thread may call it."""
        self._woken.put(None)

    def _run(self) -> None:
        while (pause := self._turn()) is not None:
            with suppress(Empty):
                self._woken.get(timeout=pause)

    def _turn(self) -> float | None:
        """Tick all heartbeats; return the seconds until that is due again, None after the last one has ended.

        A function of its own, which keeps no heartbeat while the thread waits.
        """
        # Emptied before the lists are read, so that a heartbeat which comes after the reading is not missed.
        while not self._woken.empty():
            self._woken.get()
        with self.lock:
            leaving, self._leaving = self._leaving, []
            heartbeats = list(self._beating)
            if time.monotonic() > self._met_at + _KEPT:
                self._meeting_stores.clear()
            if not (leaving or heartbeats or self._leaving):
                self._thread = None
                self._stores.clear()  # no connection outlasts the last transport
                self._meeting_stores.clear()
                return None
        for heartbeat in leaving:
            if self.has_time():
                self._attempt(heartbeat.leave_store)
        return min([self._attempt(each.tick) for each in heartbeats if not self._is_ending()], default=0.0)

    def _attempt(self, work: Callable[[], float]) -> float:
        """Do some work; return the seconds until the thread has more to do."""
        try:
            return work()
        except Exception:
            # The thread must not end: it is the only one that finds out why a call lasts.
            if not self._has_stumbled:
                _logger.exception("the thread that heartbeats the other ranks met an error, and goes on")
            self._has_stumbled = True
            return STORE_PATIENCE

    def _stop(self) -> None:
        """Let the thread write all final states and end.

        A thread that returns from a call of torch while Python ends makes C++ abort the process. Over a link of 50 ms
        the final states take seconds. So the thread begins no request after a time, and this waits for the last one.

        If this process has failed and keeps the store, it then stays until the other ranks have read why.
        """
        with self.lock:
            thread, leaving = self._thread, self._beating
            self._leaving += leaving
            self._kept += leaving
            self._beating = []
            self._ends_at = time.monotonic() + STORE_PATIENCE
        for heartbeat in leaving:
            heartbeat.end()
        self.wake()
        if thread is not None:
            thread.join(2 * STORE_PATIENCE + 0.5)
        end = time.monotonic() + _LINGER
        with self.lock:
            kept = list(self._kept)
        while any(heartbeat.is_awaited() for heartbeat in kept) and time.monotonic() < end:
            time.sleep(_LINGER_POLL)


monitor = _Monitor()
os.register_at_fork(after_in_child=monitor.begin_child)
