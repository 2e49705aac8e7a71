"""A follower's source for what several ranks publish: each sends its shards, which are joined here."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from ..base.errors import TransportError, WireError
from .boxes import Boxes, join
from .client import TcpSource
from .snapshot import Snapshot
from .source import Ended, Source

__all__ = ["ShardsSource"]

_AT_ONCE = 8
_ROUNDS = 16


class ShardsSource(Source):
    """Follows rank 0, and the ranks that its versions name; other versions come as they are.

    Rank 0 says which version is the newest, and all others are asked for the same. In between they are not asked.

    Args:
        place: address of rank 0.
        connect: returns a source for the address of a rank.
        serves: the address at which this follower serves others, or empty.
    """

    def __init__(self, place: str, connect: Callable[[str], TcpSource], serves: str = "") -> None:
        self._connect = connect
        self._sources = {place: connect(place)}
        self._sources[place].serves = serves
        self._first = place
        self._parts: dict[str, Snapshot | None] = {}  # what the ranks have sent last
        self._is_joined = True  # else the others have not sent theirs of what rank 0 has sent
        self._boxes: Boxes = ()

    def next(self, have: Snapshot | None, least: int = 0) -> Snapshot | None:
        # What is here of each rank counts, not what was joined: a rank whose bytes were damaged sends all of its part.
        new = self._parts.get(self._first)
        if new is None or self._is_joined:
            new = self._part(self._first, least)
        if new is None:
            return None
        self._parts[self._first], self._is_joined = new, False
        joined = self._gather(new) if new.places else new
        self._is_joined = True
        return joined

    def _gather(self, first: Snapshot) -> Snapshot:
        """Return the version of which rank 0 has sent its part."""
        for place in self._sources.keys() - {self._first, *first.places}:
            self._sources.pop(place).drop()
            self._parts.pop(place, None)
        for place in first.places:
            if place not in self._sources:
                self._sources[place] = self._connect(place)
                self._sources[place].select(self._boxes)
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            for _ in range(_ROUNDS):
                parts = {place: self._parts.get(place) for place in (self._first, *first.places)}
                number = max(part.version for part in parts.values() if part)
                behind = [place for place, part in parts.items() if (part and part.version) != number]
                if not behind:
                    break
                for place, part in zip(behind, pool.map(self._fetch, behind, [number] * len(behind)), strict=True):
                    self._parts[place] = part
            else:
                raise TransportError(f"{self._first}: ranks publish faster than all parts of a version can be fetched")
        found = [part for part in parts.values() if part]
        if any(part.run != found[0].run for part in found):
            self._restart()
            raise TransportError(f"{self._first}: another publisher has begun on some of the ranks")
        try:
            version, views = join(found)
        except WireError:
            self._restart()
            raise
        for place, view in zip(parts, views, strict=True):
            self._parts[place] = view
            if place != self._first:
                self._sources[place].rest(view)
        return version

    def _restart(self) -> None:
        """Forget what ranks have sent."""
        self._parts.clear()
        self.drop()

    def _part(self, place: str, least: int) -> Snapshot | None:
        """Return what ``next`` of one rank's source returns."""
        try:
            return self._sources[place].next(self._parts.get(place), least)
        except WireError:
            self._parts.pop(place, None)
            raise

    def _fetch(self, place: str, number: int) -> Snapshot:
        """Return what one rank has published as this version, or the next one that it still has."""
        for attempt in range(2):
            try:
                while (part := self._part(place, number)) is None:
                    pass
                return part
            except Ended:
                raise TransportError(f"{place} has ended, and version {number} is missing there") from None
            except OSError:  # the connection may have broken while it rested
                if attempt:
                    raise
        raise AssertionError

    def select(self, boxes: Boxes) -> None:
        self._boxes = boxes
        for source in self._sources.values():
            source.select(boxes)

    def drop(self) -> None:
        for source in self._sources.values():
            source.drop()

    def close(self) -> None:
        for source in list(self._sources.values()):
            source.close()
