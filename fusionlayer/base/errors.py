"""All exceptions of fusionlayer. Every message names the given value, the expected one and the remedy."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import TypeVar


class FusionLayerError(Exception):
    """Base class of all exceptions that fusionlayer raises on purpose."""


class ConfigError(FusionLayerError, ValueError):
    """A name, option, file or environment variable has a value that cannot be used."""


class UsageError(FusionLayerError, AssertionError):
    """Calls came in an order that has no meaning, such as ``zero_grad`` between ``backward`` and ``step``."""


class WireError(FusionLayerError):
    """A payload differs from its receiver's expectation: length, header, index, width or checksum."""


class PlanMismatch(FusionLayerError):
    """Ranks disagree about the data to send. They compare digests and find out before any payload is sent.

    Attributes:
        ranks: the ranks whose digest differs from that of the lowest rank.
    """

    def __init__(self, message: str, ranks: Iterable[int] = ()) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)


class ReplicaMismatch(FusionLayerError):
    """Parameters that all ranks should hold alike differ. All ranks raise it in the same step, before the update.

    Attributes:
        ranks: the ranks whose parameters differ from those of most ranks; all ranks, if no majority is alike.
        tensors: names of the parameters.
    """

    def __init__(self, message: str, ranks: Iterable[int] = (), tensors: Iterable[str] = ()) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)
        self.tensors = tuple(tensors)


class TransportError(FusionLayerError, RuntimeError):
    """A peer failed, stopped or timed out. The group that raised it is closed.

    Attributes:
        ranks: the ranks that caused the failure, if known.
        bucket: index of the bucket in flight, or None outside an engine.
        tensors: names of the tensors in that bucket.
        sequence: number of the collective on its group, or None.
    """

    def __init__(
        self,
        message: str,
        ranks: Iterable[int] = (),
        bucket: int | None = None,
        tensors: Iterable[str] = (),
        sequence: int | None = None,
    ) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)
        self.bucket = bucket
        self.tensors = tuple(tensors)
        self.sequence = sequence


def kind_of(value: object) -> str:
    """Return a value's kind in words, such as "None" or "an int"."""
    name = type(value).__name__
    return "None" if value is None else f"{'an' if name[0] in 'AEIOUaeiou' else 'a'} {name}"


def printable(text: str, *, lines: bool = False) -> str:
    """Return a text of a file or a peer for a terminal, with escapes for characters that cannot be printed.

    Otherwise the text could move the cursor, change colours or titles, or imitate another line.
    """
    if lines:
        return "\n".join(map(printable, text.split("\n")))
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def require(value: object, kind: type | tuple[type, ...], name: str, expected: str) -> None:
    """Raise ``ConfigError`` unless a user's ``value`` is of this kind; ``name`` names its purpose."""
    if not isinstance(value, kind):
        raise ConfigError(f"{name}: got {kind_of(value)}; expected {expected}")


def whole_numbers(values: Iterable[object]) -> list[int]:
    """Return ``values`` as a list of whole numbers; raise ``ConfigError`` if they are something else."""
    try:
        return [operator.index(value) for value in values]  # type: ignore[arg-type]
    except TypeError:
        raise ConfigError(f"got {values!r}; expected a whole number for each rank, such as [2, 1]") from None


_Error = TypeVar("_Error", bound=BaseException)


def again(error: _Error) -> _Error:
    """Return a copy of an error that is kept, to be raised in its place.

    A raised error gets the traceback of the raising thread, which holds all objects of the thread's program. So a kept
    error would keep a job's memory, threads and connections; and two threads would mix up tracebacks.
    """
    copy = type(error).__new__(type(error), *error.args)
    copy.__dict__.update(error.__dict__)
    copy.args = error.args
    copy.__cause__ = error.__cause__
    return copy.with_traceback(error.__traceback__)


def forget(error: BaseException | None) -> None:
    """Drop the tracebacks of a handled error and its causes.

    A traceback holds all objects of its functions, often the error itself too. This cycle would keep a job's memory,
    threads and connections until Python's cycle collector runs.
    """
    seen: set[int] = set()
    left = [error]
    while left:
        each = left.pop()
        if each is not None and id(each) not in seen:
            seen.add(id(each))
            each.__traceback__ = None
            left += each.__cause__, each.__context__
