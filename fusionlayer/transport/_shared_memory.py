"""Sums of ranks that share a host, through memory that all of them see: what a socket would copy in and out stays put.

The memory has no name in any file system and goes with its processes, however they end. It carries only values; when
they may be read, ranks tell each other over their link, which notices who is gone or late.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import struct
from collections.abc import Callable, Sequence
from contextlib import suppress

import torch
from torch import Tensor

from ._processes import Identity
from ._sum import sum_in_rank_order

__all__ = ["Invitation", "SharedMemory"]

# A piece of a tensor, which stays in the processors' caches from the moment that it is written until it has been read.
SLOT_BYTES = 4 << 20
# One is written, one is summed, and one is read.
_SLOTS = 3

_RECORD = struct.Struct("<32sQQ")


class Invitation:
    """Memory that this process offers to the others, with what they need to find it.

    Args:
        node: what ranks of this one's node have in common.
    """

    def __init__(self, node: str) -> None:
        self._place = hashlib.sha256(f"{Identity.own().place} {node}".encode()).digest()[:16]
        self._token = secrets.token_bytes(16)
        self._file = -1
        with suppress(OSError, AttributeError):  # only Linux has it
            self._file = os.memfd_create("fusionlayer")
            os.truncate(self._file, _SLOTS * SLOT_BYTES)
            os.pwrite(self._file, self._token, 0)

    @property
    def record(self) -> Tensor:
        """What another process must be told, (48,) uint8."""
        known = (os.getpid(), self._file) if self._file >= 0 else (0, 0)
        return torch.frombuffer(bytearray(_RECORD.pack(self._place + self._token, *known)), dtype=torch.uint8)

    def accept(self, records: Sequence[Tensor]) -> list[Tensor] | None:
        """Return every rank's memory, or None if there is one that this process cannot see.

        Args:
            records: of all ranks.
        """
        found = []
        for record in records:
            letter, pid, file = _RECORD.unpack(record.numpy().tobytes())
            if not pid or letter[:16] != self._place:
                return None
            try:
                found.append(_map(f"/proc/{pid}/fd/{file}", letter[16:]))
            except (OSError, RuntimeError):
                return None
        return found

    def close(self) -> None:
        """Offer the memory no longer; who has accepted it keeps it."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


class SharedMemory:
    """The memory of all ranks, as one of them sees it. Each writes its own alone.

    Args:
        rank: this rank.
        memory: of every rank, as ``Invitation.accept`` returns it.
    """

    def __init__(self, rank: int, memory: Sequence[Tensor]) -> None:
        self._rank = rank
        self._slots: list[Sequence[Tensor]] = [each.split(SLOT_BYTES) for each in memory]
        self._turn = 0

    def all_reduce(self, x: Tensor, meet: Callable[[int], None]) -> None:
        """Replace ``x`` (n,) by its sum over ranks, added in rank order.

        Args:
            x: of the same length and type on all ranks.
            meet: returns when every rank has called it with the same number.
        """
        pieces = x.split(SLOT_BYTES // x.element_size())
        # With two ranks each adds all of it: as much memory is read as by halves, and they meet once less.
        whole = len(self._slots) == 2
        lag = 1 if whole else 2
        for phase in range(len(pieces) + lag):
            turn = self._turn + phase
            if phase:
                meet(phase)
            if phase >= lag:
                (self._add_whole if whole else self._read_shares)(pieces[phase - lag], turn - lag)
            if not whole and 0 < phase <= len(pieces):
                self._add_share(pieces[phase - 1], turn - 1)
            if phase < len(pieces):
                self._slot(self._rank, pieces[phase], turn).copy_(pieces[phase])
        # Each slot is written again only after a meeting that follows the last reading of it.
        self._turn += len(pieces)

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
        """Return the elements in a rank's slot that another rank, or itself, sums."""
        shares: Sequence[Tensor] = self._slot(rank, piece, turn).tensor_split(len(self._slots))
        return shares[summed_by]

    def _slot(self, rank: int, like: Tensor, turn: int) -> Tensor:
        """Return where a rank's elements of one piece are."""
        slot: Tensor = self._slots[rank][turn % _SLOTS]
        return slot.view(like.dtype)[: like.numel()]


def _map(path: str, token: bytes) -> Tensor:
    # A process of another host may have this number, and anything at all open.
    file = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if os.pread(file, len(token), 0) != token:
            raise OSError(f"{path} is not the memory that was offered")
        return torch.from_file(f"/proc/self/fd/{file}", shared=True, size=_SLOTS * SLOT_BYTES, dtype=torch.uint8)
    finally:
        os.close(file)
