"""A follower's source for what several ranks publish: each sends its shards, which are joined here."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from ..base.errors import TransportError, WireError
from .boxes import Boxes, join
from .client import TcpSource, check_boxes
from .snapshot import Snapshot
from .source import Ended, Source

__all__ = ["ShardsSource"]

_AT_ONCE = 8
_ROUNDS = 16
_MOST_SECONDS = 60.0  # between rank 0 and the others with one version


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
        self._boxes: Boxes = ()
        self._chosen: Boxes = self._boxes  # those of the version that is fetched: all ranks cut it alike

    def next(self, have: Snapshot | None, least: int = 0) -> Snapshot | None:
        # What is here of each rank counts, not what was joined: a rank whose bytes were damaged sends all of its part.
        if self._chosen is not self._boxes:
            self._chosen = self._boxes
            self._parts.clear()  # they were cut in another way
            for source in self._sources.values():
                source.select(self._chosen)
        new = self._part(self._first, least)
        if new is None:
            return None
        self._parts[self._first] = new
        try:
            return self._gather(new) if new.places else new
        except Exception:
            # Rank 0 then sends its version again, or the next one, and where the ranks are by now.
            self._sources[self._first].drop()
            raise

    def _gather(self, first: Snapshot) -> Snapshot:
        """Return the version of which rank 0 has sent its part."""
        for place in self._sources.keys() - {self._first, *first.places}:
            self._sources.pop(place).drop()
            self._parts.pop(place, None)
        for place in first.places:
            if place not in self._sources:
                self._sources[place] = self._connect(place)
                self._sources[place].select(self._chosen)
            if (part := self._parts.get(place)) and part.run != first.run:
                del self._parts[place]  # of a publisher that was there before
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            for _ in range(_ROUNDS):
                parts = {place: self._parts.get(place) for place in (self._first, *first.places)}
                if len({part.run for part in parts.values() if part}) > 1:
                    self._restart()
                    raise TransportError(f"{self._first}: another publisher has begun on some of the ranks")
                number = max(part.version for part in parts.values() if part)
                behind = [place for place, part in parts.items() if (part and part.version) != number]
                if not behind:
                    break
                for place, part in zip(behind, pool.map(self._fetch, behind, [number] * len(behind)), strict=True):
                    self._parts[place] = part
            else:
                raise TransportError(f"{self._first}: ranks publish faster than all parts of a version can be fetched")
        found = [part for part in parts.values() if part]
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
        end = time.monotonic() + _MOST_SECONDS
        for attempt in range(2):
            try:
                while (part := self._part(place, number)) is None:
                    if time.monotonic() > end:
                        self._sources[place].drop()
                        raise TransportError(f"{place} has not published version {number} in {_MOST_SECONDS:g} s")
                return part
            except Ended:
                raise TransportError(f"{place} has ended, and version {number} is missing there") from None
            except OSError:  # the connection may have broken while it rested
                if attempt:
                    raise
        raise AssertionError

    def select(self, boxes: Boxes) -> None:
        check_boxes(boxes)
        self._boxes = boxes

    def drop(self) -> None:
        for source in self._sources.values():
            source.drop()

    def close(self) -> None:
        for source in list(self._sources.values()):
            source.close()
