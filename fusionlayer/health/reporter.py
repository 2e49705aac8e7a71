"""Compares the ranks of a job, logs what is wrong with it, and keeps the file of its state.

Every rank has a reporter: that of the first rank alive reports, and the others are ready to take over.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path

from ..base.errors import printable
from ..process.processes import Identity
from . import report
from .judge import judge
from .state import Finding, RankState
from .store import StatusKeys

_logger = logging.getLogger("fusionlayer")

# Seconds after which a rank that has written nothing is silent: it writes every three.
_SILENT = 10.0
# Seconds in which a rank that runs writes its state and the reporter reads it, and the reporter's share of these.
_FRESH, _READING = 5.0, 1.0
# Seconds between two files.
_KEEP = 1.0
# Seconds that a difference between calls waits for the lines of the program that have made them.
_LINES = 3.0
# Lower ranks whose states are read at once.
_AT_ONCE = 8
# Lines that the file keeps.
_KEPT = 200

_Key = tuple[str, tuple[int, ...]]


class Reporter:
    """This rank's knowledge of the other ranks. One thread uses it; any thread may read the properties."""

    def __init__(self, rank: int, size: int, process: Identity, path: Path) -> None:
        self._rank, self._size, self._process, self._path = rank, size, process, path
        # Guards the next three, which other threads read.
        self._lock = threading.Lock()
        self._findings: tuple[Finding, ...] = ()
        self._past: tuple[tuple[float, str], ...] = ()
        self._count = 0
        self._states: dict[int, RankState] = {}
        self._heard: dict[int, float] = {}
        self._since: dict[_Key, tuple[Finding, float]] = {}
        self._without_lines: set[_Key] = set()
        self._started = time.time()
        self._kept_at = -1e9
        self._asked_at: float | None = None
        self._file_lost = False

    @property
    def findings(self) -> tuple[Finding, ...]:
        """The present problem; empty while there is none."""
        with self._lock:
            return self._findings

    @property
    def lines(self) -> list[str]:
        """The lines that were logged last."""
        with self._lock:
            return [text for _, text in self._past]

    @property
    def count(self) -> int:
        """How often something new was wrong."""
        with self._lock:
            return self._count

    def move(self, rank: int, size: int) -> None:
        """Continue as another rank, or of another number of ranks: nothing is known of them yet."""
        self._rank, self._size = rank, size
        self._states, self._heard, self._since = {}, {}, {}
        self._without_lines.clear()
        self._asked_at = None
        with self._lock:
            self._findings = ()

    def hear(self, state: RankState, now: float) -> None:
        """Note what a rank has written last."""
        known = self._states.get(state.rank)
        if known is None or known.serial != state.serial or state.rank == self._rank:
            self._states[state.rank], self._heard[state.rank] = state, now

    def read(self, keys: StatusKeys, ranks: Iterable[int], now: float) -> None:
        """Read what other ranks have written; raise RuntimeError if the store does not answer."""
        for state in keys.read(rank for rank in ranks if rank != self._rank).values():
            self.hear(state, now)

    @property
    def is_first(self) -> bool:
        """Whether the processes of all lower ranks are known to be gone or stopped."""
        lower = (self._states.get(rank) for rank in range(self._rank))
        return all(state is not None and state.process.trouble(self._process) for state in lower)

    @property
    def unknown(self) -> Sequence[int]:
        """The next lower ranks whose processes this rank has to know, to report instead of them; none if it never will.

        A process of another host is never seen to be gone, so the rank after it reads no more than that one's state.
        """
        for rank in range(self._rank):
            state = self._states.get(rank)
            if state is None:
                return range(rank, min(self._rank, rank + _AT_ONCE) if rank else 1)
            if not state.process.place or state.process.place != self._process.place:
                break
        return ()

    @property
    def sees_trouble(self) -> bool:
        """Whether a process of this host is gone or stopped, and its rank has not said that it ends."""
        return any(state.process.trouble(self._process) for state in self._others if state.life == "runs")

    @property
    def all_have_ended(self) -> bool:
        """Whether every other rank has written its last state, or will write none."""
        return all(state.life != "runs" or state.process.trouble(self._process) for state in self._others)

    @property
    def _others(self) -> list[RankState]:
        return [state for rank, state in self._states.items() if rank != self._rank]

    def compare(self, now: float) -> list[Finding]:
        """Return what is wrong."""
        trouble = {}
        for state in self._others:
            found = state.process.trouble(self._process) if state.life == "runs" else None
            if found is None and state.life == "runs" and now - self._heard[state.rank] > _SILENT:
                found = "silent"
            if found is not None:
                trouble[state.rank] = found
        return judge(self._states, trouble)

    def report(self, now: float, keys: StatusKeys | None) -> None:
        """Compare states, log changes, and keep the file; ``keys``: None if the store does not answer."""
        findings = self.compare(now)
        for finding in findings:
            self._note(finding, now, keys)
        found = {finding.key for finding in findings}
        for key in [key for key in self._since if key not in found]:
            finding, since = self._since.pop(key)
            self._without_lines.discard(key)
            if not finding.final:
                names = ", ".join(map(str, key[1]))
                ranks = f"ranks {names} go" if len(key[1]) > 1 else f"rank {names} goes" if names else "the job goes"
                self._log(f"{ranks} on, {now - since:.0f} s after that")
        changed = tuple(findings) != self.findings
        with self._lock:
            self._findings = tuple(findings)
        if changed or now - self._kept_at >= _KEEP:
            self._keep(now, "failed" if {"failed", "gone"} & {finding.kind for finding in findings} else "runs")

    def _note(self, finding: Finding, now: float, keys: StatusKeys | None) -> None:
        """Log a finding if it is new, or if the lines of its calls are."""
        lacks_lines = bool(finding.calls) and self._lacks_lines
        if finding.key in self._since:
            if finding.key in self._without_lines and not lacks_lines:  # on a busy host lines may take long
                self._without_lines.remove(finding.key)
                self._log(finding.text)
            return
        if finding.calls and keys is not None:
            asked_at = self._ask(finding.calls, now, keys)
            if lacks_lines and now - asked_at <= _LINES:
                return
        if finding.kind == "late" and self._predates_wait(finding.ranks, now):
            return
        self._since[finding.key] = finding, now
        if lacks_lines:
            self._without_lines.add(finding.key)
        with self._lock:
            self._count += 1
        self._log(finding.text)

    def conclude(self, has_failed: bool) -> None:
        """Log the cause of a failed job, and keep the file; remove the file of a job that has ended well."""
        now = time.monotonic()
        findings = tuple(finding for finding in self.compare(now) if finding.final)
        with self._lock:
            self._findings = findings
        for finding in findings:
            if finding.key not in self._since:
                self._log(finding.text)
        if findings or has_failed:
            self._keep(now, "failed")
        else:
            with suppress(OSError):
                self._path.unlink()

    def _ask(self, calls: str, now: float, keys: StatusKeys) -> float:
        """Ask all ranks, once, for these calls and their last ones, with the program's lines; return when that was."""
        if self._asked_at is None:
            self._asked_at = now
            keys.ask(calls)
        return self._asked_at

    @property
    def _lacks_lines(self) -> bool:
        """Whether a rank that runs has written no line of the program for any of its calls."""
        return any(
            state.life == "runs"
            and not any(call.where for channel in state.channels.values() for _, call in channel.recent)
            for state in self._states.values()
        )

    def _predates_wait(self, ranks: Iterable[int], now: float) -> bool:
        """Return whether a state of these ranks is older than the wait for them, and a newer one will be read soon.

        An older state does not show the line at which a rank lags. It may even lack the others' call.
        """
        waiting = max(state.idle for state in self._states.values() if state.waits)
        ages = [now - self._heard[rank] for rank in ranks if rank in self._heard]
        return any(waiting - _READING < age < _FRESH for age in ages)

    def _log(self, text: str) -> None:
        text = printable(text)  # in one line
        with self._lock:
            self._past = (*self._past, (time.time(), text))[-_KEPT:]
        _logger.warning("fusionlayer watch, %s: %s", datetime.now().strftime("%H:%M:%S"), text)

    def _keep(self, now: float, life: str) -> None:
        self._kept_at = now
        found = report.Report(
            version=report.VERSION,
            command=" ".join(sys.argv)[:200],
            size=self._size,
            writer=self._process,
            started=self._started,
            written=time.time(),
            life=life,
            states=tuple(self._states[rank] for rank in sorted(self._states)),
            findings=self.findings,
            past=self._past,
        )
        try:
            report.write(found, self._path)
        except OSError as error:
            if not self._file_lost:
                _logger.warning("status %s cannot be written: %s", self._path, error.strerror)
            self._file_lost = True
