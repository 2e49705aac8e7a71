"""What the caller of a collective knows of its tensor, and a process group cannot see."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor

__all__ = ["NONE", "Hint", "current", "hint"]


@dataclass(frozen=True)
class Hint:
    """Holds for the collectives that one thread calls within ``hint``; all ranks give the same.

    Attributes:
        plain: whatever the policy says, the tensor travels as it is.
        residual: (n,) f32, this rank's error feedback of an all-reduce of n elements: added to what is sent, replaced
            by what sending lost.
        padding: elements of the input without meaning, which may be anything: they are sent as zeros.
    """

    plain: bool = False
    residual: Tensor | None = None
    padding: tuple[slice, ...] = ()


NONE = Hint()
_thread = threading.local()


def current() -> Hint:
    """Return what holds for the calling thread."""
    found: Hint = getattr(_thread, "hint", NONE)
    return found


@contextmanager
def hint(
    plain: bool = False, residual: Tensor | None = None, padding: tuple[slice, ...] = ()
) -> Iterator[None]:
    """Let collectives that this thread calls within the block know what ``Hint`` describes; the innermost counts."""
    before = current()
    _thread.hint = Hint(plain, residual, padding)
    try:
        yield
    finally:
        _thread.hint = before
