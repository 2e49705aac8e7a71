"""Brings what this rank asks for to the coordinator: many requests in one message, and one message at a time."""

from __future__ import annotations

import threading
import time
from queue import SimpleQueue

from ..transport.star import Connection
from .coordinator import Coordinator
from .requests import Request, Writer

__all__ = ["Requester"]

# Of one message, whose bytes all fit in what the connection buffers, so that nobody waits for a reader.
_REQUESTS_AT_ONCE = 1000
# Who asks for nothing more for so many seconds pauses; who never does is taken for pausing after so many times that.
_PAUSE = 0.0005
_PAUSES = 10


class Requester:
    """Collects requests until somebody waits for one of them, or until no more come for a moment.

    The training thread asks in bursts, as hooks fire. One message for each request would cost a system call, and a turn
    of the coordinator, for each. So ``note`` only collects. ``bring`` sends what was collected: the thread that waits
    for a result calls it; where nobody waits, the requester's own thread does, after a pause.

    After a message this rank sends the next one only when the coordinator has answered, which ``note_answer`` tells: so
    neither side ever blocks in a full connection while the other one does too.

    Args:
        coordinator: rank 0's, which is called directly; None on other ranks.
        connection: to rank 0; None there, and where there are no other ranks.
        cache_capacity: names and signatures that both ends remember.
    """

    def __init__(self, coordinator: Coordinator | None, connection: Connection | None, cache_capacity: int) -> None:
        self._coordinator = coordinator
        self._connection = connection
        self._writer = Writer(cache_capacity)
        # Guards _unsent, _awaits_answer and the writer, whose messages must leave in the order in which they are made:
        # callers, the thread below and the communication thread send. May be taken with the session's lock held.
        self._lock = threading.Lock()
        self._unsent: list[Request] = []
        self._awaits_answer = False
        self._noted = 0
        self._brings_soon = False
        self._wanted: SimpleQueue[bool] = SimpleQueue()
        self._thread = threading.Thread(target=self._bring_bursts, name="fusionlayer requests", daemon=True)
        self._thread.start()

    def note(self, request: Request) -> None:
        """Collect a request; nothing is sent yet. Requests leave in the order of these calls."""
        self._noted += 1
        if self._coordinator is not None:
            self._coordinator.submit(request)
        else:
            with self._lock:
                self._unsent.append(request)

    def bring(self) -> None:
        """Bring what was noted to the coordinator: now, or as soon as it has answered the last message."""
        if self._coordinator is not None:
            self._coordinator.advance()
        elif self._unsent:
            with self._lock:
                if not self._awaits_answer:
                    self._send()

    def bring_soon(self) -> None:
        """Have what was noted brought when no more comes for a moment. Callers exclude each other."""
        if not self._brings_soon:
            self._brings_soon = True
            self._wanted.put(True)

    def note_answer(self) -> None:
        """Send what has been noted since the last message; the communication thread calls it."""
        with self._lock:
            self._send()

    def close(self) -> None:
        """End the thread, which brings first what was to be brought."""
        self._wanted.put(False)
        self._thread.join()

    def _bring_bursts(self) -> None:
        while self._wanted.get():
            seen = self._noted
            for _ in range(_PAUSES):
                time.sleep(_PAUSE)
                if seen == self._noted:
                    break
                seen = self._noted
            # In this order: what is noted from now on asks again, what was noted before goes along.
            self._brings_soon = False
            self.bring()

    def _send(self) -> None:
        assert self._connection is not None
        count = total = 0
        while count < min(len(self._unsent), _REQUESTS_AT_ONCE) and total < self._connection.room:
            total += len(self._unsent[count].data or b"")
            count += 1
        requests, self._unsent = self._unsent[:count], self._unsent[count:]
        self._awaits_answer = bool(requests)
        if requests:
            self._connection.send(self._writer.write(requests))
