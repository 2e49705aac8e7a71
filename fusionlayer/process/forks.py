"""Forked children. Threads and connections stay with the parent, so the child must not touch them."""

from __future__ import annotations

import atexit
import ctypes
import os
from collections.abc import Callable

from ..base.errors import UsageError

_handlers: list[Callable[[], object]] = []
_last: list[Callable[[], object]] = []

generation = 0
"""A number that differs between a process and its forked children."""


def refuse(what: str) -> UsageError:
    """Return the error for a use in a forked child. ``what``: a clause that names the parent's object."""
    return UsageError(
        f"process {os.getpid()} was forked, and {what}: use it in the parent alone, or start the child with "
        "multiprocessing's 'spawn' and call fusionlayer.init() there"
    )


def at_exit(call: Callable[[], object], *, last: bool = False) -> None:
    """Let ``call`` run at the exit of this process, and not at that of its children, unless ``last`` is set.

    The calls run in reverse order, like those of ``atexit``. The last ones come after all others, also in children.
    """
    if last:
        _last.append(call)
        return
    _handlers.append(call)
    atexit.register(call)


def not_at_exit(call: Callable[[], object]) -> None:
    """Undo ``at_exit``."""
    _handlers[:] = [other for other in _handlers if other != call]
    atexit.unregister(call)


def keep(thing: object) -> None:
    """Never free ``thing``, not even at exit: its destructor would wait for threads that this process does not have."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


def _begin_child() -> None:
    global generation
    generation += 1
    for call in _handlers:
        atexit.unregister(call)
    _handlers.clear()


def _run_last() -> None:
    while _last:
        _last.pop()()


atexit.register(_run_last)  # before all others, so it runs after them
os.register_at_fork(after_in_child=_begin_child)
