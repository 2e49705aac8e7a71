"""How a worker learns that torchrun's agent is about to restart it: SIGTERM, half a minute before SIGKILL."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from .state import State


class Notice:
    """Notes the agent's SIGTERM, so that the next ``commit`` can ask all ranks about it.

    Attributes:
        given: the agent has asked this worker to leave.
    """

    def __init__(self, state: State) -> None:
        self._state = state
        self.given = False

    @contextmanager
    def awaited(self) -> Iterator[None]:
        """Inside this context SIGTERM is noted and training continues. Outside, SIGTERM ends the process as usual."""
        if threading.current_thread() is not threading.main_thread():
            yield  # only the main thread may handle signals
            return
        before = signal.signal(signal.SIGTERM, self._take)
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, before)

    def _take(self, number: int, frame: FrameType | None) -> Any:
        self.given = True
        self._state.on_hosts_updated(time.time(), 0)
