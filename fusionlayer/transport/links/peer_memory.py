"""Memory that all ranks of one host reach: some of each rank's device, and pages of the host with counters."""

from __future__ import annotations

import ctypes
import os
import secrets
import struct
from collections.abc import Callable
from enum import IntEnum
from typing import TypeVar

import torch
from torch import Tensor

from .device_memory import DeviceMemory
from .shared_memory import map_memory

Gather = Callable[[bytes], list[bytes]]
"""Returns what every rank has called it with, in rank order. All ranks call it together."""

Result = TypeVar("Result")

_RECORD = struct.Struct("<qq16s")
# The position in a page of the rank that left, plus one; the token stands before it.
_LEFT = 32
# Each counter has its own cache line, because devices and processes write to the counters next to it.
_APART = 64
_PAGE = 4096
# Pages that a device may still look at. They are never unmapped: nothing shows for certain when it has stopped.
_kept: list[Tensor] = []


class OutOfReach(Exception):
    """A rank cannot reach the memory of another one. All ranks raise it, and it says which rank that is and why."""


def together(gather: Gather, attempt: Callable[[], Result]) -> Result:
    """Return ``attempt()`` if it succeeds on all ranks, else raise ``OutOfReach``. All ranks call it together."""
    problem, results = "", []
    try:
        results.append(attempt())
    except (AttributeError, OSError, RuntimeError) as error:
        problem = (str(error) or type(error).__name__).splitlines()[0]
    for rank, text in enumerate(gather(problem.encode())):
        if text:
            raise OutOfReach(f"rank {rank}: {text.decode()}")
    return results[0]


class PeerMemory:
    """One rank's memory on its device, and the memory of all other ranks. All ranks make it together.

    Attributes:
        every: the memory of each rank, (nbytes,) uint8.
    """

    def __init__(self, rank: int, device: torch.device, nbytes: int, gather: Gather) -> None:
        def offer() -> tuple[Tensor, bytes]:
            own = torch.zeros(nbytes, dtype=torch.uint8, device=device)
            if device.type == "cuda":
                torch.cuda.current_stream(device).synchronize()  # before another rank uses it
            return own, DeviceMemory.share(own)

        own, mine = together(gather, offer)
        offers = gather(mine)
        self.every: list[Tensor] = together(
            gather, lambda: [own if each == rank else DeviceMemory.reach(given) for each, given in enumerate(offers)]
        )


class Counter(IntEnum):
    """Meaning of a counter: pieces sent to the rank whose page holds it, or pieces received from it."""

    SENT = 0
    TAKEN = 1


class Counters:
    """How many pieces each rank has sent to this one, and taken of this one. All ranks make them together.

    They are in memory of the host, where devices write and wait, and processes read. Each rank has a page of those for
    which its own device waits. A counter has 64 bits. The device that counts writes the lower half of it. The upper one
    belongs to the process that owns the page: a bit there ends all waits for a number, regardless of later counts.
    """

    MOST = (1 << 32) - 1
    """Pieces that can be counted."""

    def __init__(self, rank: int, size: int, gather: Gather, reach: Callable[[Tensor], int]) -> None:
        self._rank = rank
        self._size = size
        nbytes = -(-_APART * (1 + 2 * size) // _PAGE) * _PAGE
        token = secrets.token_bytes(16)

        def offer() -> int:
            file = os.memfd_create("fusionlayer")
            os.truncate(file, nbytes)
            os.pwrite(file, token, 0)
            return file

        file = together(gather, offer)
        try:
            offers = [_RECORD.unpack(given) for given in gather(_RECORD.pack(os.getpid(), file, token))]
            pages = together(gather, lambda: [map_memory(pid, number, t, nbytes) for pid, number, t in offers])
        finally:
            os.close(file)
        _kept.extend(pages)
        self._mapped = [page.data_ptr() for page in pages]
        self._reached = together(gather, lambda: [reach(page) for page in pages])

    def address(self, of: int, counter: Counter, by: int) -> int:
        """Return where this rank's device finds the counter of rank ``of`` for what rank ``by`` does."""
        return self._reached[of] + self._offset(counter, by)

    def value(self, counter: Counter, by: int) -> int:
        """Return what rank ``by`` has counted for this one. Any thread may ask."""
        number: int = _word(self._mapped[self._rank], self._offset(counter, by)).value
        return number

    def leave(self) -> None:
        """Let this rank's device wait for no counter any longer. Any thread may call it.

        Work queued there continues, but its messages are invalid. So the other ranks are notified first: data received
        before that are whole.
        """
        for of, page in enumerate(self._mapped):
            if of != self._rank:
                _word(page, _LEFT).value = 1 + self._rank
        for counter in Counter:
            for by in range(self._size):
                _word(self._mapped[self._rank], self._offset(counter, by) + 4).value = 1

    def who_left(self) -> int | None:
        """Return the last rank that has called ``leave``, or None. Any thread may ask."""
        told: int = _word(self._mapped[self._rank], _LEFT).value
        return told - 1 if told else None

    def _offset(self, counter: Counter, by: int) -> int:
        return _APART * (1 + counter * self._size + by)


def _word(page: int, offset: int) -> ctypes.c_uint32:
    return ctypes.c_uint32.from_address(page + offset)
