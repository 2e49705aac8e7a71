"""What publisher and follower say over TCP: who they are, then frames. ``docs/wire_format.md`` describes it."""

from __future__ import annotations

import hmac
import os
import secrets
import socket
import struct
import weakref
import zlib
from collections.abc import Callable
from contextlib import suppress

from ..errors import ConfigError, WireError

__all__ = ["BEAT", "DATA", "GONE", "HAVE", "HELLO_BYTES", "Greeting", "frame", "greet", "guard", "read_frame"]

HAVE, DATA, BEAT, GONE = b"HAVE", b"DATA", b"BEAT", b"GONE"
"""A follower says by HAVE which version it has. A publisher sends an update as DATA, BEAT while it has nothing newer,
and GONE when it ends."""

_MAGIC = b"FLPUB1"
_PREFIX = struct.Struct("<4sQ")
_CRC = struct.Struct("<I")
PREFIX_BYTES = _PREFIX.size + _CRC.size
_NONCE_BYTES, _PROOF_BYTES = 16, 32
_OPENING = struct.Struct(f"<6sB{_NONCE_BYTES}s")
_HELLO = struct.Struct(f"<{_NONCE_BYTES}s{_PROOF_BYTES}s")
_ANSWER = struct.Struct(f"<B{_PROOF_BYTES}s")
HELLO_BYTES = _HELLO.size

_live: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def guard(end: socket.socket) -> socket.socket:
    """Return ``end``, of which a forked child closes its copy: the connection is the parent's."""
    _live.add(end)
    return end


def _begin_child() -> None:
    for end in list(_live):
        with suppress(OSError):
            end.close()


os.register_at_fork(after_in_child=_begin_child)


# ---- who they are ---------------------------------------------------------------------------------------------------


class Greeting:
    """The publisher's end of the beginning of one connection.

    Both ends send a random number, and prove by HMAC-SHA256 of both numbers that they have the secret. It does not
    travel itself, and a proof is worth nothing on another connection.

    Args:
        secret: None: followers need not prove anything.
    """

    def __init__(self, secret: bytes | None) -> None:
        self._secret = secret
        self._nonce = secrets.token_bytes(_NONCE_BYTES)
        self.opening = _OPENING.pack(_MAGIC, secret is not None, self._nonce)

    def answer(self, hello: bytes) -> tuple[bool, bytes]:
        """Return whether this is a follower, and what to answer to its ``hello``."""
        nonce, proof = _HELLO.unpack(hello)
        if self._secret is None:
            return True, _ANSWER.pack(1, bytes(_PROOF_BYTES))
        nonces = self._nonce + nonce
        if not hmac.compare_digest(proof, _prove(self._secret, b"follower", nonces)):
            return False, _ANSWER.pack(0, bytes(_PROOF_BYTES))
        return True, _ANSWER.pack(1, _prove(self._secret, b"publisher", nonces))


def greet(end: socket.socket, secret: bytes | None) -> None:
    """Make the follower's end of the beginning of a connection.

    Raises:
        ConfigError: the ends do not have one secret.
        WireError: the other end is no publisher.
    """
    magic, guarded, theirs = _OPENING.unpack(_exactly(end.recv_into, _OPENING.size))
    if magic != _MAGIC:
        raise WireError(f"another program answers there: it said {magic!r}, expected {_MAGIC!r}")
    if guarded and secret is None:
        raise ConfigError("the publisher asks for a secret: give subscribe(secret=...) that of publish")
    if secret is not None and not guarded:
        raise ConfigError("the publisher has no secret, so nothing shows that it is yours: give publish the secret too")
    mine = secrets.token_bytes(_NONCE_BYTES)
    proof = _prove(secret, b"follower", theirs + mine) if secret else bytes(_PROOF_BYTES)
    end.sendall(_HELLO.pack(mine, proof))
    taken, proof = _ANSWER.unpack(_exactly(end.recv_into, _ANSWER.size))
    known = secret is None or hmac.compare_digest(proof, _prove(secret, b"publisher", theirs + mine))
    if not taken or not known:
        raise ConfigError("publisher and follower have different secrets: give both the same one")


def _prove(secret: bytes, who: bytes, nonces: bytes) -> bytes:
    return hmac.digest(secret, who + nonces, "sha256")


# ---- frames ---------------------------------------------------------------------------------------------------------


def frame(kind: bytes, nbytes: int) -> bytes:
    """Return what stands before the ``nbytes`` of a frame: its kind, its length, and a checksum of both."""
    prefix = _PREFIX.pack(kind, nbytes)
    return prefix + _CRC.pack(zlib.crc32(prefix))


def read_frame(prefix: bytes) -> tuple[bytes, int]:
    """Return kind and length of the frame that begins with ``prefix`` (PREFIX_BYTES).

    Raises:
        WireError: it was damaged.
    """
    kind, nbytes = _PREFIX.unpack_from(prefix)
    if _CRC.unpack_from(prefix, _PREFIX.size)[0] != zlib.crc32(prefix[: _PREFIX.size]):
        raise WireError("the beginning of a frame was damaged on its way")
    return kind, nbytes


def _exactly(receive: Callable[[memoryview], int], nbytes: int) -> bytearray:
    """Return so many bytes. Memory is used as they come.

    Raises:
        ConnectionError: the other end has closed.
    """
    data = bytearray(nbytes)
    view, got = memoryview(data), 0
    while got < nbytes:
        more = receive(view[got:])
        if not more:
            raise ConnectionError("the other end has closed the connection")
        got += more
    return data


def receive(end: socket.socket, nbytes: int) -> bytearray:
    """Return so many bytes of a connection; the socket's time-out holds for each piece that comes.

    Raises:
        ConnectionError: the other end has closed.
        TimeoutError: nothing came in time.
    """
    return _exactly(end.recv_into, nbytes)
