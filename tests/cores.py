"""Which cores a test may use."""

import fcntl
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

__all__ = ["all_cores", "one_core"]

_CORES = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None


@contextmanager
def one_core() -> Iterator[None]:
    """Keep this thread, and the threads and processes that it starts, on one core that no other worker's test has.

    Ranks that are threads hand Python's lock to each other all the time, which takes 2.5 times as long between cores.
    The kernel cannot part two tests that are kept on one core, so each claims its own while there are enough: the one
    where it is now, or another.
    """
    if _CORES is None:
        yield
        return
    here = int(Path("/proc/thread-self/stat").read_text().rpartition(")")[2].split()[36])
    core, claim = _claim(sorted(_CORES, key=lambda core: core != here))
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, _CORES)
        if claim is not None:
            fcntl.flock(claim, fcntl.LOCK_UN)  # a process that the test has forked, and left, does not keep it
            os.close(claim)


def _claim(cores: Sequence[int]) -> tuple[int, int | None]:
    """Return the first of ``cores`` that no test of this user has, with the open file that says so; else the first."""
    for core in cores:
        path = Path(tempfile.gettempdir(), f"fusionlayer-tests-{os.getuid()}-core-{core}")
        claim = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(claim, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return core, claim
        except BlockingIOError:
            os.close(claim)
    return cores[0], None


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
