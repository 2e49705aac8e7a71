"""Rank 0's part: hears what every rank asks for, and tells all of them what runs next."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..transport.star import Center
from .matching import Matcher, Stall
from .requests import READY, Reader, Request, Response, read_farewell, write_response

__all__ = ["Coordinator", "Patience"]

_logger = logging.getLogger("fusionlayer")

# Responses that rank 0 may have before it: one that runs and one that follows. What becomes ready meanwhile is fused.
_AHEAD = 2


@dataclass(frozen=True)
class Patience:
    """How long ranks may wait for each other to ask for an operation.

    Attributes:
        warning: seconds until a warning names operation and missing ranks, again and again; None: never.
        limit: seconds until all that waits, and all that comes, fails on every rank; None: no limit.
    """

    warning: float | None = 60.0
    limit: float | None = None


class Coordinator:
    """Matches the requests of all ranks, on the threads that bring them and one of its own.

    Args:
        size: number of ranks.
        center: connections to the other ranks; None if there are none.
        fusion_bytes: of tensors, that one message may have.
        patience: with ranks that do not ask.
        deliver: takes rank 0's own responses; returns at once.
    """

    def __init__(
        self,
        size: int,
        center: Center | None,
        fusion_bytes: int,
        patience: Patience,
        deliver: Callable[[Response], None],
    ) -> None:
        self._matcher = Matcher(size, fusion_bytes)
        self._center = center
        self._patience = patience
        self._deliver = deliver
        self._readers = {rank: Reader() for rank in range(1, size)}
        self._open = set(range(1, size))
        self._own: deque[Request] = deque()
        # Guards the matcher, who is _open, _underway and _ended. Rank 0's callers, its communication thread and the one
        # that listens take it. _own is filled without it: appending to a deque is atomic.
        self._lock = threading.Lock()
        self._underway = 0
        self._ended: str | None = None
        self._closing = False
        self._next_warning = 0.0
        self._thread: threading.Thread | None = None
        if center is not None:
            self._thread = threading.Thread(target=self._listen, name="fusionlayer coordinator", daemon=True)
            self._thread.start()

    def submit(self, request: Request) -> None:
        """Note what rank 0 asks for; ``advance`` takes it up."""
        self._own.append(request)

    def advance(self) -> None:
        """Take up what rank 0 has asked for, on the calling thread."""
        if self._own:
            with self._lock:
                self._take_own()
                self._answer()

    def _take_own(self) -> None:
        self._matcher.take(0, [self._own.popleft() for _ in range(len(self._own))])

    def note_done(self) -> None:
        """Rank 0 has executed a response."""
        with self._lock:
            self._underway -= 1
            self._answer()

    def end(self, why: str) -> None:
        """Let everything fail on every rank, now and later."""
        with self._lock:
            self._take_own()
            self._end(why)

    def close(self, why: str) -> None:
        """Tell the other ranks that rank 0 leaves, and end the thread. Twice is once."""
        self.end(why)
        self._closing = True
        if self._thread is not None and self._center is not None:
            self._center.wake()
            self._thread.join()
            self._center.close()
            self._thread = None

    def _listen(self) -> None:
        assert self._center is not None
        waits = [seconds / 4 for seconds in (self._patience.warning, self._patience.limit) if seconds]
        pause = min([5.0, *waits])
        try:
            while not self._closing and self._open:
                for rank, messages in self._center.received(pause):
                    with self._lock:
                        self._hear(rank, messages)
                with self._lock:
                    self._look_for_stalls()
        except Exception as error:
            self.end(f"rank 0: its coordinator failed: {type(error).__name__}: {error}")
            raise

    def _hear(self, rank: int, messages: list[memoryview] | None) -> None:
        if messages is None:
            self._lose(rank, f"rank {rank} is lost: its connection was closed; its own error, or its exit, says why")
            return
        for message in messages:
            why = read_farewell(message)
            if why is not None:
                self._lose(rank, why)
                return
            self._matcher.take(rank, self._readers[rank].read(message))
        self._send(rank, READY)
        self._answer()

    def _lose(self, rank: int, why: str) -> None:
        if rank in self._open:
            self._open.discard(rank)
            self._matcher.leave(rank, why)
            self._take_own()
            self._answer()

    def _answer(self) -> None:
        """Tell ranks what is ready; what rank 0 must execute only as long as it has little before it."""
        if self._ended is not None:
            self._refuse()
            return
        while self._underway < _AHEAD:
            responses = self._matcher.next_responses()
            if responses is None:
                return
            self._underway += 0 in responses and responses[0].code == "execute"
            # Rank 0 last: while it takes its results, the others do.
            for rank, response in sorted(responses.items(), reverse=True):
                self._send(rank, response)

    def _send(self, rank: int, response: Response) -> None:
        if rank == 0:
            self._deliver(response)
        elif rank in self._open and self._center is not None:
            self._center.connections[rank].send(write_response(response))

    def _end(self, why: str) -> None:
        if self._ended is None:
            first = self._matcher.first_loss
            self._ended = f"{first}; then {why}" if first else why
            self._refuse()

    def _refuse(self) -> None:
        assert self._ended is not None
        for rank in (0, *self._open):
            self._send(rank, Response("end", text=self._ended))

    def _look_for_stalls(self) -> None:
        warning, limit = self._patience.warning, self._patience.limit
        now = time.monotonic()
        if limit is not None and self._matcher.stalls(limit, now):
            # Of those that have waited less, one is what the missing ranks wait in.
            self._end(f"waited longer than {limit:g} s: {_tell(self._matcher.stalls(0.0, now))}")
        elif warning is not None and now >= self._next_warning and (stalls := self._matcher.stalls(warning, now)):
            self._next_warning = now + warning
            _logger.warning(
                "stalled for more than %g s: %s; if a rank does not call these operations at all, or calls others "
                "first and waits for them, the job hangs",
                warning,
                _tell(stalls),
            )


def _tell(stalls: Sequence[Stall]) -> str:
    shown = [f"{stall.name} (ranks {list(stall.missing)} missing for {stall.seconds:.0f} s)" for stall in stalls[:8]]
    return "; ".join(shown) + (f"; and {len(stalls) - 8} more" if len(stalls) > 8 else "")
