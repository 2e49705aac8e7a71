"""A follower's end of a connection to a publisher."""

from __future__ import annotations

import socket
import ssl
import threading
from contextlib import suppress

from ..base.errors import ConfigError, TransportError, WireError
from .address import Endpoint
from .frames import BEAT, DATA, GONE, FrameChannel, guard
from .greeting import greet
from .keyring import Keyring, is_name
from .snapshot import Snapshot
from .source import Ended, Source
from .tls import TLS
from .update import read

__all__ = ["TcpSource"]


class TcpSource(Source):
    """Asks a publisher for newer versions, and reconnects after a broken connection.

    Args:
        place: host and port of the publisher.
        name: the name of this follower; None: as the file with its secret, or its host, says.
        keyring: the follower's proof; None: nothing.
        tls: encrypts the connection; None: no encryption.
        timeout: seconds without a byte after which the publisher counts as lost.

    Raises:
        ConfigError: the file with the secret, or those of ``tls``, cannot be used.
    """

    def __init__(
        self, place: Endpoint, name: str | None, keyring: Keyring | None, tls: TLS | None, timeout: float
    ) -> None:
        self._place = place
        self._name = name
        self._keyring = keyring
        if keyring:
            keyring.read()
            keyring.own(name, "")
        self._host = (tls and tls.host) or place.host
        self._tls = tls.for_follower(keyring, name) if tls else None
        self._timeout = timeout
        self._end: socket.socket | None = None
        self._channel: FrameChannel | None = None
        self._asked = False
        self._lock = threading.Lock()  # guards _end and _closed
        self._closed = False

    def next(self, have: Snapshot | None) -> Snapshot | None:
        try:
            channel = self._channel or self._connect()
            if not self._asked:
                channel.ask(have.digest.encode() if have else b"")
                self._asked = True
            kind, nbytes = channel.next_frame()
            if kind == BEAT and not nbytes:
                return None
            if kind == GONE and not nbytes:
                raise Ended
            if kind != DATA:
                raise WireError(f"a frame of kind {kind!r} with {nbytes} bytes: it was damaged on its way")
            made = read(channel.take, nbytes, have)
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
                    socket.socket.shutdown(self._end, socket.SHUT_RDWR)  # that of TLS would race with the reader

    def _connect(self) -> FrameChannel:
        if self._keyring:
            self._keyring.refresh()
        try:
            end = guard(socket.create_connection((self._place.host, self._place.port), self._timeout))
        except OSError as error:
            reason = error.strerror or str(error)
            raise TransportError(f"{self._place} cannot be reached: {reason}; is the publisher there?") from error
        if self._tls:
            end = self._encrypted(end, self._tls)
        with self._lock:
            if self._closed:
                end.close()
                raise ConnectionError("the follower was closed")
            self._end = end
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        name, secret = self._name or _host_name(), None
        if self._keyring:
            name, secret = self._keyring.own(self._name, name)
        try:
            keys = greet(end, name, secret)
        except ConfigError as error:
            if self._keyring and self._keyring.refresh():
                raise TransportError(f"{error}; the file with the secret has changed") from error
            raise
        self._channel = FrameChannel(end, keys)
        self._asked = False
        return self._channel

    def _encrypted(self, end: socket.socket, context: ssl.SSLContext) -> socket.socket:
        try:
            return guard(context.wrap_socket(end, server_hostname=self._host))
        except OSError as error:
            end.close()
            reason = getattr(error, "verify_message", "") or getattr(error, "reason", "") or error
            raise TransportError(
                f"{self._place}: TLS failed: {reason}; is it the publisher, does it have tls=..., and is its "
                f"certificate for {self._host!r} signed by one of the authorities?"
            ) from error

    def _drop(self) -> None:
        with self._lock:
            if self._end:
                self._end.close()
            self._end = self._channel = None


def _host_name() -> str:
    """Return a name for a follower that was given none."""
    name = socket.gethostname()[:64]
    return name if is_name(name) else "follower"
