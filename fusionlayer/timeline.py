"""A record of what the threads of a rank do, in Chrome's trace format (chrome://tracing, Perfetto)."""

from __future__ import annotations

import atexit
import json
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, TextIO

__all__ = ["Timeline"]

_NOTHING = nullcontext()


class Timeline:
    """Writes one event for each span; a file name of None makes every call free of effect.

    All timelines of a process that name the same file share it.

    Args:
        path: file to write; ``.rank`` is appended, each rank has its own.
        rank: this rank, the process id in the trace.

    Attributes:
        enabled: whether anything is recorded.
    """

    def __init__(self, path: str | None, rank: int) -> None:
        self._rank = rank
        self._file = _File.join(f"{path}.{rank}") if path else None
        self.enabled = self._file is not None
        if self.enabled:
            atexit.register(self.close)

    def span(self, name: str, **details: Any) -> AbstractContextManager[None]:
        """Record how long the body takes, and how much of the thread's own CPU time, on the calling thread's row.

        Details that JSON does not know, such as a codec, are made strings when they are written.
        """
        return self._span(name, details) if self.enabled else _NOTHING

    @contextmanager
    def _span(self, name: str, details: Mapping[str, Any]) -> Iterator[None]:
        start, cpu = time.perf_counter_ns(), time.thread_time_ns()
        try:
            yield
        finally:
            busy = (time.thread_time_ns() - cpu) / 1000
            self._write(name, start, time.perf_counter_ns(), threading.current_thread().name, details, tdur=busy)

    def record(self, name: str, start: int, end: int, *, row: str | None = None, **details: Any) -> None:
        """Record a span that is over, on a ``row``, by default the calling thread's; times of ``perf_counter_ns``."""
        self._write(name, start, end, row or threading.current_thread().name, details)

    def _write(self, name: str, start: int, end: int, row: str, details: Mapping[str, Any], **more: float) -> None:
        file = self._file
        if file is None:
            return
        event = {
            "name": name,
            "ph": "X",
            "ts": start / 1000,
            "dur": (end - start) / 1000,
            **more,
            "pid": self._rank,
            "tid": row,
            "args": details,
        }
        file.write(json.dumps(event, default=str) + ",\n")

    def close(self) -> None:
        """Complete the file, unless others write on. Twice is once."""
        file, self._file = self._file, None
        self.enabled = False
        if file is not None:
            end = {"name": "process_name", "ph": "M", "pid": self._rank, "args": {"name": f"rank {self._rank}"}}
            file.leave(json.dumps(end) + "\n]\n")
            atexit.unregister(self.close)


class _File:
    """A trace that is a whole file whenever nobody writes to it, and goes on when somebody comes back."""

    _all: dict[str, _File] = {}
    # Guards _all, and every file's text, users and end: timelines of several threads write to one file.
    _lock = threading.Lock()

    def __init__(self, path: str) -> None:
        self._path = path
        self._users = 0
        self._text: TextIO | None = None
        self._end = 0

    @classmethod
    def join(cls, path: str) -> _File:
        """Return the file, open."""
        with cls._lock:
            file = cls._all.setdefault(path, cls(path))
            if file._text is None:
                file._end = file._end if Path(path).exists() else 0
                file._text = open(path, "r+" if file._end else "w")  # noqa: SIM115 - closed by leave()
                file._text.seek(file._end)
                file._text.truncate()
                file._text.write("" if file._end else "[\n")
            file._users += 1
            return file

    def write(self, text: str) -> None:
        """Append ``text``."""
        with self._lock:
            if self._text is not None:
                self._text.write(text)

    def leave(self, text: str) -> None:
        """Close the file with ``text`` if this was the last user."""
        with self._lock:
            self._users -= 1
            if self._users == 0 and self._text is not None:
                self._end = self._text.tell()
                self._text.write(text)
                self._text.close()
                self._text = None
