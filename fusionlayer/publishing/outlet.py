"""The output of a publisher's versions: the common part of serving over TCP and writing into a folder."""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable

from ..base.errors import FusionLayerError, again
from ..process import forks
from .address import Endpoint
from .snapshot import Snapshot

__all__ = ["Outlet"]

_logger = logging.getLogger("fusionlayer")


class Outlet(ABC):
    """Takes versions from the thread that trains, and publishes them on threads of its own.

    Only the newest version waits: where followers or disks are slower than the training, versions are left out.
    """

    def __init__(self, place: Endpoint) -> None:
        self.place = place
        self._newest: Snapshot | None = None
        self._changed = threading.Condition()
        self._closed = False
        self._failure: FusionLayerError | None = None
        self._generation = forks.generation
        self._threads: list[threading.Thread] = []

    def _start(self, **work: Callable[[], None]) -> None:
        """Start a thread for each function, named after its purpose; they end at the exit of the process."""
        self._threads = [
            threading.Thread(target=target, name=f"fusionlayer {name}", daemon=True) for name, target in work.items()
        ]
        for thread in self._threads:
            thread.start()
        forks.at_exit(self._stop)

    def offer(self, snapshot: Snapshot) -> None:
        """Make this the newest version. It does not wait for anything.

        Raises:
            FusionLayerError: a thread of this outlet has failed.
        """
        if self._generation != forks.generation:
            raise forks.refuse("its publisher belongs to its parent")
        with self._changed:
            if self._failure:
                raise again(self._failure)
            self._newest = snapshot
            self._changed.notify_all()
        self._wake()

    def flush(self, timeout: float) -> bool:
        """Wait until the newest version is out; return whether it is, after ``timeout`` seconds at most."""
        end = time.monotonic() + timeout
        with self._changed:
            while not (done := self._is_out()) and not self._failure and time.monotonic() < end:
                self._changed.wait(end - time.monotonic())
            return done

    def close(self, timeout: float) -> None:
        """Wait until the newest version is out, ``timeout`` seconds at most, and end. A second call does nothing."""
        if self._closed or self._generation != forks.generation:
            return
        self.flush(timeout)
        self._end()
        self._stop()
        forks.not_at_exit(self._stop)

    @property
    @abstractmethod
    def followers(self) -> list[str]:
        """Names of the connected followers, if known."""

    @property
    @abstractmethod
    def refused(self) -> int:
        """How many callers were sent away."""

    @abstractmethod
    def _is_out(self) -> bool:
        """Return whether the newest version is where it belongs. The lock is held."""

    @abstractmethod
    def _wake(self) -> None:
        """Wake the threads after a change."""

    @abstractmethod
    def _end(self) -> None:
        """Notify followers that no more versions come."""

    @abstractmethod
    def _stop(self) -> None:
        """End all threads at once."""

    def _fail(self, error: Exception) -> None:
        """Keep an error of a thread, which the next call raises."""
        if isinstance(error, FusionLayerError):
            told = error
        else:
            told = FusionLayerError(f"publishing at {self.place}: {type(error).__name__}: {error}")
            told.__cause__ = error
        _logger.error("%s; no more versions are published", told)
        with self._changed:
            self._failure = self._failure or told
            self._changed.notify_all()
