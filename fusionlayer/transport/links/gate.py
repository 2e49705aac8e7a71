"""Listeners to which any process can connect: how fast callers are accepted, and what is logged of refused ones."""

from __future__ import annotations

import errno
import logging
import selectors
import socket
import time
from collections.abc import Sequence
from typing import Any

_logger = logging.getLogger("fusionlayer")

_LINE_SECONDS = 1.0
# Errors after which the next caller cannot be accepted either.
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
EXHAUSTED_SECONDS = 0.5
"""Seconds without accepting where there is no descriptor: a listener with callers stays readable, and would keep a core
busy."""
_NO_CREDIT_SECONDS = 0.05


class Refusals:
    """Logs refused callers: at most one line a second, with the number of those without a line.

    Attributes:
        count: number of refused callers.
    """

    def __init__(self, place: object) -> None:
        self.count = 0
        self._place = place
        self._unlogged = 0
        self._next = 0.0

    def add(self, who: str, why: str) -> None:
        """Log a refused caller."""
        self.count += 1
        now = time.monotonic()
        if now < self._next:
            self._unlogged += 1
            return
        self._next = now + _LINE_SECONDS
        more = f"; {self._unlogged} more were sent away since the last line" if self._unlogged else ""
        self._unlogged = 0
        _logger.warning("%s: a caller from %s was sent away: %s%s", self._place, who, why, more)


class Gate:
    """Accepts callers at some listeners: so many at once, then so many a second. The others wait in the kernel.

    Args:
        listeners: where callers come.
        selector: the listeners are registered there, except during a rest.
        most: callers that are accepted at once.
        per_second: callers a second after that.
    """

    def __init__(
        self, listeners: Sequence[socket.socket], selector: selectors.BaseSelector, most: int, per_second: float
    ) -> None:
        self._listeners, self._selector = listeners, selector
        self._most, self._per_second = float(most), per_second
        self._credit, self._counted = self._most, time.monotonic()
        self._is_open = False
        self._rests_until = 0.0
        for end in listeners:
            end.setblocking(False)
        self.look()

    def __contains__(self, end: object) -> bool:
        return end in self._listeners

    def look(self) -> float:
        """Open the gate if its rest is over; return the seconds until then, 0 if it is open."""
        left = self._rests_until - time.monotonic()
        if left <= 0 and not self._is_open:
            for end in self._listeners:
                self._selector.register(end, selectors.EVENT_READ)
            self._is_open = True
        return max(left, 0.0)

    def accept(self, listener: socket.socket) -> tuple[socket.socket, Any] | None:
        """Return a caller and its address; None if there is none, or it has to wait."""
        now = time.monotonic()
        self._credit = min(self._credit + (now - self._counted) * self._per_second, self._most)
        self._counted = now
        if self._credit < 1:
            self.rest(_NO_CREDIT_SECONDS)
            return None
        try:
            found = listener.accept()
        except OSError as error:
            if error.errno not in _EXHAUSTED:  # it has gone again
                return None
            self.rest(EXHAUSTED_SECONDS)
            raise
        self._credit -= 1
        return found

    def refund(self) -> None:
        """Let one more in: a caller has proved that it belongs here."""
        self._credit += 1

    def rest(self, seconds: float) -> None:
        """Accept no caller for a while."""
        self._rests_until = time.monotonic() + seconds
        if self._is_open:
            for end in self._listeners:
                self._selector.unregister(end)
        self._is_open = False
