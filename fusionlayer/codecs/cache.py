"""Caches that lanes and workers share without a lock."""

from __future__ import annotations

from typing import TypeVar

_K = TypeVar("_K")
_V = TypeVar("_V")

_MOST = 4096


def remember(known: dict[_K, _V], key: _K, value: _V) -> _V:
    """Return ``value`` and keep it in ``known``, which is emptied before it grows large.

    Lanes and workers call this at once and without a lock: for one key all of them have equal values, so it does not
    matter whose is kept.
    """
    if len(known) >= _MOST:
        known.clear()
    known[key] = value
    return value
