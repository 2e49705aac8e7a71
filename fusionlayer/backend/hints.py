"""What the caller of a collective knows of its tensor, and a process group cannot see."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor

from ..errors import UsageError

__all__ = ["NONE", "Hint", "clear_padding", "current", "hint", "residual_of"]


@dataclass(frozen=True)
class Hint:
    """Holds for the collectives that one thread calls within ``hint``; all ranks give the same.

    Attributes:
        plain: whatever the policy says, the tensor travels as it is.
        residual: (n,) f32, this rank's error feedback of an all-reduce of n elements: added to what is sent, which for
            an average is divided already, and replaced by what sending lost.
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


def residual_of(tensors: Sequence[Tensor]) -> Tensor | None:
    """Return the error feedback of an all-reduce of ``tensors`` as one, if the calling thread has said one.

    Raises:
        UsageError: it is of another size.
    """
    residual = current().residual
    numel = sum(x.numel() for x in tensors)
    if residual is not None and residual.numel() != numel:
        raise UsageError(f"hint: a residual of {residual.numel()} elements for an all-reduce of {numel}")
    return residual


def clear_padding(inputs: Sequence[Tensor]) -> None:
    """Fill with zeros what the calling thread has said to be padding of ``inputs``, one behind the other."""
    padding = current().padding
    if padding and len(inputs) == 1 and inputs[0].is_contiguous():
        flat = inputs[0].detach().view(-1)
        for piece in padding:
            flat[piece].zero_()


@contextmanager
def hint(plain: bool = False, residual: Tensor | None = None, padding: tuple[slice, ...] = ()) -> Iterator[None]:
    """Let collectives that this thread calls within the block know what ``Hint`` describes; the innermost counts."""
    before = current()
    _thread.hint = Hint(plain, residual, padding)
    try:
        yield
    finally:
        _thread.hint = before
