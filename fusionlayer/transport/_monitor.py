"""The one thread of the process that looks after all its transports' watches."""

from __future__ import annotations

import atexit
import threading
from contextlib import suppress
from datetime import timedelta
from typing import Protocol
from weakref import WeakKeyDictionary

import torch.distributed as dist

__all__ = ["STORE_PATIENCE", "monitor"]

# Seconds that a store may take to answer; one on another host takes a millisecond.
STORE_PATIENCE = 2.0


class Watched(Protocol):
    """What the thread does for a watch. All of it may raise RuntimeError, which is a store that does not answer."""

    def tick(self) -> None:
        """Do what is due."""

    def pause(self) -> float:
        """Return the seconds until the next tick is due."""

    def store_failed(self) -> None:
        """The last tick could not reach the store."""

    def write_state(self) -> None:
        """Write the last word of a watch that ends."""

    def end(self) -> None:
        """End at the exit of the process."""


class _Monitor:
    """Starts the thread with the first watch; it ends with the last."""

    def __init__(self) -> None:
        # Guards all fields below but _woken: any thread adds and removes watches while the monitor's thread reads them.
        self._lock = threading.Lock()
        self._woken = threading.Event()
        self._watches: list[Watched] = []
        self._leaving: list[Watched] = []
        self._thread: threading.Thread | None = None
        self._stores: WeakKeyDictionary[dist.Store, dist.Store] = WeakKeyDictionary()
        atexit.register(self._stop)

    def own_store(self, store: dist.Store) -> dist.Store:
        """Return a connection to the same store for this thread, one for all watches."""
        with self._lock:
            if store not in self._stores:
                own: dist.Store = store.clone()  # type: ignore[attr-defined]
                own.set_timeout(timedelta(seconds=STORE_PATIENCE))
                self._stores[store] = own
            return self._stores[store]

    def add(self, watch: Watched) -> None:
        """Tick this watch from now on."""
        with self._lock:
            self._watches.append(watch)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="fusionlayer heartbeat", daemon=True)
                self._thread.start()
        self.wake()

    def remove(self, watch: Watched) -> None:
        """Have the last word of this watch written, and tick it no more."""
        with self._lock:
            if watch in self._watches:
                self._watches.remove(watch)
                self._leaving.append(watch)
        self.wake()

    def wake(self) -> None:
        """Tick all watches now."""
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
            thread.join(STORE_PATIENCE)


monitor = _Monitor()
