"""Callers of a publisher: the version of each, the update being sent to it, and its deadline."""

from __future__ import annotations

import selectors
import socket
import ssl
import time
from collections import deque
from collections.abc import Iterator
from hashlib import sha256
from typing import Any

from ..base.errors import WireError
from ..base.secrets import TAG_BYTES, Seal
from . import frames
from .boxes import boxes_of
from .frames import PIECE_BYTES, PREFIX_BYTES, Parcel, check_tag, frame, read_frame
from .greeting import HELLO_BYTES, Greeting
from .keyring import Keyring
from .referral import address_of, miss_of
from .snapshot import Snapshot

__all__ = ["BEAT_SECONDS", "Peer"]

BEAT_SECONDS = 0.5
_GREETING_SECONDS = 5.0
_DIGEST_BYTES = 32
_MOST_AT_ONCE = 1 << 20
_MOST_HEARD = 1 << 15
_MOST_ADDRESS, _MOST_MISSED = 300, 64
_NOTHING = -1  # below all numbers of versions
# A follower that has all of an update may decode for this many time-outs before it says so.
_DECODING = 4
_NOT_NOW = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


class Peer:
    """A connection to a follower. Only the thread that serves touches it.

    Attributes:
        end: its socket, which never waits.
        place: where it calls from.
        takes: the parts of tensors that it takes, as ``boxes.text_of`` has them; empty: all.
        has: digest of the version that it has, or None.
        least: number of the version that it asks for, or of the first later one; 0: the newest.
        rests: it has a version, and will ask for another one some time.
        finds: it gets a version from a relay; it rests meanwhile.
        serves: address at which it serves others, or empty.
        parent: where it gets ``assigned`` from, empty: here.
        assigned: the version for which ``parent`` was chosen.
        missed: relays that it has tried in vain for this version.
        wrong: one of them that has sent wrong bytes, until that was noted.
        announced: number of the version that was sent to it last, or None.
        update: the update being sent, until the follower acknowledges it; or None.
        since: when it began to wait for a newer version; None: it does not wait.
        sent: bytes that it has taken.
    """

    def __init__(self, end: socket.socket, place: str, keyring: Keyring | None, timeout: float) -> None:
        self.end = end
        self.place = place
        end.setblocking(False)
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self.takes = b""
        self.has: str | None = None
        self.least = 0
        self.rests = self.finds = False
        self.serves = self.parent = self.wrong = ""
        self.assigned: Snapshot | None = None
        self.missed: set[str] = set()
        self.announced: int | None = None
        self.update: Parcel | None = None
        self.since: float | None = None
        self.sent = 0
        self._greeting = Greeting(keyring)
        self._greeted = False
        self._mine: Seal | None = None
        self._theirs: Seal | None = None
        self._timeout = timeout
        self._heard = bytearray()
        self._part: memoryview | None = memoryview(self._greeting.opening)
        self._rest: deque[Iterator[memoryview]] = deque()
        self._holds = False  # TLS must read before it can write
        self._until = time.monotonic() + _GREETING_SECONDS
        self._beat = 0.0

    @property
    def known(self) -> bool:
        """Whether it has proved to be a follower, and has asked for a version."""
        return self.since is not None or self.announced is not None

    @property
    def name(self) -> str:
        """Its name: from its certificate, or the one that it gave."""
        return self._greeting.name

    @property
    def secret(self) -> bytes | None:
        """The line with which it has proved to be a follower."""
        return self._greeting.secret

    @property
    def writes(self) -> bool:
        """Whether there is something to send."""
        return self._part is not None or bool(self._rest)

    @property
    def events(self) -> int:
        """For which events of its socket to wait."""
        return selectors.EVENT_READ | (selectors.EVENT_WRITE if self.writes and not self._holds else 0)

    def send(self, update: Parcel) -> None:
        """Begin to send an update; it waits no longer."""
        self.update, self.announced, self.since = update, update.target.version, None
        self._put(update.records(self._mine))

    def refer(self, referral: bytes, version: int) -> None:
        """Say where a version is; it waits no longer."""
        self.announced, self.since, self.rests, self.finds = version, None, True, True
        self._put(self._frame(frames.FIND, referral))

    def end_of_all(self) -> None:
        """Say that there will be no more versions."""
        self._put(self._frame(frames.GONE))

    def is_late(self, now: float) -> bool:
        """Return whether its time is over; send a sign of life to one that waits, and has nothing else to read."""
        if self.rests and not self.writes:
            return False
        if self.since is not None and not self.writes and now >= self._beat:
            self._put(self._frame(frames.BEAT))
        if self.known and not self.writes:  # it decodes, or waits
            return self.since is None and now > self._until + (_DECODING - 1) * self._timeout
        return now > self._until

    def write(self) -> None:
        """Send as much as the socket accepts.

        Raises:
            OSError: the follower is gone.
        """
        while (part := self._next_part()) is not None:
            try:
                sent = self.end.send(part[:_MOST_AT_ONCE])
            except _NOT_NOW as error:
                self._holds = isinstance(error, ssl.SSLWantReadError)
                return
            if self.known:
                self._until = time.monotonic() + self._timeout
            self.sent += sent
            self._part = part[sent:] if sent < part.nbytes else None
        self._beat = time.monotonic() + BEAT_SECONDS

    def read(self) -> None:
        """Take what has come.

        Raises:
            OSError: the follower is gone.
            WireError: no follower sends this.
        """
        self._holds = False
        try:
            data = self.end.recv(_MOST_HEARD)  # a record of TLS is shorter, so it keeps nothing back
        except _NOT_NOW:
            return
        if not data:
            raise ConnectionError("it has closed the connection")
        self._heard += data
        if not self._greeted:
            if len(self._heard) < HELLO_BYTES:
                return
            self._greet(bytes(self._heard[:HELLO_BYTES]))
            del self._heard[:HELLO_BYTES]
        while self._hear_frame():
            pass

    def _greet(self, hello: bytes) -> None:
        refusal, answer = self._greeting.answer(hello, _certified(self.end))
        self._put(iter([memoryview(answer)]))
        if refusal:
            self.write()
            raise WireError(refusal)
        self._greeted = True
        if keys := self._greeting.keys:
            self._mine, self._theirs = Seal(keys.host), Seal(keys.caller)

    def _hear_frame(self) -> bool:
        """Take a frame that has come whole; return whether there was one."""
        tag = TAG_BYTES if self._theirs else 0
        front = PREFIX_BYTES + tag
        if len(self._heard) < front:
            return False
        kind, nbytes = read_frame(self._heard)
        if not self._may_send(kind, nbytes):
            raise WireError(f"a follower sends {kind!r} with {nbytes} bytes")
        end = front + nbytes + (tag if nbytes else 0)
        if len(self._heard) < end:
            return False
        heard = bytes(self._heard[:end])
        data = heard[front : front + nbytes]
        if self._theirs:
            check_tag(self._theirs, heard[:PREFIX_BYTES], heard[PREFIX_BYTES:front])
            if data:
                check_tag(self._theirs, data, heard[front + nbytes : end])
        del self._heard[:end]
        if kind == frames.TAKE:
            boxes_of(data)
            self.takes = data
            return True
        if kind == frames.RELAY:
            self.serves = address_of(data, self.place)
            return True
        if kind == frames.MISS:
            place, wrong = miss_of(data)
            if place != self.parent:
                raise WireError(f"a follower has tried relay {place[:80]!r} in vain, to which it was not sent")
            self.missed.add(place)
            self.wrong = place if wrong else ""
            self.announced, self.assigned, self.finds = _NOTHING, None, False
            return True
        self.has, self.least = frames.read_have(data)
        self.update, self.rests, self.finds = None, kind == frames.REST, False
        self.since = None if self.rests else time.monotonic()
        return True

    def _may_send(self, kind: bytes, nbytes: int) -> bool:
        """Return whether this frame may come now."""
        if kind in (frames.TAKE, frames.RELAY):
            return not self.known and 0 < nbytes <= (PIECE_BYTES if kind == frames.TAKE else _MOST_ADDRESS)
        if kind == frames.MISS:
            return self.finds and len(self.missed) < _MOST_MISSED and 0 < nbytes <= 2 * _MOST_ADDRESS
        if kind == frames.REST:
            return self.update is not None and self.since is None and nbytes == _DIGEST_BYTES
        return kind == frames.HAVE and self.since is None and nbytes in frames.HAVE_BYTES

    def _frame(self, kind: bytes, data: bytes = b"") -> Iterator[memoryview]:
        """Yield a short frame. Tags count in the order in which frames are sent."""
        yield memoryview(frame(kind, len(data), self._mine) + data)
        if data and self._mine:
            yield memoryview(self._mine.tag(sha256(data).digest()))

    def _put(self, records: Iterator[memoryview]) -> None:
        if not self.writes and self.known:
            self._until = time.monotonic() + self._timeout
        self._rest.append(records)

    def _next_part(self) -> memoryview | None:
        while self._part is None and self._rest:
            self._part = next(self._rest[0], None)
            if self._part is None:
                self._rest.popleft()
        return self._part


def _certified(end: socket.socket) -> str | None:
    """Return the name in a caller's certificate, if it has shown one."""
    facts: Any = end.getpeercert() if isinstance(end, ssl.SSLSocket) else None
    names = [value for part in (facts or {}).get("subject", ()) for key, value in part if key == "commonName"]
    return str(names[0]) if names else None
