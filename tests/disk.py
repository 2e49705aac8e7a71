"""A disk that is full, without one: no file of this process may grow beyond a number of bytes."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["room_for"]


@contextmanager
def room_for(nbytes: int) -> Iterator[None]:
    """Let writes beyond ``nbytes`` of a file fail with an ``OSError``. Python ignores the signal that comes with it."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
