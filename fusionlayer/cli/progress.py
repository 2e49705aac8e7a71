"""How far long work is, and about how long it still takes: on standard error, so that results stay apart."""

from __future__ import annotations

import math
import os
import shutil
import sys
import time
from collections.abc import Callable, Collection, Iterator
from types import TracebackType
from typing import TextIO, TypeVar

T = TypeVar("T")

_REDRAWN = 0.1
"""Seconds between two changes of the line on a terminal."""
_REPEATED = 10.0
"""Seconds between two lines in a log."""
_TRUSTED = 1.0
"""Seconds of work before an estimate is worth anything."""
_ERASE = "\r\x1b[K"


class ProgressLine:
    """Shows the progress of some work. Use it as a context.

    On a terminal one line changes while the work continues, and vanishes at its end. Elsewhere, such as in the log of a
    job, a line appears every ten seconds, and at the start of each phase if ``phases``. Shorter work prints nothing.

    Args:
        what: name of the work, such as "bench".
        total: how much there is to do, in any unit.
        shown: false on all ranks but one.
        lines: lines that stay, on a terminal too, because the work prints lines of its own.
        phases: the first word of ``doing`` names a phase.
        file: where to; None: standard error.
        clock: seconds, never going back.
    """

    def __init__(
        self,
        what: str,
        total: float = 1.0,
        *,
        shown: bool = True,
        lines: bool = False,
        phases: bool = False,
        file: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._what = what
        self._total = total
        self._shown = shown
        self._file = sys.stderr if file is None else file
        self._clock = clock
        self._live = not lines and self._file.isatty() and os.environ.get("TERM") != "dumb"
        self._started = clock()
        self._told = -math.inf if self._live else self._started
        self._drawn = False
        self._has_phases = phases and not self._live
        self._phase = ""

    def __enter__(self) -> ProgressLine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._erase()

    def at(self, done: float, doing: str = "") -> None:
        """Note how much of the total is done; ``doing`` is the next activity."""
        now = self._clock()
        phase = doing.partition(" ")[0]
        is_new = self._has_phases and phase != self._phase
        if not self._shown or (not is_new and now - self._told < (_REDRAWN if self._live else _REPEATED)):
            return
        self._phase = phase
        self._told = now
        share = min(1.0, done / self._total) if self._total else 1.0
        line = f"{self._what}: {share:.0%} done{self._left(share, now)}{doing and f'; {doing}'}"
        if self._live:
            line = _ERASE + line[: shutil.get_terminal_size().columns - 1]
        print(line, end="" if self._live else "\n", file=self._file, flush=True)
        self._drawn = self._live

    def say(self, text: str) -> None:
        """Print a line that stays."""
        if self._shown:
            self._erase()
            print(text, file=self._file, flush=True)

    def _left(self, share: float, now: float) -> str:
        took = now - self._started
        if not share or took < _TRUSTED:
            return ""
        left = took * (1 - share) / share
        return f", about {left:.0f} s left" if left < 100 else f", about {left / 60:.0f} min left"

    def _erase(self) -> None:
        if self._drawn:
            print(_ERASE, end="", file=self._file, flush=True)
            self._drawn = False


def follow(what: str, items: Collection[T], name: Callable[[T], object] = str) -> Iterator[T]:
    """Yield the items; before one that comes ten seconds or more after the last line, log the progress."""
    with ProgressLine(what, len(items), lines=True) as progress:
        for done, item in enumerate(items):
            progress.at(done, str(name(item)))
            yield item
