"""The file of a rank's timelines, in Chrome's trace format."""

from __future__ import annotations

import json
import logging
import os
import threading
from contextlib import suppress
from pathlib import Path
from typing import TextIO

from ..base.errors import ConfigError
from ..process import forks

_logger = logging.getLogger("fusionlayer")
encode = json.JSONEncoder(default=str).encode


def metadata(kind: str, rank: int, row: int = 0, **args: object) -> str:
    """Return a line that describes a process, a thread or a clock."""
    return encode({"name": kind, "ph": "M", "pid": rank, "tid": row, "args": args}) + ",\n"


class TraceFile:
    """A trace file that is complete whenever no timeline uses it. A later timeline continues it."""

    _all: dict[str, TraceFile] = {}
    # Guards _all, and every file's _text, _users, _rows and _end: several threads write to one file.
    _lock = threading.Lock()

    def __init__(self, path: str, rank: int) -> None:
        self._path = path
        self._rank = rank
        self._users = 0
        self._rows: dict[str, int] = {}
        self._text: TextIO | None = None
        self._end = 0
        self._failed = False

    @classmethod
    def join(cls, path: str, rank: int) -> TraceFile:
        """Return the open file for a path, with one more user."""
        with cls._lock:
            file = cls._all.setdefault(path, cls(path, rank))
            if file._text is None and not file._failed:
                # Cut off the ending that leave() has appended, and continue from there; start again if the file was
                # removed.
                file._end = file._end if Path(path).exists() else 0
                try:
                    file._text = open(path, "r+" if file._end else "w")  # noqa: SIM115 - closed by leave()
                except OSError as error:
                    raise ConfigError(f"timeline {path} cannot be written: {error.strerror}; name a file") from None
                try:
                    if file._end:
                        file._text.seek(file._end)
                        file._text.truncate()
                    else:
                        file._rows.clear()
                        file._text.write("[\n" + metadata("process_name", rank, name=f"rank {rank}"))
                except OSError as error:
                    file._give_up(file._text, error)
            file._users += 1
            return file

    def write(self, text: str) -> None:
        """Append ``text``, whole lines. It does nothing once the file is closed."""
        with self._lock:
            self._append(text)

    def write_span(self, row: str, text: str) -> None:
        """Append an event that lacks its row and its end. Rows are numbered as they appear, and named before that."""
        with self._lock:
            number = self._rows.get(row)
            if number is None:
                number = self._rows[row] = len(self._rows) + 1
                self._append(metadata("thread_name", self._rank, number, name=row))
            self._append(f'{text}, "tid": {number}}},\n')

    def _append(self, text: str) -> None:
        if self._text is not None:
            try:
                self._text.write(text)
            except OSError as error:
                self._give_up(self._text, error)

    def leave(self) -> None:
        """Give up one use. After the last one, complete the file and close it."""
        with self._lock:
            self._users -= 1
            file = self._text
            if self._users == 0 and file is not None:
                try:
                    self._end = file.tell()
                    # JSON takes no comma before the bracket, so an event ends the list.
                    file.write(metadata("process_name", self._rank, name=f"rank {self._rank}").rstrip(",\n") + "\n]\n")
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
        """Leave the files to the parent: this process was forked, and would write the buffered text once more."""
        cls._lock = threading.Lock()
        for file in cls._all.values():
            forks.keep(file._text)
            file._text = None


os.register_at_fork(after_in_child=TraceFile.begin_child)
