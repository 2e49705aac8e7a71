"""Sends this rank's requests to the coordinator: many requests in one message, and one message at a time."""

from __future__ import annotations

import threading
import time
from queue import SimpleQueue

from ..transport.star import StarConnection
from .coordinator import Coordinator
from .requests import Request, Writer

# Most requests of one message. So few fit in the connection's buffers, so that sending does not wait for the reader.
_REQUESTS_AT_ONCE = 1000
# A burst is over when no request comes for _PAUSE seconds. If that does not happen, it counts as over after _PAUSES of
# them.
_PAUSE = 0.0005
_PAUSES = 10


class Requester:
    """Collects requests until a thread waits for one of them, or until no further one follows for a moment.

    The training thread makes requests in bursts, as hooks fire. A message for each would cost a system call and a turn
    of the coordinator each time. So ``note`` only collects requests, and ``bring`` sends them. The thread that waits
    for a result calls ``bring``. If no thread waits, the requester's own thread calls it after a pause.

    After a message this rank sends the next one only when the coordinator has answered; ``note_answer`` reports the
    answer. Otherwise both sides could block at the same time, each in a full connection that the other does not read.
    """

    def __init__(self, coordinator: Coordinator | None, connection: StarConnection | None, cache_capacity: int) -> None:
        self._coordinator = coordinator
        self._connection = connection
        self._writer = Writer(cache_capacity)
        # Guards _unsent, _awaits_answer and the writer. Callers, the thread below and the communication thread all
        # send. Messages must be sent in the order in which the writer made them, because the reader numbers names in
        # that order. May be acquired with the session's lock held, never the other way round.
        self._lock = threading.Lock()
        self._unsent: list[Request] = []
        self._awaits_answer = False
        self._noted = 0
        self._brings_soon = False
        self._wanted: SimpleQueue[bool] = SimpleQueue()
        self._thread = threading.Thread(target=self._bring_bursts, name="fusionlayer requests", daemon=True)
        self._thread.start()

    def note(self, request: Request) -> None:
        """Collect a request without sending it. Requests leave in the order of these calls.

        The session calls it with its lock held.
        """
        self._noted += 1
        if self._coordinator is not None:
            self._coordinator.submit(request)
        else:
            with self._lock:
                self._unsent.append(request)

    def bring(self) -> None:
        """Send the collected requests: now, or as soon as the coordinator has answered the last message.

        Any thread may call it.
        """
        if self._coordinator is not None:
            self._coordinator.advance()
        elif self._unsent:
            with self._lock:
                if not self._awaits_answer:
                    self._send()

    def bring_soon(self) -> None:
        """Let the requester's thread send the collected requests after a pause. Calls must exclude each other."""
        if not self._brings_soon:
            self._brings_soon = True
            self._wanted.put(True)

    def note_answer(self) -> None:
        """Send the requests collected since the last message. The communication thread calls it for each READY."""
        with self._lock:
            self._send()

    def close(self) -> None:
        """End the requester's thread, after it has sent its requests."""
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
            # The flag first: a request noted after it sets the flag again, and one noted before it is sent now. In the
            # other order a request noted in between would stay unsent.
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
