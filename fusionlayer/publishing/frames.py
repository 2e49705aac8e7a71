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
    "FIND",
    "GONE",
    "HAVE",
    "MISS",
    "PIECE_BYTES",
    "RELAY",
    "REST",
    "TAKE",
    "FrameChannel",
    "Parcel",
    "check_tag",
    "frame",
    "have",
    "guard",
    "read_frame",
    "read_have",
    "receive",
]

TAKE, RELAY, HAVE, REST, MISS = b"TAKE", b"RLAY", b"HAVE", b"REST", b"MISS"
"""A follower first sends TAKE if it takes only parts of tensors, and RELAY if it serves others. HAVE names the version
that it has, and asks for a newer one; REST only names it. MISS: a relay did not send what FIND has promised."""

DATA, FIND, BEAT, GONE = b"DATA", b"FIND", b"BEAT", b"GONE"
"""A publisher sends an update as DATA, or by FIND the relay that has it; BEAT while nothing is newer, GONE at last."""

_LEAST = struct.Struct("<Q")
_DIGEST_BYTES = 32
HAVE_BYTES = (0, _DIGEST_BYTES, _LEAST.size, _LEAST.size + _DIGEST_BYTES)
"""Lengths of what follows HAVE."""

_PREFIX = struct.Struct("<4sQ")
_CRC = struct.Struct("<I")
PREFIX_BYTES = _PREFIX.size + _CRC.size
# The data after a prefix have a tag after each block of this many bytes, the most that is kept unverified.
PIECE_BYTES = 1 << 20
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


def read_frame(prefix: bytes | bytearray) -> tuple[bytes, int]:
    """Return kind and length of the frame that begins with ``prefix`` (PREFIX_BYTES).

    Raises:
        WireError: it was damaged.
    """
    kind, nbytes = _PREFIX.unpack_from(prefix)
    if _CRC.unpack_from(prefix, _PREFIX.size)[0] != zlib.crc32(prefix[: _PREFIX.size]):
        raise WireError("the beginning of a frame was damaged on its way")
    return kind, nbytes


def have(digest: str, least: int) -> bytes:
    """Return what follows HAVE: the digest of the version that is here, or "", and the number asked for, or 0."""
    return digest.encode() + (_LEAST.pack(least) if least else b"")


def read_have(data: bytes) -> tuple[str | None, int]:
    """Return digest and number of what follows HAVE or REST, whose length is one of HAVE_BYTES."""
    at = len(data) - len(data) % _DIGEST_BYTES
    return data[:at].decode("ascii", "replace") or None, _LEAST.unpack(data[at:])[0] if data[at:] else 0


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
        whole: the published version, of which ``target`` has the parts that ``takes`` describes.
        takes: as its receivers have it, see ``Peer``.
    """

    def __init__(self, update: Update, whole: Snapshot, takes: bytes) -> None:
        self.target: Snapshot = update.target
        self.whole, self.takes = whole, takes
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
    """Return the bytes of ``parts`` as pieces of ``PIECE_BYTES``, the last one shorter."""
    pieces: list[list[memoryview]] = []
    room = 0
    for part in parts:
        view = part.cast("B")
        while view.nbytes:
            if not room:
                pieces.append([])
                room = PIECE_BYTES
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

    def say(self, kind: bytes, data: bytes) -> None:
        """Send a frame with ``data``, ``PIECE_BYTES`` at most."""
        said = frame(kind, len(data), self._mine) + data
        if self._mine and data:
            said += self._mine.tag(sha256(data).digest())
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
                self._piece = self._taken(min(self._to_come, PIECE_BYTES))
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
