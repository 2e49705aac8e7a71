"""A record of what the communication thread does, in Chrome's trace format (chrome://tracing, Perfetto)."""

from __future__ import annotations

import atexit
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["Timeline"]


class Timeline:
    """Writes one event for each span; a file name of None makes every call free of effect.

    Args:
        path: file to write; ``.rank`` is appended, each rank has its own.
        rank: this rank, the process id in the trace.
    """

    def __init__(self, path: str | None, rank: int) -> None:
        self._rank = rank
        self._lock = threading.Lock()
        self._file = open(f"{path}.{rank}", "w") if path else None  # noqa: SIM115 - closed by close()
        if self._file:
            self._file.write("[\n")
            atexit.register(self.close)

    @contextmanager
    def span(self, name: str, **details: Any) -> Iterator[None]:
        """Record how long the body takes, on the calling thread's row."""
        if self._file is None:
            yield
            return
        start = time.perf_counter_ns()
        try:
            yield
        finally:
            end = time.perf_counter_ns()
            self._write(
                {
                    "name": name,
                    "ph": "X",
                    "ts": start / 1000,
                    "dur": (end - start) / 1000,
                    "pid": self._rank,
                    "tid": threading.current_thread().name,
                    "args": details,
                }
            )

    def close(self) -> None:
        """Complete the file. Twice is once."""
        with self._lock:
            if self._file is not None:
                end = {"name": "process_name", "ph": "M", "pid": self._rank, "args": {"name": f"rank {self._rank}"}}
                self._file.write(json.dumps(end) + "\n]\n")
                self._file.close()
                self._file = None
                atexit.unregister(self.close)

    def _write(self, event: dict[str, Any]) -> None:
        with self._lock:
            if self._file is not None:
                self._file.write(json.dumps(event) + ",\n")
