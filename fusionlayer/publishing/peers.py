"""Callers of a publisher: what each has, what is on its way to it, and until when it must take some of it."""

from __future__ import annotations

import socket
import time
from collections import deque
from collections.abc import Sequence

from ..errors import WireError
from .frames import BEAT, DATA, GONE, HAVE, HELLO_BYTES, PREFIX_BYTES, Greeting, frame, guard, read_frame
from .update import Update

__all__ = ["BEAT_SECONDS", "Peer"]

BEAT_SECONDS = 0.5
_GREETING_SECONDS = 5.0
_DIGEST_BYTES = 32
_MOST_AT_ONCE = 1 << 20


class Peer:
    """A connection to a follower. Only the thread that serves touches it.

    Attributes:
        end: its socket, which never waits.
        has: digest of the version that it has, or None.
        told: number of the version that was sent to it last, or None.
        update: what is on its way to it, until it says that it has it; or None.
        since: when it began to wait for a newer version; None: it does not wait.
    """

    def __init__(self, end: socket.socket, secret: bytes | None, timeout: float) -> None:
        self.end = guard(end)
        end.setblocking(False)
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self.has: str | None = None
        self.told: int | None = None
        self.update: Update | None = None
        self.since: float | None = None
        self._greeting: Greeting | None = Greeting(secret)
        self._timeout = timeout
        self._heard = bytearray()
        self._out: deque[memoryview] = deque([memoryview(self._greeting.opening)])
        self._until = time.monotonic() + _GREETING_SECONDS
        self._beat = 0.0

    @property
    def known(self) -> bool:
        """Whether it has proved to be a follower."""
        return self._greeting is None

    @property
    def writes(self) -> bool:
        """Whether there is something to send."""
        return bool(self._out)

    def send(self, update: Update) -> None:
        """Begin to send an update; it waits no longer."""
        self.update, self.told, self.since = update, update.target.version, None
        self._put(frame(DATA, update.nbytes), update.parts)

    def end_of_all(self) -> None:
        """Say that there will be no more versions."""
        self._put(frame(GONE, 0))

    def is_late(self, now: float) -> bool:
        """Return whether its time is over; send a sign of life to one that has nothing else to read."""
        if self.known and not self._out and now >= self._beat:
            self._put(frame(BEAT, 0))
        return now > self._until and (self.writes or not self.known)

    def write(self) -> None:
        """Send what the socket takes.

        Raises:
            OSError: the follower is gone.
        """
        while self._out:
            part = self._out[0]
            try:
                sent = self.end.send(part[:_MOST_AT_ONCE])
            except BlockingIOError:
                return
            if self.known:
                self._until = time.monotonic() + self._timeout
            if sent < part.nbytes:
                self._out[0] = part[sent:]
            else:
                self._out.popleft()
        self._beat = time.monotonic() + BEAT_SECONDS

    def read(self) -> None:
        """Take what has come.

        Raises:
            OSError: the follower is gone.
            WireError: it says what no follower says.
        """
        try:
            data = self.end.recv(HELLO_BYTES + PREFIX_BYTES + _DIGEST_BYTES)
        except BlockingIOError:
            return
        if not data:
            raise ConnectionError("the follower has closed the connection")
        self._heard += data
        if self._greeting:
            if len(self._heard) < HELLO_BYTES:
                return
            is_follower, answer = self._greeting.answer(bytes(self._heard[:HELLO_BYTES]))
            del self._heard[:HELLO_BYTES]
            self._put(answer)
            if not is_follower:
                self.write()
                raise WireError("a caller without the secret")
            self._greeting = None
        while len(self._heard) >= PREFIX_BYTES and self._hear_frame():
            pass

    def _hear_frame(self) -> bool:
        kind, nbytes = read_frame(bytes(self._heard[:PREFIX_BYTES]))
        if kind != HAVE or nbytes not in (0, _DIGEST_BYTES) or (self.since is not None):
            raise WireError(f"a follower sends {kind!r} with {nbytes} bytes")
        if len(self._heard) < PREFIX_BYTES + nbytes:
            return False
        self.has = self._heard[PREFIX_BYTES : PREFIX_BYTES + nbytes].decode("ascii", "replace") or None
        del self._heard[: PREFIX_BYTES + nbytes]
        self.update, self.since = None, time.monotonic()
        return True

    def _put(self, front: bytes, parts: Sequence[memoryview] = ()) -> None:
        if not self._out:
            self._until = time.monotonic() + (self._timeout if self.known else _GREETING_SECONDS)
        self._out.extend([memoryview(front), *parts])
