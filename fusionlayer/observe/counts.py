"""Counters of this process: each part counts for itself, and is read only on request."""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple, Protocol


class Counted(Protocol):
    """A part of this process that counts."""

    def counts(self) -> Mapping[str, float]:
        """Return its counts so far, by the names of ``fusionlayer.metrics``. Any thread may call it."""


class Labelled(NamedTuple):
    """One of several values: by a name of ``metrics``, and labels that distinguish it from the others."""

    name: str
    labels: tuple[tuple[str, str], ...]
    value: float


# Guards both: parts come and continue any thread. The last numbers of ended objects stay, so that no sum falls.
# Reentrant, as the garbage collector may end a part on the thread that holds it.
_lock = threading.RLock()
_parts: weakref.WeakSet[Counted] = weakref.WeakSet()
_past: Counter[str] = Counter()
_gauges: list[Callable[[], Mapping[str, float]]] = []
_labelled: list[Callable[[], Iterable[Labelled]]] = []


def register(part: Counted) -> None:
    """Ask this part too, as long as it lives."""
    with _lock:
        _parts.add(part)


def retire(part: Counted) -> None:
    """Keep the counts of an ending part; a second call does nothing."""
    with _lock:
        if part in _parts:
            _parts.discard(part)
            _past.update(part.counts())


def read() -> dict[str, float]:
    """Return the sums over all parts that have been and are."""
    with _lock:
        parts, total = list(_parts), Counter(_past)
    for part in parts:
        total.update(part.counts())
    return dict(total)


def add_gauges(of: Callable[[], Mapping[str, float]]) -> None:
    """Ask this function too for values by the names of ``metrics``. Modules call it while they are imported."""
    _gauges.append(of)


def gauges() -> dict[str, float]:
    """Return the present values of all functions that were added."""
    return {name: value for of in _gauges for name, value in of().items()}


def add_labelled(of: Callable[[], Iterable[Labelled]]) -> None:
    """Ask this function too for values with labels. Modules call it while they are imported."""
    _labelled.append(of)


def labelled() -> list[Labelled]:
    """Return the present values with labels; of those with the same labels the largest."""
    found: dict[tuple[str, tuple[tuple[str, str], ...]], Labelled] = {}
    for of in _labelled:
        for each in of():
            known = found.setdefault(each[:2], each)
            found[each[:2]] = max(known, each, key=lambda one: one.value)
    return list(found.values())
