"""Which cores a test may use."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["all_cores", "one_core"]

_CORES = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None


@contextmanager
def one_core() -> Iterator[None]:
    """Keep this thread, and the threads and processes that it starts, on the core where it is now.

    Ranks that are threads hand Python's lock to each other all the time, which takes 2.5 times as long between cores.
    """
    if _CORES is None:
        yield
        return
    here = int(Path("/proc/thread-self/stat").read_text().rpartition(")")[2].split()[36])
    os.sched_setaffinity(0, {here})
    try:
        yield
    finally:
        os.sched_setaffinity(0, _CORES)


@contextmanager
def all_cores() -> Iterator[None]:
    """Let this thread, and the processes that it starts, use all cores again, as compilers should."""
    if _CORES is None:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, _CORES)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
