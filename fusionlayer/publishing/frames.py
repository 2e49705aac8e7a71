"""Frames: the messages between publisher and follower after the greeting. ``docs/wire_format.md`` describes them.

With a secret every piece is followed by a tag, and nothing is used before its tag was compared.
"""

from __future__ import annotations

import os
import socket
import struct
import weakref
import zlib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from hashlib import sha256

from ..base.errors import WireError
from ..base.secrets import TAG_BYTES, Keys, Seal
from .snapshot import Snapshot
from .update import Update

__all__ = [
    "BEAT",
    "DATA",
    "GONE",
    "HAVE",
    "FrameChannel",
    "Parcel",
    "check_tag",
    "frame",
    "guard",
    "read_frame",
    "receive",
]

HAVE, DATA, BEAT, GONE = b"HAVE", b"DATA", b"BEAT", b"GONE"
"""A follower says by HAVE which version it has. A publisher sends an update as DATA, BEAT while it has nothing newer,
and GONE when it ends."""

_PREFIX = struct.Struct("<4sQ")
_CRC = struct.Struct("<I")
PREFIX_BYTES = _PREFIX.size + _CRC.size
# The data after a prefix have a tag after each block of this many bytes, the most that is kept unverified.
_PIECE_BYTES = 1 << 20
# Memory for more is taken when this many bytes have come.
_STEP_BYTES = 16 << 20

_live: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def guard(end: socket.socket) -> socket.socket:
    """Return ``end`` after arranging that a forked child closes its copy: the connection is the parent's."""
    _live.add(end)
    return end


def _begin_child() -> None:
    for end in list(_live):
        with suppress(OSError):
            end.close()


os.register_at_fork(after_in_child=_begin_child)


def frame(kind: bytes, nbytes: int, seal: Seal | None) -> bytes:
    """Return the prefix of a frame of ``nbytes``: its kind, its length, a checksum of both, and its tag."""
    prefix = _PREFIX.pack(kind, nbytes)
    prefix += _CRC.pack(zlib.crc32(prefix))
    return prefix + (seal.tag(sha256(prefix).digest()) if seal else b"")


def read_frame(prefix: bytes) -> tuple[bytes, int]:
    """Return kind and length of the frame that begins with ``prefix`` (PREFIX_BYTES).

    Raises:
        WireError: it was damaged.
    """
    kind, nbytes = _PREFIX.unpack_from(prefix)
    if _CRC.unpack_from(prefix, _PREFIX.size)[0] != zlib.crc32(prefix[: _PREFIX.size]):
        raise WireError("the beginning of a frame was damaged on its way")
    return kind, nbytes


def check_tag(seal: Seal, piece: memoryview | bytes, tag: memoryview | bytes) -> None:
    """Raise ``WireError`` unless this is the piece that the other end has sent next."""
    if not seal.is_next(bytes(tag), sha256(piece).digest()):
        raise WireError("bytes are not those that the other end has sent: they were changed or damaged on their way")


def receive(end: socket.socket, nbytes: int) -> bytearray:
    """Return this many bytes of a connection; the socket's time-out holds for each piece that comes.

    Memory is taken as bytes come: a peer that announces much must send it.

    Raises:
        ConnectionError: the other end has closed.
        TimeoutError: nothing came in time.
    """
    data = bytearray()
    while len(data) < nbytes:
        got = len(data)
        data += bytes(min(nbytes - got, _STEP_BYTES))
        with memoryview(data) as view:
            while got < len(view):
                more = end.recv_into(view[got:])
                if not more:
                    raise ConnectionError("the other end has closed the connection")
                got += more
    return data


class Parcel:
    """An update in its sent form. Digests of its pieces are made once, for all followers, when the first one needs
    them.

    Attributes:
        target: the version that it makes.
        base: digest of the version that a receiver must have, or None.
        nbytes: length of the update.
    """

    def __init__(self, update: Update) -> None:
        self.target: Snapshot = update.target
        self.base = update.base
        self.nbytes = update.nbytes
        self._pieces = _cut(update.parts)
        self._digests: list[bytes] = []

    def records(self, seal: Seal | None) -> Iterator[memoryview]:
        """Yield the bytes of a frame with this update, with tags if there is a ``seal``."""
        yield memoryview(frame(DATA, self.nbytes, seal))
        for i, views in enumerate(self._pieces):
            yield from views
            if seal:
                yield memoryview(seal.tag(self._digest(i)))

    def _digest(self, i: int) -> bytes:
        if i == len(self._digests):
            whole = sha256()
            for view in self._pieces[i]:
                whole.update(view)
            self._digests.append(whole.digest())
        return self._digests[i]


def _cut(parts: Sequence[memoryview]) -> list[list[memoryview]]:
    """Return the bytes of ``parts`` as pieces of ``_PIECE_BYTES``, the last one shorter."""
    pieces: list[list[memoryview]] = []
    room = 0
    for part in parts:
        view = part.cast("B")
        while view.nbytes:
            if not room:
                pieces.append([])
                room = _PIECE_BYTES
            pieces[-1].append(view[:room])
            room -= pieces[-1][-1].nbytes
            view = view[pieces[-1][-1].nbytes :]
    return pieces


class FrameChannel:
    """A follower's end of a connection, after the greeting. One thread uses it.

    Args:
        end: connected.
        keys: the keys of this connection; None: without tags.
    """

    def __init__(self, end: socket.socket, keys: Keys | None) -> None:
        self._end = end
        self._mine = Seal(keys.caller) if keys else None
        self._theirs = Seal(keys.host) if keys else None
        self._to_come = 0
        self._piece = memoryview(b"")

    def ask(self, digest: bytes) -> None:
        """Send the present version, and request a newer one."""
        said = frame(HAVE, len(digest), self._mine) + digest
        if self._mine and digest:
            said += self._mine.tag(sha256(digest).digest())
        self._end.sendall(said)

    def next_frame(self) -> tuple[bytes, int]:
        """Return kind and length of the next frame.

        Raises:
            WireError: it was damaged or changed.
        """
        kind, self._to_come = read_frame(bytes(self._taken(PREFIX_BYTES)))
        return kind, self._to_come

    def take(self, nbytes: int) -> bytearray:
        """Return the next ``nbytes`` after the frame's prefix.

        Raises:
            WireError: they were changed.
        """
        if self._theirs is None:
            return receive(self._end, nbytes)
        data = bytearray()
        while len(data) < nbytes:
            if not self._piece:
                self._piece = self._taken(min(self._to_come, _PIECE_BYTES))
                self._to_come -= len(self._piece)
            part = self._piece[: nbytes - len(data)]
            data += part
            self._piece = self._piece[len(part) :]
        return data

    def _taken(self, nbytes: int) -> memoryview:
        """Return a piece whose tag was compared."""
        if self._theirs is None:
            return memoryview(receive(self._end, nbytes))
        if not nbytes:
            raise WireError("an update is longer than its frame: it was damaged")
        piece = memoryview(receive(self._end, nbytes + TAG_BYTES))
        check_tag(self._theirs, piece[:nbytes], piece[nbytes:])
        return piece[:nbytes]
