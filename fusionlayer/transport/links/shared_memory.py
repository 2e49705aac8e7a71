"""Sums over ranks of one host through shared memory, which saves the copies into and out of sockets.

The memory has no name in any file system and is freed with its processes, however they end. It carries only values.
Short messages over Unix sockets notify the ranks when the values may be read. A socket also shows at once that its peer
is gone.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import socket
import struct
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress

import torch
from torch import Tensor

from ...process.processes import Identity
from .._sum import sum_in_rank_order
from .base import LinkError

# Bytes of one slot, which holds one piece of a tensor. A piece of this size stays in the processors' caches until it
# has been read.
SLOT_BYTES = 2 << 20
# Slots per rank: at any time one is written, one is summed and one is read.
_SLOTS = 3

_RECORD = struct.Struct("<16s16sQQ")
_WORD = struct.Struct("<qq")
# Seconds that the ranks of a host may take to map each other's memory.
_PATIENCE = 5.0


class Invitation:
    """Memory that this process offers to the other ranks of its host, and a socket on which they call it.

    All ranks exchange their ``record``. Then each calls ``accept``. If all returned true, each calls ``welcome``, and
    if all returned true again, ``keep``.

    Args:
        rank: this rank.
        node: name of this rank's node, equal on the ranks of that node.
        deadline: a time of the monotonic clock. The invitation uses at most half of the remaining time, so that the
            ranks can still continue without shared memory.
    """

    def __init__(self, rank: int, node: str, deadline: float) -> None:
        self._rank = rank
        now = time.monotonic()
        self._deadline = now + min(_PATIENCE, (deadline - now) / 2)
        self._place = hashlib.sha256(f"{Identity.own().place} {node}".encode()).digest()[:16]
        self._token = secrets.token_bytes(16)
        self._file = -1
        self._listener: socket.socket | None = None
        self._records: list[tuple[bytes, bytes, int, int]] = []
        self._memory: list[Tensor] = []
        self._ends: dict[int, socket.socket] = {}
        with suppress(OSError, AttributeError):  # only Linux has all of it
            self._file = os.memfd_create("fusionlayer")
            os.truncate(self._file, _SLOTS * SLOT_BYTES)
            os.pwrite(self._file, self._token, 0)
            self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self._listener.bind(_address(self._token))
            self._listener.listen(1024)

    @property
    def record(self) -> Tensor:
        """The handle with which other processes map the memory and call this one: (48,) uint8."""
        known = (0, 0) if self._listener is None else (os.getpid(), self._file)
        return torch.frombuffer(bytearray(_RECORD.pack(self._place, self._token, *known)), dtype=torch.uint8)

    def accept(self, records: Sequence[Tensor]) -> bool:
        """Map every rank's memory and connect to all lower ranks; return whether that was possible."""
        self._records = [_RECORD.unpack(record.numpy().tobytes()) for record in records]
        try:
            for rank, (place, token, pid, file) in enumerate(self._records):
                if not pid or place != self._place:
                    return False
                self._memory.append(map_memory(pid, file, token, _SLOTS * SLOT_BYTES))
                if rank < self._rank:
                    end = self._ends[rank] = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                    end.settimeout(self._patience())
                    end.connect(_address(token))
                    end.send(self._token)
        except (OSError, RuntimeError):
            return False
        return True

    def welcome(self) -> bool:
        """Take the connections of all higher ranks; return whether that was possible. All ranks must have accepted."""
        callers = {token: rank for rank, (_, token, _, _) in enumerate(self._records) if rank > self._rank}
        assert self._listener is not None
        try:
            while callers:
                self._listener.settimeout(self._patience())
                end, _ = self._listener.accept()
                # Any process of the host can call. The ranks have sent their word before this one listens, so a caller
                # without it is none of them.
                end.setblocking(False)
                with suppress(BlockingIOError):
                    given = end.recv(16)
                    token = next((token for token in callers if hmac.compare_digest(token, given)), None)
                    if token is not None:
                        self._ends[callers.pop(token)] = end
                        continue
                end.close()
        except OSError:
            return False
        return True

    def _patience(self) -> float:
        return max(self._deadline - time.monotonic(), 0.001)

    def keep(self) -> SharedMemory:
        """Return the shared memory, after ``accept`` and ``welcome`` returned true on all ranks."""
        ends, self._ends = self._ends, {}
        return SharedMemory(self._rank, self._memory, ends)

    def close(self) -> None:
        """Stop offering the memory. The results of ``keep`` stay valid."""
        for end in self._ends.values():
            end.close()
        if self._listener is not None:
            self._listener.close()
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


class SharedMemory:
    """The mapped memory of all ranks. A rank reads all of it and writes only its own.

    With two ranks, each adds whole pieces. With more, each adds one share of a piece, and then reads the other shares.
    """

    def __init__(self, rank: int, memory: Sequence[Tensor], ends: Mapping[int, socket.socket]) -> None:
        self._rank = rank
        self._ends = ends
        self._slots: list[Sequence[Tensor]] = [each.split(SLOT_BYTES) for each in memory]
        self._turn = 0

    def all_reduce(self, x: Tensor, key: int, deadline: float) -> None:
        """Replace ``x`` (n,) by its sum over ranks, added in rank order.

        Args:
            x: a tensor of the same length and type on all ranks.
            key: equal on all ranks, and different for every call.
            deadline: a time of the monotonic clock.

        Raises:
            LinkError: a rank is gone, late, or in another call.
        """
        pieces = x.split(SLOT_BYTES // x.element_size())
        # Each of two ranks adds the whole piece: that reads as much memory as adding halves, and saves a meeting.
        whole = len(self._slots) == 2
        lag = 1 if whole else 2
        for phase in range(len(pieces) + lag):
            turn = self._turn + phase
            if phase:
                self._meet(_WORD.pack(key, phase), deadline)
            if phase >= lag:
                (self._add_whole if whole else self._read_shares)(pieces[phase - lag], turn - lag)
            if not whole and 0 < phase <= len(pieces):
                self._add_share(pieces[phase - 1], turn - 1)
            if phase < len(pieces):
                self._slot(self._rank, pieces[phase], turn).copy_(pieces[phase])
        # A slot is reused after _SLOTS turns, and by then the ranks have met after the last read of it. Otherwise a
        # fast rank could overwrite values that a slow one still reads.
        self._turn += len(pieces)

    def close(self) -> None:
        """Make calls in flight fail, here and at the peers. Any thread may call it. A second call does nothing."""
        for end in self._ends.values():
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def _meet(self, word: bytes, deadline: float) -> None:
        """Return when every rank has sent ``word``: what each wrote before the call may be read after it."""
        peer = self._rank
        try:
            for peer, end in self._ends.items():  # noqa: B007 - the except clause reads `peer`
                end.send(word)
            for peer, end in self._ends.items():
                end.settimeout(max(deadline - time.monotonic(), 0.001))
                heard = end.recv(_WORD.size)
                if heard != word:
                    raise LinkError(peer, "the rank is in another call" if heard else "the connection was closed")
        except OSError as error:
            raise LinkError(peer, str(error)) from None

    def _add_whole(self, piece: Tensor, turn: int) -> None:
        parts = [self._slot(rank, piece, turn) for rank in range(len(self._slots))]
        parts[self._rank] = piece
        sum_in_rank_order(parts, piece)

    def _add_share(self, piece: Tensor, turn: int) -> None:
        parts = [self._share(rank, self._rank, piece, turn) for rank in range(len(self._slots))]
        sum_in_rank_order(parts, parts[self._rank])

    def _read_shares(self, piece: Tensor, turn: int) -> None:
        for rank, share in enumerate(piece.tensor_split(len(self._slots))):
            share.copy_(self._share(rank, rank, piece, turn))

    def _share(self, rank: int, summed_by: int, piece: Tensor, turn: int) -> Tensor:
        """Return the elements of a piece in ``rank``'s slot that rank ``summed_by`` sums."""
        shares: Sequence[Tensor] = self._slot(rank, piece, turn).tensor_split(len(self._slots))
        return shares[summed_by]

    def _slot(self, rank: int, like: Tensor, turn: int) -> Tensor:
        """Return the slot of ``rank`` for this turn, as a tensor with the type and length of ``like``."""
        slot: Tensor = self._slots[rank][turn % _SLOTS]
        return slot.view(like.dtype)[: like.numel()]


def _address(token: bytes) -> str:
    """Return a socket name outside any file system. Only processes that were given the token can compute it."""
    return f"\0fusionlayer-{hashlib.sha256(token).hexdigest()}"


def map_memory(pid: int, file: int, token: bytes, nbytes: int) -> Tensor:
    """Return memory of a process of this host, which it has as ``file`` and which begins with ``token``, as uint8."""
    # The pid may be that of an unrelated process, and the file any of its open files. So open() must not wait for it,
    # and the token is compared.
    path = f"/proc/{pid}/fd/{file}"
    own = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if os.pread(own, len(token), 0) != token:
            raise OSError(f"{path} is not the memory that was offered")
        return torch.from_file(f"/proc/self/fd/{own}", shared=True, size=nbytes, dtype=torch.uint8)
    finally:
        os.close(own)
