"""The source of a follower's versions."""

from __future__ import annotations

from abc import ABC, abstractmethod

from .snapshot import Snapshot

__all__ = ["Ended", "Source"]


class Ended(Exception):  # noqa: N818 - not an error: the publisher has announced that no more versions come
    """The publisher has ended in order, and the follower has its last version."""


class Source(ABC):
    """Brings the newest version, again and again. One thread calls ``next``, another one ``close``."""

    @abstractmethod
    def next(self, have: Snapshot | None) -> Snapshot | None:
        """Return a version newer than ``have``, or None if there was none in a while; it may be called again.

        Args:
            have: the version that it last returned. With None the next one is whole.

        Raises:
            Ended: there will be no more.
            WireError: bytes were damaged. Call it with None then.
            OSError: the publisher cannot be reached, or is gone.
            TransportError: the same, or it did not say a word in time.
            ConfigError: the two ends do not have one secret.
        """

    @abstractmethod
    def close(self) -> None:
        """End; a thread that waits in ``next`` gets an error soon."""
