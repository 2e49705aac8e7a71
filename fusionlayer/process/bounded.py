"""Calls that may block forever: into a store whose server is stopped, or an uninterruptible library.

An exit waits for the threads that make these calls, and for those of gloo: a thread that returns later aborts the
    process.
"""

from __future__ import annotations

import ctypes
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import TypeVar

from . import forks

Result = TypeVar("Result")

# Seconds between two looks at whether the call is still worth waiting for.
_LOOK = 0.05
# Seconds in all that ``settle`` waits.
_LAST_WAIT = 2.0
# Seconds between two checks of torch's threads at exit: more than the 5 ms after which a thread that waits for the
# interpreter's lock wakes to ask for it.
_LAST_LOOK = 0.01
# A signal that nothing else uses, for _park.
_PARKING = signal.SIGRTMAX

_given_up: list[threading.Thread] = []


class Overdue(RuntimeError):
    """A call has not returned in time, or no caller waits for it any longer."""


def bounded(
    call: Callable[[], Result], deadline: float, is_in_vain: Callable[[], object] = lambda: None, name: str = "call"
) -> Result:
    """Return ``call()``, or raise its exception. It runs on a thread of its own.

    The thread of an abandoned call continues alone, and drops the call's result.

    Args:
        call: it may block for ever.
        deadline: a time of the monotonic clock.
        is_in_vain: whether the call need not be waited for any longer; asked on the calling thread, every 50 ms. Its
            exceptions are raised.
        name: the name of the thread.

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
                    forks.at_exit(partial(settle, _given_up))
                _given_up.append(self._thread)
        if errors:
            raise errors.pop()  # a list that stays would be in its traceback, and keep it for ever
        return results[0]

    def end(self) -> None:
        """Let the thread end after the present call; do not wait for that. Any thread may call it, more than once."""
        self._calls.put(None)


def _make_all(calls: SimpleQueue[Callable[[], None] | None]) -> None:
    # It holds no reference to its creator, nor to an ended call.
    while (call := calls.get()) is not None:
        call()
        del call


def settle(threads: Iterable[threading.Thread]) -> None:
    """Wait at the exit of the process, 2 s in all, until these threads end; keep the others where they are.

    A thread that comes back from C++ while Python ends aborts the process.
    """
    end = time.monotonic() + _LAST_WAIT
    for thread in threads:
        thread.join(max(end - time.monotonic(), 0))
        if thread.is_alive():
            _park(thread)


def _settle_gloo() -> None:
    """Wait, 2 s at most, until torch's threads for collectives by gloo sleep.

    Such a thread wakes the program when a collective has ended, and only then releases the tensors. For that it takes
    the interpreter's lock. If Python ends first, this aborts the process, with torch's own groups, too. torch does not
    report whether its threads have reached this state, so the system is asked: a thread that slept through 10 ms waits
    for its next collective, or for peers. A thread that waits for the interpreter's lock gets it meanwhile.
    """
    end = time.monotonic() + _LAST_WAIT
    before = _gloo_threads()
    while before and time.monotonic() < end:
        time.sleep(_LAST_LOOK)
        now = _gloo_threads()
        if now == before and all("S (sleeping)" in seen for seen in now.values()):
            break
        before = now


def _gloo_threads() -> dict[str, list[str]]:
    """Return, for each thread, its state and how often it has left its core."""
    found = {}
    for task in Path("/proc/self/task").glob("*"):
        try:
            status = (task / "status").read_text()
        except OSError:
            continue  # it has ended
        if status.startswith("Name:\tpt_gloo_runloop"):
            found[task.name] = re.findall(r"^(?:State|\w*voluntary_ctxt_switches):\t(.*)$", status, re.MULTILINE)
    return found


def _park(thread: threading.Thread) -> None:
    """Keep a thread that waits for the network where it is, in a signal's handler that waits for another signal.

    A thread that waits for a lock is left alone: it may be the interpreter's, which this one would then never get.
    """
    try:
        waits_for = Path(f"/proc/self/task/{thread.native_id}/wchan").read_text()
    except OSError:
        return  # it has ended, or cannot be examined
    if thread.ident is None or waits_for == "0" or "futex" in waits_for:
        return
    libc = ctypes.CDLL(None)
    libc.signal.argtypes, libc.signal.restype = [ctypes.c_int, ctypes.c_void_p], ctypes.c_void_p
    libc.signal(_PARKING, ctypes.cast(libc.pause, ctypes.c_void_p))
    signal.pthread_kill(thread.ident, _PARKING)


forks.at_exit(_settle_gloo, last=True)
os.register_at_fork(after_in_child=_given_up.clear)
