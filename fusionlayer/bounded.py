"""Calls that may not return: into a store whose keeper is stopped, or a library that nothing can interrupt."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from typing import TypeVar

from . import forks

__all__ = ["Aside", "Overdue", "bounded"]

Result = TypeVar("Result")

# Seconds between two looks at whether the call is still worth waiting for.
_LOOK = 0.05
# Seconds in all that the exit of the process waits for calls that were given up.
_LAST_WAIT = 2.0
# A signal that nothing else uses, for _park.
_PARKING = signal.SIGRTMAX

_given_up: list[threading.Thread] = []


class Overdue(RuntimeError):
    """A call has not returned in time, or nobody waits for it any longer."""


def bounded(
    call: Callable[[], Result], deadline: float, is_in_vain: Callable[[], object] = lambda: None, name: str = "call"
) -> Result:
    """Return ``call()``, or raise what it raises. It runs on a thread of its own.

    The thread of a call that is given up goes on alone, and what the call returns is dropped there.

    Args:
        call: it may block for ever.
        deadline: a time of the monotonic clock.
        is_in_vain: whether the call need not be waited for any longer; asked on the calling thread, every 50 ms. What
            it raises is raised.
        name: of the thread.

    Raises:
        Overdue: the deadline has passed, or the call is in vain.
    """
    aside = Aside(name)
    try:
        return aside.run(call, deadline, is_in_vain)
    finally:
        aside.end()


class Aside:
    """A thread for calls as ``bounded`` makes them, one after the other: to begin a thread for each would take longer.

    The thread begins with the first call. After a call was given up there can be no other one.

    Args:
        name: of the thread.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def __del__(self) -> None:
        self.end()

    def run(self, call: Callable[[], Result], deadline: float, is_in_vain: Callable[[], object]) -> Result:
        """Return ``call()``, or raise, as ``bounded`` does."""
        ended = threading.Event()
        results: list[Result] = []
        errors: list[BaseException] = []

        def run() -> None:
            try:
                results.append(call())
            except BaseException as error:  # handed to the caller
                errors.append(error)
            ended.set()

        if self._thread is None:
            self._thread = threading.Thread(
                target=_make_all, args=(self._calls,), name=f"fusionlayer {self._name}", daemon=True
            )
            self._thread.start()
        self._calls.put(run)
        try:
            while not ended.wait(min(_LOOK, max(deadline - time.monotonic(), 0))):
                if time.monotonic() >= deadline:
                    raise Overdue(f"no end of the {self._name} in time")
                if is_in_vain():
                    raise Overdue(f"the {self._name} was given up")
        finally:
            if not ended.is_set():
                _given_up[:] = [other for other in _given_up if other.is_alive()]
                if not _given_up:
                    forks.at_exit(_join_all)
                _given_up.append(self._thread)
        if errors:
            raise errors.pop()  # a list that stays would be in its traceback, and keep it for ever
        return results[0]

    def end(self) -> None:
        """Let the thread end after the present call; do not wait for that. Any thread may call it, more than once."""
        self._calls.put(None)


def _make_all(calls: SimpleQueue[Callable[[], None] | None]) -> None:
    # Without a reference to what has made the thread, nor to a call that has ended.
    while (call := calls.get()) is not None:
        call()
        del call


def _join_all() -> None:
    # A thread that comes back from C++ while Python ends aborts the process. So wait for those that end soon, and keep
    # the others where they are.
    end = time.monotonic() + _LAST_WAIT
    for thread in _given_up:
        thread.join(max(end - time.monotonic(), 0))
        if thread.is_alive():
            _park(thread)


def _park(thread: threading.Thread) -> None:
    """Keep a thread that waits for the network where it is, in a signal's handler that waits for another signal.

    A thread that waits for a lock is left alone: it may be the interpreter's, which this one would then never get.
    """
    try:
        waits_for = Path(f"/proc/self/task/{thread.native_id}/wchan").read_text()
    except OSError:
        return  # it has ended, or nobody can tell
    if thread.ident is None or waits_for == "0" or "futex" in waits_for:
        return
    libc = ctypes.CDLL(None)
    libc.signal.argtypes, libc.signal.restype = [ctypes.c_int, ctypes.c_void_p], ctypes.c_void_p
    libc.signal(_PARKING, ctypes.cast(libc.pause, ctypes.c_void_p))
    signal.pthread_kill(thread.ident, _PARKING)


os.register_at_fork(after_in_child=_given_up.clear)
