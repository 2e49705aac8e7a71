"""A follower's end of a connection to a publisher."""

from __future__ import annotations

import json
import logging
import socket
import ssl
import threading
import time
from contextlib import suppress

from ..base.errors import ConfigError, TransportError, WireError
from . import frames
from .address import Endpoint, parse
from .boxes import Boxes, text_of
from .frames import PIECE_BYTES, FrameChannel, guard
from .greeting import greet
from .keyring import Keyring, is_name
from .referral import Referral, check_serves
from .snapshot import Snapshot
from .source import Ended, Source
from .tls import TLS
from .update import read

__all__ = ["TcpSource", "check_boxes"]

_logger = logging.getLogger("fusionlayer")

_RELAY_TIMEOUTS = 4  # a relay may have to wait for another one


class TcpSource(Source):
    """Asks a publisher for newer versions, and reconnects after a broken connection.

    Args:
        place: host and port of the publisher.
        name: the name of this follower; None: as the file with its secret, or its host, says.
        keyring: the follower's proof; None: nothing.
        tls: encrypts the connection; None: no encryption.
        timeout: seconds without a byte after which the publisher counts as lost.

    Attributes:
        place: the address of the publisher.
        serves: the address at which this follower serves others, if it does; to be set before the first ``next``.

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
        self._boxes: Boxes = ()
        self._taken: Boxes = self._boxes
        self.serves = ""
        self.place = str(place)
        self._relay: TcpSource | None = None
        self._lock = threading.Lock()  # guards _end, _relay and _closed
        self._closed = False

    def next(self, have: Snapshot | None, least: int = 0) -> Snapshot | None:
        if self._taken is not self._boxes:
            self.drop()
        try:
            channel = self._channel or self._connect()
            if not self._asked:
                channel.say(frames.HAVE, frames.have(have.digest if have else "", least))
                self._asked = True
            kind, nbytes = channel.next_frame()
            if kind == frames.BEAT and not nbytes:
                return None
            if kind == frames.GONE and not nbytes:
                raise Ended
            if kind == frames.FIND and 0 < nbytes <= PIECE_BYTES:
                self._asked = False
                return self._find(channel, Referral.of(channel.take(nbytes)), have)
            if kind != frames.DATA:
                raise WireError(f"a frame of kind {kind!r} with {nbytes} bytes: it was damaged on its way")
            made = read(channel.take, nbytes, have)
            self._asked = False
            return made
        except TimeoutError as error:
            self.drop()
            raise TransportError(f"{self._place} has not said a word for {self._timeout:g} s") from error
        except BaseException:  # what is left of the connection has no meaning any more
            self.drop()
            raise

    def _find(self, channel: FrameChannel, found: Referral, have: Snapshot | None) -> Snapshot | None:
        """Return a version that a relay has; None if that fails, which this reports to the publisher."""
        wrong, end = False, time.monotonic() + _RELAY_TIMEOUTS * self._timeout
        try:
            with self._lock:
                if self._closed:
                    return None
                if self._relay is None or self._relay.place != found.place:
                    if self._relay:
                        self._relay.drop()
                    self._relay = TcpSource(parse(found.place), self._name, self._keyring, None, self._timeout)
                relay = self._relay
            while (made := relay.next(have, found.version)) is None and time.monotonic() < end:
                pass
            if made is not None and (made.run, made.version) == found[:2]:
                if made.digest == found.digest and not (made.shards or made.places):
                    relay.rest(made)
                    return made
                wrong = True
        except WireError:
            wrong = True
        except (Ended, OSError, ConfigError, TransportError):
            pass
        if wrong:
            _logger.error("%s: relay %s sends bytes of another digest", self._place, found.place)
        if self._relay:
            self._relay.drop()  # what it still sends answers an old question
        channel.say(frames.MISS, json.dumps([found.place, wrong]).encode())
        return None

    def rest(self, have: Snapshot) -> None:
        """Say that ``have`` is here, and that a later version will be asked for some time."""
        if self._channel and not self._asked:
            try:
                self._channel.say(frames.REST, have.digest.encode())
            except OSError:  # ``next`` connects again
                self.drop()

    def select(self, boxes: Boxes) -> None:
        check_boxes(boxes)
        self._boxes = boxes

    def close(self) -> None:
        with self._lock:
            self._closed = True
            if self._relay:
                self._relay.close()
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
        if self.serves:
            check_serves(parse(self.serves), end.getsockname()[0], end.getpeername()[0])
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
        self._asked, self._taken = False, self._boxes
        if self._taken:
            self._channel.say(frames.TAKE, text_of(self._taken))
        if self.serves:
            self._channel.say(frames.RELAY, self.serves.encode())
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

    def drop(self) -> None:
        with self._lock:
            if self._relay:
                self._relay.drop()
            if self._end:
                self._end.close()
            self._end = self._channel = None


def check_boxes(boxes: Boxes) -> None:
    """Raise ``ConfigError`` if boxes take more than a frame can hold."""
    if len(text_of(boxes)) > PIECE_BYTES:
        raise ConfigError(f"select: parts of {len(boxes)} tensors take more than {PIECE_BYTES} bytes to describe")


def _host_name() -> str:
    """Return a name for a follower that was given none."""
    name = socket.gethostname()[:64]
    return name if is_name(name) else "follower"
