"""Hints: what the caller of a collective knows about its tensor, and a process group cannot see."""

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
    """Applies to the collectives that one thread calls within ``hint``; all ranks give equal hints.

    Attributes:
        plain: the tensor travels as it is, whatever the policy says.
        residual: (n,) f32, this rank's residual for an all-reduce of n elements. It is added to the elements before
            they are encoded (for an average, after the division), and replaced by what the codec lost.
        padding: elements of the input that have no meaning; they are sent as zeros.
    """

    plain: bool = False
    residual: Tensor | None = None
    padding: tuple[slice, ...] = ()


NONE = Hint()
# A hint must not reach collectives that other threads call meanwhile, so each thread has its own.
_thread = threading.local()


def current() -> Hint:
    """Return the hint of the calling thread."""
    found: Hint = getattr(_thread, "hint", NONE)
    return found


def residual_of(tensors: Sequence[Tensor]) -> Tensor | None:
    """Return the residual that the calling thread has given for an all-reduce of ``tensors`` as one, if any.

    Raises:
        UsageError: the residual has another number of elements.
    """
    residual = current().residual
    numel = sum(x.numel() for x in tensors)
    if residual is not None and residual.numel() != numel:
        raise UsageError(f"hint: a residual of {residual.numel()} elements for an all-reduce of {numel}")
    return residual


def clear_padding(inputs: Sequence[Tensor]) -> None:
    """Fill the padding of ``inputs`` with zeros, as the calling thread's hint gives it."""
    padding = current().padding
    if padding and len(inputs) == 1 and inputs[0].is_contiguous():
        flat = inputs[0].detach().view(-1)
        for piece in padding:
            flat[piece].zero_()


@contextmanager
def hint(plain: bool = False, residual: Tensor | None = None, padding: tuple[slice, ...] = ()) -> Iterator[None]:
    """Give a ``Hint`` to the collectives that this thread calls within the block; the innermost block counts."""
    before = current()
    _thread.hint = Hint(plain, residual, padding)
    try:
        yield
    finally:
        _thread.hint = before
