"""Rank 0's part: it collects the requests of all ranks and announces the next operations."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from ..health.judge import overdue
from ..transport.star import Center
from .matching import Matcher
from .requests import READY, Reader, Reason, Request, Response, read_farewell, write_response

_logger = logging.getLogger("fusionlayer")

# Responses that rank 0 may have to execute at a time: one that runs and one that follows. Operations that become ready
# meanwhile wait, and can be fused.
_AHEAD = 2


@dataclass(frozen=True)
class Patience:
    """How long ranks may wait for each other to request an operation.

    Attributes:
        warning: seconds after which a warning names the operation and the missing ranks, repeatedly; None: never.
        limit: seconds after which all pending and later operations fail on every rank; None: no limit.
    """

    warning: float | None = 60.0
    limit: float | None = None


class Coordinator:
    """Matches the requests of all ranks and answers them.

    Its own thread (``_listen``) receives the requests of the other ranks. Rank 0's requests are matched on rank 0's
    threads, in ``advance``. The thread that makes an operation ready sends the responses, with the lock held, so all
    ranks get them in the same order.

    Args:
        size: number of ranks.
        center: connections to the other ranks; None if there are no other ranks.
        fusion_bytes: bytes of tensors that one message may have.
        patience: how long ranks may wait for each other.
        deliver: takes rank 0's own responses. It must return at once, since the lock is held.
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
        # Guards the matcher, _open, _underway and _ended, and orders the responses. Rank 0's callers, its communication
        # thread and the listening thread acquire it. _own is filled without it: appending to a deque is atomic.
        self._lock = threading.Lock()
        self._underway = 0
        self._ended: Reason | None = None
        self._closing = False
        self._next_warning = 0.0
        self._thread: threading.Thread | None = None
        if center is not None:
            self._thread = threading.Thread(target=self._listen, name="fusionlayer coordinator", daemon=True)
            self._thread.start()

    def submit(self, request: Request) -> None:
        """Note a request of rank 0; ``advance`` matches it. Takes no lock, so a caller never waits for the matcher."""
        self._own.append(request)

    def advance(self) -> None:
        """Match the noted requests of rank 0, on the calling thread."""
        if self._own:
            with self._lock:
                self._take_own()
                self._answer()

    def _take_own(self) -> None:
        """Pass rank 0's noted requests to the matcher. The caller holds the lock, as for all that ``_listen`` calls."""
        self._matcher.take(0, [self._own.popleft() for _ in range(len(self._own))])

    def note_done(self) -> None:
        """Note that rank 0 has executed a response. The communication thread calls it."""
        with self._lock:
            self._underway -= 1
            self._answer()

    def end(self, why: Reason) -> None:
        """Make all pending and later operations fail on every rank, for the reason ``why``. Any thread may call it."""
        with self._lock:
            self._take_own()
            self._end(why)

    def close(self, why: Reason) -> None:
        """Notify the other ranks that rank 0 leaves, and end the listening thread. A second call does nothing."""
        self.end(why)
        # Before wake(), so that the listening thread sees it when it wakes.
        self._closing = True
        if self._thread is not None and self._center is not None:
            self._center.wake()
            self._thread.join()
            self._center.close()
            self._thread = None

    def _listen(self) -> None:
        """Match the requests of the other ranks and look for stalls, on the listening thread."""
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
            # Without this thread no rank would ever be answered, so all of them must fail now.
            self.end(Reason(f"rank 0: its coordinator failed: {type(error).__name__}: {error}", (0,)))
            raise

    def _hear(self, rank: int, messages: list[memoryview] | None) -> None:
        if messages is None:
            assert self._center is not None
            damage = self._center.connections[rank].damage
            if damage is not None:
                self._end(Reason(damage(rank, 0), (0, rank)))
            text = f"rank {rank} is lost: its connection was closed; its own error, or its exit, says why"
            self._lose(rank, Reason(text, (rank,)))
            return
        for message in messages:
            why = read_farewell(message)
            if why is not None:
                self._lose(rank, why)
                return
            self._matcher.take(rank, self._readers[rank].read(message))
        # READY allows the rank's next message: it sends only one at a time (see Requester).
        self._send(rank, READY)
        self._answer()

    def _lose(self, rank: int, why: Reason) -> None:
        if rank in self._open:
            self._open.discard(rank)
            self._matcher.leave(rank, why)
            self._take_own()
            self._answer()

    def _answer(self) -> None:
        """Send responses for everything that is ready, unless rank 0 has enough to execute already (see _AHEAD)."""
        if self._ended is not None:
            self._refuse()
            return
        while self._underway < _AHEAD:
            responses = self._matcher.next_responses()
            if responses is None:
                return
            self._underway += 0 in responses and responses[0].code == "execute"
            # Rank 0 comes last: it takes its results here, while the others take theirs.
            for rank, response in sorted(responses.items(), reverse=True):
                self._send(rank, response)

    def _send(self, rank: int, response: Response) -> None:
        if rank == 0:
            self._deliver(response)
        elif rank in self._open and self._center is not None:
            self._center.connections[rank].send(write_response(response))

    def _end(self, why: Reason) -> None:
        if self._ended is None:
            first = self._matcher.first_loss
            self._ended = Reason(f"{first.text}; then {why.text}", first.ranks) if first else why
            self._refuse()

    def _refuse(self) -> None:
        assert self._ended is not None
        for rank in (0, *self._open):
            self._send(rank, Response("end", why=self._ended))

    def _look_for_stalls(self) -> None:
        warning, limit = self._patience.warning, self._patience.limit
        now = time.monotonic()
        if limit is not None and (found := overdue(self._matcher.stalls(0.0, now), limit)):
            self._end(Reason(f"waited longer than {limit:g} s: {found.text}", found.ranks))
        elif warning is not None and now >= self._next_warning:
            found = overdue(self._matcher.stalls(warning, now), warning)
            if found is not None:
                self._next_warning = now + warning
                _logger.warning(
                    "stalled for more than %g s: %s; if a rank does not call these operations at all, or calls others "
                    "first and waits for them, the job hangs",
                    warning,
                    found.text,
                )
