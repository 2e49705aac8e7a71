"""Records what the threads of a rank do, in Chrome's trace format (chrome://tracing, Perfetto)."""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, TextIO

from . import forks
from .errors import ConfigError

__all__ = ["Timeline"]

_logger = logging.getLogger("fusionlayer")

_NOTHING = nullcontext()


class Timeline:
    """Writes one event for each span. Any thread may record.

    All timelines of a process with the same path share one file. Where the file can no longer be written, as on a full
    disk, a warning says so once, and nothing more is recorded: what is timed goes on.

    Args:
        path: file to write, with ``.rank`` appended, so that each rank has its own. None: calls have no effect.
        rank: this rank, the process id in the trace.

    Raises:
        ConfigError: the file cannot be opened.

    Attributes:
        enabled: whether anything is recorded.
    """

    def __init__(self, path: str | None, rank: int) -> None:
        self._rank = rank
        self._file = _File.join(f"{path}.{rank}") if path else None
        self.enabled = self._file is not None
        if self.enabled:
            forks.at_exit(self.close)

    def span(self, name: str, **details: Any) -> AbstractContextManager[None]:
        """Return a context that records the time and CPU time of its body, on the calling thread's row.

        Details that JSON cannot hold, such as a codec, are written as strings.
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
        """Record a span that is over. Times are of ``perf_counter_ns``; ``row``: None is the calling thread's row."""
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
        """End this timeline; complete the file if no other timeline writes to it. A second call does nothing."""
        file, self._file = self._file, None
        self.enabled = False
        if file is not None:
            end = {"name": "process_name", "ph": "M", "pid": self._rank, "args": {"name": f"rank {self._rank}"}}
            file.leave(json.dumps(end) + "\n]\n")
            forks.not_at_exit(self.close)


class _File:
    """A trace file that is complete whenever no timeline uses it. A later timeline continues it."""

    _all: dict[str, _File] = {}
    # Guards _all, and every file's _text, _users and _end: several threads write to one file.
    _lock = threading.Lock()

    def __init__(self, path: str) -> None:
        self._path = path
        self._users = 0
        self._text: TextIO | None = None
        self._end = 0
        self._failed = False

    @classmethod
    def join(cls, path: str) -> _File:
        """Return the open file for a path, with one more user."""
        with cls._lock:
            file = cls._all.setdefault(path, cls(path))
            if file._text is None and not file._failed:
                # Cut off what leave() has appended, and go on from there; start anew if the file was removed.
                file._end = file._end if Path(path).exists() else 0
                try:
                    file._text = open(path, "r+" if file._end else "w")  # noqa: SIM115 - closed by leave()
                except OSError as error:
                    raise ConfigError(f"timeline {path} cannot be written: {error.strerror}; name a file") from error
                try:
                    if file._end:
                        file._text.seek(file._end)
                        file._text.truncate()
                    else:
                        file._text.write("[\n")
                except OSError as error:
                    file._give_up(file._text, error)
            file._users += 1
            return file

    def write(self, text: str) -> None:
        """Append ``text``. It does nothing once the file is closed."""
        with self._lock:
            if self._text is not None:
                try:
                    self._text.write(text)
                except OSError as error:
                    self._give_up(self._text, error)

    def leave(self, text: str) -> None:
        """Give up one use. After the last one, append ``text`` and close the file."""
        with self._lock:
            self._users -= 1
            file = self._text
            if self._users == 0 and file is not None:
                try:
                    self._end = file.tell()
                    file.write(text)
                    file.close()
                    self._text = None
                except OSError as error:
                    self._give_up(file, error)

    def _give_up(self, text: TextIO, error: OSError) -> None:
        """Record nothing more in this file. The caller holds the lock."""
        self._text, self._failed = None, True
        with suppress(OSError):  # it fails again on what it has not written, and closes the file all the same
            text.close()
        _logger.warning("timeline %s ends here: %s; training goes on without it", self._path, error.strerror)

    @classmethod
    def begin_child(cls) -> None:
        """Leave the files to the parent: this process was forked, and would write once more what is buffered."""
        cls._lock = threading.Lock()
        for file in cls._all.values():
            forks.keep(file._text)
            file._text = None


os.register_at_fork(after_in_child=_File.begin_child)
