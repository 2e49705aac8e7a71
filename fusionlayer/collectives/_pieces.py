"""Pieces of one collective, pipelined: while one piece is sent, another is encoded, summed or decoded."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import torch

from ..observe.timeline import carried
from ..transport import Transport
from ..transport.base import URGENT

# One piece of a tensor in a collective. The calling thread resumes it; it computes until messages must be sent, and
# yields the call that exchanges them. It is resumed only after that call has returned.
Piece = Iterator[Callable[[], None]]

# Pieces in flight. While the oldest one computes, the other one has the network. More would only take more memory.
IN_FLIGHT = 2


def cut(numel: int, piece: int | None, unit: int) -> list[slice]:
    """Return the slices that cut ``numel`` elements into pieces of ``piece`` elements, rounded up to whole ``unit``.

    There is at least one slice; with ``piece`` None there is exactly one.
    """
    if piece is None:
        return [slice(0, numel)]
    length = -(-max(1, piece) // unit) * unit
    starts = range(0, numel, length) if 0 < length < numel else [0]
    return [slice(start, min(start + length, numel)) for start in starts]


def pipeline(pieces: Sequence[Piece], transport: Transport, device: torch.device) -> None:
    """Run all ``pieces``; at most ``IN_FLIGHT`` of them are in flight.

    The calling thread computes. The yielded calls run one after the other, on the CPU in a thread of their own, on CUDA
    on a stream of their own. Their order depends on the number of pieces alone, never on timing, because all ranks must
    make the same calls on the transport in the same order.

    Raises:
        Exception: the error of a piece or of a call. If other pieces are in flight, the transport is closed
            first, since peers wait for the calls that this rank will no longer make.
    """
    if len(pieces) == 1:  # nothing to overlap: no second thread or stream
        for exchange in pieces[0]:
            exchange()
        return
    # Pieces whose calls the worker has, oldest first, each with a function that waits for its call. Only the calling
    # thread touches this queue, so it needs no lock.
    waiting: deque[tuple[Piece, Callable[[], object]]] = deque()

    def advance(piece: Piece, worker: CommWorker) -> bool:
        """Compute a piece up to its next call and hand that over; return whether there was one."""
        exchange = next(piece, None)
        if exchange is not None:
            waiting.append((piece, worker.send(exchange)))
        return exchange is not None

    def start(worker: CommWorker) -> None:
        """Start further pieces until one of them has a call to make."""
        any(advance(piece, worker) for piece in rest)

    rest = iter(pieces)
    with _StreamWorker(device) if device.type == "cuda" else _ThreadWorker() as worker:
        try:
            for _ in range(IN_FLIGHT):
                start(worker)
            while waiting:
                # Always the oldest piece, even if another call has returned already: the order must not depend on time.
                piece, arrived = waiting.popleft()
                arrived()
                if not advance(piece, worker):
                    start(worker)
        except BaseException:
            # Leaving the ``with`` waits for calls in flight. Closing the transport makes them raise instead of waiting
            # for peers until the timeout.
            if waiting:
                transport.close()
            raise


class CommWorker(ABC):
    """Runs calls on the transport one after the other, while the calling thread computes.

    One worker, not two, since only one thread at a time may use a transport.
    """

    @abstractmethod
    def send(self, exchange: Callable[[], None]) -> Callable[[], object]:
        """Queue the call ``exchange``; return a function that waits for it and raises its error.

        Everything that the calling thread computed before is visible to ``exchange``.
        """

    def __enter__(self) -> CommWorker:
        return self

    @abstractmethod
    def __exit__(self, *error: object) -> None:
        """Wait for the calls in flight: the caller may free their buffers afterwards."""


class _ThreadWorker(CommWorker):
    """The worker on the CPU: a thread of its own, which runs calls in the order of ``send``."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, "fusionlayer comm worker")

    def send(self, exchange: Callable[[], None]) -> Callable[[], object]:
        return self._pool.submit(carried(exchange)).result

    def __exit__(self, *error: object) -> None:
        self._pool.shutdown()


class _StreamWorker(CommWorker):
    """The worker on CUDA: a stream of its own, on which the calling thread enqueues the calls."""

    def __init__(self, device: torch.device) -> None:
        self._computing = torch.cuda.current_stream(device)
        self._network = _beside(self._computing)

    def send(self, exchange: Callable[[], None]) -> Callable[[], object]:
        # A piece must be encoded before it is sent.
        self._network.wait_stream(self._computing)
        with torch.cuda.stream(self._network):
            exchange()
        # The computing stream waits for this call alone, not for calls that are enqueued later.
        event = self._network.record_event()
        return lambda: self._computing.wait_event(event)

    def __exit__(self, *error: object) -> None:
        self._computing.wait_stream(self._network)


@cache
def _beside(computing: torch.cuda.Stream) -> torch.cuda.Stream:
    """Return the stream for the calls of one ``computing`` stream: always the same one, and another one."""
    # torch deals out a few streams again and again, so a new one may be the computing one itself.
    while (network := torch.cuda.Stream(computing.device, priority=URGENT)) == computing:
        pass
    return network
