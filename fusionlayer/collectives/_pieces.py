"""Pieces of one collective, pipelined: while one piece travels, another is encoded, summed or decoded."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from ..transport import Transport

__all__ = ["IN_FLIGHT", "Piece", "cut", "pipeline"]

# A piece's way through a collective: it computes until something has to travel, yields the call that makes it travel,
# and is resumed when that is done.
Piece = Iterator[Callable[[], None]]

# While the oldest piece is computed, the other one has the network. More would only take more memory.
IN_FLIGHT = 2


def cut(numel: int, piece: int | None, unit: int) -> list[slice]:
    """Return the elements of each piece of ``numel``: ``piece`` of them, rounded up to a multiple of ``unit``.

    At least one piece; None makes it the only one.
    """
    if piece is None:
        return [slice(0, numel)]
    length = -(-max(1, piece) // unit) * unit
    starts = range(0, numel, length) if 0 < length < numel else [0]
    return [slice(start, min(start + length, numel)) for start in starts]


def pipeline(pieces: Sequence[Piece], transport: Transport, device: torch.device) -> None:
    """Run all ``pieces``; at most ``IN_FLIGHT`` of them are under way.

    What they make travel does so one after the other, in an order that depends on nothing but their number, so ranks
    make the same calls. The calling thread computes. The calls are made by a thread of their own on the CPU, on a
    stream of their own on CUDA.

    Raises:
        Exception: what a piece, or a call, raised; the transport is closed then, as the peers wait for more.
    """
    if len(pieces) == 1:
        for travel in pieces[0]:
            travel()
        return
    waiting: deque[tuple[Piece, Callable[[], object]]] = deque()

    def advance(piece: Piece, courier: CommWorker) -> bool:
        """Compute a piece up to its next call and hand that over; return whether there was one."""
        travel = next(piece, None)
        if travel is not None:
            waiting.append((piece, courier.send(travel)))
        return travel is not None

    def start(courier: CommWorker) -> None:
        """Begin with further pieces until there is one that has to travel."""
        any(advance(piece, courier) for piece in rest)

    rest = iter(pieces)
    with _StreamWorker(device) if device.type == "cuda" else _ThreadWorker() as courier:
        try:
            for _ in range(IN_FLIGHT):
                start(courier)
            while waiting:
                piece, arrived = waiting.popleft()
                arrived()
                if not advance(piece, courier):
                    start(courier)
        except BaseException:
            if waiting:
                transport.close()
            raise


class CommWorker(ABC):
    """Makes calls one after the other, beside what the calling thread does."""

    @abstractmethod
    def send(self, travel: Callable[[], None]) -> Callable[[], object]:
        """Have ``travel`` called; return what waits for it and raises what it raised."""

    def __enter__(self) -> CommWorker:
        return self

    @abstractmethod
    def __exit__(self, *error: object) -> None:
        """Wait for the calls under way: what they use may be freed after."""


class _ThreadWorker(CommWorker):
    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, "fusionlayer courier")

    def send(self, travel: Callable[[], None]) -> Callable[[], object]:
        return self._pool.submit(travel).result

    def __exit__(self, *error: object) -> None:
        self._pool.shutdown()


class _StreamWorker(CommWorker):
    def __init__(self, device: torch.device) -> None:
        self._computing = torch.cuda.current_stream(device)
        self._travelling = torch.cuda.Stream(device)

    def send(self, travel: Callable[[], None]) -> Callable[[], object]:
        self._travelling.wait_stream(self._computing)
        with torch.cuda.stream(self._travelling):
            travel()
        event = self._travelling.record_event()
        return lambda: self._computing.wait_event(event)

    def __exit__(self, *error: object) -> None:
        self._computing.wait_stream(self._travelling)
