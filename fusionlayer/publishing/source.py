"""The source of a follower's versions."""

from __future__ import annotations

from abc import ABC, abstractmethod

from .boxes import Boxes
from .snapshot import Snapshot

__all__ = ["Ended", "Source"]


class Ended(Exception):  # noqa: N818 - not an error: the publisher has announced that no more versions come
    """The publisher has ended in order, and the follower has its last version."""


class Source(ABC):
    """Brings the newest version, again and again. One thread calls ``next``, another one ``close``."""

    @abstractmethod
    def next(self, have: Snapshot | None, least: int = 0) -> Snapshot | None:
        """Return a version newer than ``have``, or None if there was none in a while; it may be called again.

        Args:
            have: the version that it last returned. With None the next one is whole.
            least: number of the version to return, or of the first later one; 0: the newest.

        Raises:
            Ended: there will be no more.
            WireError: bytes were damaged. Call it with None then.
            OSError: the publisher cannot be reached, or is gone.
            TransportError: the same, or it did not say a word in time.
            ConfigError: the two ends do not have one secret.
        """

    def select(self, boxes: Boxes) -> None:  # noqa: B027 - whole tensors are right, only longer
        """Ask for parts of tensors in later versions; a source that cannot cut sends whole ones."""

    def drop(self) -> None:  # noqa: B027 - files need none
        """Forget the connections; ``next`` makes other ones."""

    @abstractmethod
    def close(self) -> None:
        """End; a thread that waits in ``next`` gets an error soon."""
