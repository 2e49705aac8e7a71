"""Waits for messages over gloo, which ends no wait for what was sent to a peer that has gone."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from ...process.bounded import Aside, Overdue
from .base import LinkError
from .gloo_mesh import NEVER_SENT

__all__ = ["LOOK", "SendWaits", "Wait", "Works"]

LOOK = 0.05
"""Seconds between two looks, at first, for failed connections over which something was sent."""

# Seconds between two looks at most. gloo keeps some 65 bytes of each for ever, so they become rare; a rank that fails
# later is found by the watch, which closes the link.
_LOOK_SELDOM = 60.0
_LAST_WORD = 1.0  # seconds after the deadline within which gloo says itself that it has passed
_GRACE = 1.0  # seconds after a connection was closed within which what its peer has sent before is read

Works = Sequence[tuple[int, dist.Work]]
"""Messages in flight, with the peers."""
Wait = Callable[[Works, float], None]
"""Waits for messages in the order given until a deadline; raises ``LinkError`` for the first that fails."""


class SendWaits:
    """Waits until sent data have left this process, for one call after the other.

    When a connection fails, gloo does not end the wait for a message for which its socket had no space, nor for one
    written between the peer's end and its discovery. A peer may go right after it has asked for it. Nothing ends
    such a wait, not even ``close``. So another thread makes it, where it can be abandoned.

    Args:
        wait: how.

    Attributes:
        aside: makes the waits, and may make other calls that block between them.
    """

    def __init__(self, wait: Wait) -> None:
        self._wait = wait
        self.aside = Aside("wait for what was sent")
        self._next_look, self._pause = 0.0, LOOK

    def wait(self, works: Works, deadline: float, open_group: Callable[[], Any]) -> None:
        """Wait for ``works``; ``open_group`` returns the gloo group, or raises ``LinkError`` if it is closed."""
        if not works:
            return
        turn = _Turn(works, deadline, self._wait)
        try:
            self.aside.run(turn.wait, deadline + _LAST_WORD, partial(self._look, turn, open_group))
        except Overdue as error:
            raise LinkError(works[0][0], str(error)) from None

    def _look(self, turn: _Turn, open_group: Callable[[], Any]) -> None:
        group, now = open_group(), time.monotonic()
        if now < self._next_look:
            return
        self._next_look, self._pause = now + self._pause, min(2 * self._pause, _LOOK_SELDOM)
        for peer in turn.peers:
            try:
                group.recv([torch.empty(1, dtype=torch.uint8, device="cpu")], peer, NEVER_SENT)
            except RuntimeError as error:
                self._next_look = now + LOOK
                turn.closed(peer, str(error))


class _Turn:
    """Works that one thread waits for in turn, while another one learns which connections are closed.

    A rank that has all that it wants of a call may close its connections, while this rank still waits for a straggler.
    So a closed connection is an error only if a message for that peer was not sent.
    """

    def __init__(self, works: Works, deadline: float, wait: Wait) -> None:
        self._deadline, self._wait = deadline, wait
        # Both threads take works from it: each is waited for once, since gloo counts the waits.
        self._left = deque(works)
        self._present, self._since = works[0][0], time.monotonic()
        self._closed: dict[int, float] = {}

    @property
    def peers(self) -> set[int]:
        """The peers of works for which no wait has ended."""
        return {self._present, *(peer for peer, _ in [*self._left])}

    def wait(self) -> None:
        """Wait for all."""
        while self._left:
            with suppress(IndexError):  # the other thread has taken the last one meanwhile
                peer, work = self._left.popleft()
                self._present, self._since = peer, time.monotonic()
                self._wait([(peer, work)], self._deadline)

    def closed(self, peer: int, why: str) -> None:
        """Note that the connection to a peer is closed; raise ``LinkError`` if a message for it was not sent."""
        now = time.monotonic()
        if now - self._closed.setdefault(peer, now) < _GRACE:
            return
        if peer == self._present and now - max(self._since, self._closed[peer]) >= _GRACE:
            raise LinkError(peer, why)
        for each in [each for each in [*self._left] if each[0] == peer]:
            with suppress(ValueError):  # the other thread has taken it meanwhile
                self._left.remove(each)
                try:
                    self._wait([each], now)
                except LinkError:
                    raise LinkError(peer, why) from None
