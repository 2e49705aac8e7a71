"""Hints: facts about a tensor that the caller of a collective knows, and a process group cannot see."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from torch import Tensor

from ..base.errors import UsageError
from ..codecs import Codec


@dataclass(frozen=True)
class Differences:
    """The message of an all-gather that replaces its weights: their differences from a copy.

    Attributes:
        codec: the codec of the differences.
        before: (n,) this rank's part of the copy, which all ranks have, in the type of the output.
        after: (n,) its new values, in f32 or that type; read when the call is made.
    """

    codec: Codec
    before: Tensor
    after: Tensor


@dataclass(frozen=True)
class Hint:
    """Applies to the collectives that one thread calls within ``hint``; all ranks give equal hints.

    Attributes:
        plain: the tensor is sent uncompressed, regardless of the policy.
        residual: (n,) f32, this rank's residual for an all-reduce of n elements. It is added to the elements before
            they are encoded (for an average, after the division), and replaced by what the codec lost.
        padding: elements of the input that have no meaning; they are sent as zeros.
        differences: for all-gathers whose output holds a copy of earlier values, by the output's address.
        seeds: numbers for stochastic rounding, one for each call, the same on all ranks. None: a counter of calls, so a
            restarted program rounds differently from one that continues.
    """

    plain: bool = False
    residual: Tensor | None = None
    padding: tuple[slice, ...] = ()
    differences: Mapping[int, Differences] = field(default_factory=dict)
    seeds: Iterator[int] | None = None


NONE = Hint()
# A hint must not reach simultaneous collectives of other threads, so each thread has its own.
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


def differences_of(outs: Sequence[Tensor]) -> Differences | None:
    """Return the message that replaces the input of an all-gather into ``outs``, as the calling thread has set it."""
    found = current().differences
    return found.get(outs[0].data_ptr()) if found and len(outs) == 1 else None


@contextmanager
def hint(
    plain: bool = False,
    residual: Tensor | None = None,
    padding: tuple[slice, ...] = (),
    differences: Mapping[int, Differences] | None = None,
    seeds: Iterator[int] | None = None,
) -> Iterator[None]:
    """Give a ``Hint`` to the collectives that this thread calls within the block; the innermost block counts."""
    before = current()
    _thread.hint = Hint(plain, residual, padding, differences or {}, seeds)
    try:
        yield
    finally:
        _thread.hint = before
