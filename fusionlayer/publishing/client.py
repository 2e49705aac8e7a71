"""A follower's end of a connection to a publisher."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress

from ..errors import TransportError, WireError
from .address import Place
from .frames import BEAT, DATA, GONE, HAVE, PREFIX_BYTES, frame, greet, guard, read_frame, receive
from .snapshot import Snapshot
from .source import Ended, Source
from .update import read

__all__ = ["TcpSource"]


class TcpSource(Source):
    """Asks a publisher for what is newer, and connects again where the link was lost.

    Args:
        place: host and port of the publisher.
        secret: as for ``subscribe``.
        timeout: seconds without a byte after which the publisher counts as lost.
    """

    def __init__(self, place: Place, secret: bytes | None, timeout: float) -> None:
        self._place = place
        self._secret = secret
        self._timeout = timeout
        self._end: socket.socket | None = None
        self._asked = False
        self._lock = threading.Lock()  # guards _end and _closed
        self._closed = False

    def next(self, have: Snapshot | None) -> Snapshot | None:
        try:
            end = self._end or self._connect()
            if not self._asked:
                digest = have.digest.encode() if have else b""
                end.sendall(frame(HAVE, len(digest)) + digest)
                self._asked = True
            kind, nbytes = read_frame(bytes(receive(end, PREFIX_BYTES)))
            if kind == BEAT and not nbytes:
                return None
            if kind == GONE and not nbytes:
                raise Ended
            if kind != DATA:
                raise WireError(f"a frame of kind {kind!r} with {nbytes} bytes: it was damaged on its way")
            made = read(lambda count: receive(end, count), nbytes, have)
            self._asked = False
            return made
        except TimeoutError as error:
            self._drop()
            raise TransportError(f"{self._place} has not said a word for {self._timeout:g} s") from error
        except BaseException:  # what is left of the connection has no meaning any more
            self._drop()
            raise

    def close(self) -> None:
        with self._lock:
            self._closed = True
            if self._end:
                with suppress(OSError):
                    self._end.shutdown(socket.SHUT_RDWR)

    def _connect(self) -> socket.socket:
        try:
            end = guard(socket.create_connection((self._place.host, self._place.port), self._timeout))
        except OSError as error:
            reason = error.strerror or str(error)
            raise TransportError(f"{self._place} cannot be reached: {reason}; is the publisher there?") from error
        with self._lock:
            if self._closed:
                end.close()
                raise ConnectionError("the follower was closed")
            self._end = end
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        greet(end, self._secret)
        self._asked = False
        return end

    def _drop(self) -> None:
        with self._lock:
            if self._end:
                self._end.close()
            self._end = None
