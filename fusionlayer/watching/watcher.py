"""The thread that tells the other ranks where this one is, and on the first rank compares all of them."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from types import TracebackType

import torch.distributed as dist

from .. import config, forks
from ..errors import FusionLayerError, UsageError
from ..processes import Identity
from ..transport._monitor import monitor
from . import _places, _report
from ._judge import Finding, judge
from ._pace import Pace
from ._recorder import Recorder
from ._states import Channel, State, decode, encode

__all__ = ["Watcher", "begin", "watch"]

_logger = logging.getLogger("fusionlayer")

_TICK = 0.2
# Seconds between two looks at how far this rank is.
_LOOK = 1.0
# Seconds after which a state is written again though nothing has changed, and those after which it is missed.
_BEAT, _SILENT = 3.0, 10.0
# Seconds between two states of a rank that waits, or that others may wait for: its place may change.
_STILL = 1.5
# Looking at single calls may take this share of the time.
_SHARE = 1 / 300
# Seconds for which a rank that fails waits until the rank that compares has read why.
_LINGER = 3.0
# Lines that the file keeps.
_KEPT = 200
_PREFIX = "fusionlayer/watch"


class Watcher:
    """Watches one process of a job. Make it by ``watch``.

    Args:
        store: by which the ranks have met; the watcher uses a client of its own, and keeps the store.
        rank: this rank.
        size: number of ranks.
        patience: seconds that a rank may wait in a call before it is asked why, at least.
        path: file for the job's state; None: one of this user's folder.

    Attributes:
        findings: what is wrong with the job now, on the rank that compares; empty while it is well.
        lines: what was logged so far.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, patience: float, path: Path | None) -> None:
        self.findings: tuple[Finding, ...] = ()
        self.lines: list[str] = []
        self._rank, self._size = rank, size
        self._identity = Identity.own()
        self._thread_watched = threading.get_ident()
        self._generation = forks.generation()
        self._met_by = store
        self._store: dist.Store | None = None
        self._recorder = Recorder()
        self._pace = Pace(patience)
        self._serial = 0
        self._state = State(rank, self._identity, 0)
        self._states: dict[int, State] = {}
        self._heard: dict[int, float] = {}
        # Moments on this process's monotonic clock: of the last state written, of the last look at this rank, at its single
        # calls, and at other ranks, of the last file written, and of a question to all ranks.
        self._written = self._looked = self._read_at = self._read_last = self._kept_at = -1e9
        self._asked_at: float | None = None
        self._cost, self._unread = 0.0, False
        self._asked = b""
        self._told: dict[tuple[str, tuple[int, ...]], float] = {}
        self._past: list[tuple[float, str]] = []
        self._started = time.time()
        self._path = path or _report.folder() / f"job-{self._identity.pid}.json"
        self._file_lost = False
        self._error = ""
        self._error_at = ""
        self._counts: Callable[[], Mapping[str, float]] = dict
        self._ending = threading.Event()
        self._hook = sys.excepthook
        sys.excepthook = self._note_exception
        self._thread = threading.Thread(target=self._run, name="fusionlayer watch", daemon=True)
        self._thread.start()
        forks.at_exit(self.close)

    @property
    def is_closed(self) -> bool:
        """Whether it has stopped watching, or belongs to the parent of a forked process."""
        return self._ending.is_set() or self._generation != forks.generation()

    def close(self) -> None:
        """Tell the other ranks that this one has ended, and stop watching. A second call does nothing."""
        if self.is_closed:
            return
        self._ending.set()
        if sys.excepthook == self._note_exception:
            sys.excepthook = self._hook
        self._thread.join(_LINGER + 2)
        forks.not_at_exit(self.close)

    def _note_exception(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if issubclass(kind, Exception):
            frames = []
            step = trace
            while step is not None:
                frames.append((step.tb_frame.f_code.co_filename, step.tb_lineno))
                step = step.tb_next
            self._error_at = _places.of_frames(reversed(frames))
            text = next(iter(str(error).splitlines()), "")
            self._error = f"{kind.__name__}: {text:.200}"
        self._hook(kind, error, trace)

    # ---- on the thread ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        stumbled = False
        while not self._ending.wait(_TICK):
            try:
                self._tick(time.monotonic())
            except RuntimeError:
                # The store does not answer. What the processes of this host show is still seen.
                self._compare(time.monotonic(), reachable=False)
            except Exception:
                if not stumbled:
                    _logger.exception("the thread that watches this job met an error, and goes on")
                stumbled = True
        try:
            self._end()
        except (RuntimeError, OSError):
            # The store went with the process that has kept it. What this host shows is all that can be known.
            if self._error and self._is_first():
                self._conclude(judge(self._states, self._trouble(time.monotonic()), self._size))

    def _client(self) -> dist.Store:
        if self._store is None:
            self._store = dist.PrefixStore(_PREFIX, monitor.own_store(self._met_by))
        return self._store

    def _tick(self, now: float) -> None:
        store = self._client()
        if now - self._looked >= _LOOK:
            self._looked = now
            self._look(now, store)
        self._compare(now)

    def _look(self, now: float, store: dist.Store) -> None:
        """Look where this rank is, and write it if the others should know."""
        channels = self._recorder.progress()
        was_still, waited = self._pace.is_still, self._state.waits
        moved = self._pace.note(now, {name: (each.entered, each.done) for name, each in channels.items()})
        place = _places.of_thread(self._thread_watched)
        in_call = place.peer is not None or any(each.entered > each.done for each in channels.values())
        waits = in_call and self._pace.is_long(now)
        asked = store.get("ask") if store.check(["ask"]) else b""
        wanted = asked != self._asked or (waits and not waited)
        self._unread = self._unread or moved
        if self._unread and now - self._read_at >= max(_BEAT, self._cost / _SHARE) or wanted:
            self._asked = asked
            begun = time.thread_time()
            channels = self._recorder.detailed(channels, stacks=wanted)
            if not wanted:  # the first time with lines takes a second
                self._cost = time.thread_time() - begun
            self._read_at, self._unread = now, False
        else:
            channels = {name: _with_calls(each, self._state.channels.get(name)) for name, each in channels.items()}
        still = self._pace.is_still
        state = replace(
            self._state,
            idle=self._pace.idle(now),
            waits=waits,
            doing=place.doing,
            where=place.where,
            peer=place.peer,
            channels=channels,
        )
        due = _STILL if still else _BEAT
        self._state = state
        if wanted or waits != waited or still != was_still or now - self._written >= due:
            self._state = replace(state, counts=dict(self._counts()))
            self._write(now, store)

    def _write(self, now: float, store: dist.Store) -> None:
        self._serial += 1
        self._state = replace(self._state, serial=self._serial)
        self._written = now
        store.set(f"at/{self._rank}", encode(self._state))

    def _compare(self, now: float, *, reachable: bool = True) -> None:
        """On the first rank that is alive: compare all ranks, and tell what is wrong."""
        if not self._is_first():
            if reachable and self._rank and now - self._read_last >= _BEAT:
                self._read_states(now, range(self._rank))
            return
        if reachable and now - self._read_last >= _LOOK:
            self._read_states(now, range(self._size))
        elif not self._looks_troubled():
            return
        trouble = self._trouble(now)
        findings = judge(self._states, trouble, self._size)
        self._tell(now, findings, reachable)

    def _is_first(self) -> bool:
        """Return whether the processes of all lower ranks are known to be gone or stopped."""
        lower = [self._states.get(rank) for rank in range(self._rank)]
        return all(state is not None and state.process.trouble(self._identity) for state in lower)

    def _read_states(self, now: float, ranks: range) -> None:
        self._read_last = now
        store = self._client()
        keys = [f"at/{rank}" for rank in ranks]
        here = [key for key in keys if store.check([key])] if not store.check(keys) else keys
        for key, text in zip(here, store.multi_get(here) if here else [], strict=True):
            rank = int(key[3:])
            state = decode(text, rank, self._size)
            if state is not None and (rank not in self._states or state.serial != self._states[rank].serial):
                self._states[rank], self._heard[rank] = state, now
        self._states[self._rank], self._heard[self._rank] = self._state, now

    def _looks_troubled(self) -> bool:
        return any(
            state.process.trouble(self._identity)
            for rank, state in self._states.items()
            if rank != self._rank and state.life == "runs"
        )

    def _trouble(self, now: float) -> dict[int, str]:
        found = {}
        for rank, state in self._states.items():
            if rank == self._rank or state.life != "runs":
                continue
            trouble = state.process.trouble(self._identity)
            if trouble is None and now - self._heard[rank] > _SILENT:
                trouble = "silent"
            if trouble is not None:
                found[rank] = trouble
        return found

    def _tell(self, now: float, findings: list[Finding], reachable: bool) -> None:
        """Log what is new, and what is over; keep the file."""
        keys = {finding.key for finding in findings}
        for finding in findings:
            if finding.key not in self._told:
                self._told[finding.key] = now
                if finding.kind == "conflict" and reachable:
                    self._ask(now)  # for the lines; the finding is told with them, or without
                    if self._lacks_lines():
                        del self._told[finding.key]
                        continue
                self._say(finding.text)
        for key in [key for key in self._told if key not in keys]:
            since = self._told.pop(key)
            if key[0] in ("late", "stuck", "stopped", "silent", "slow"):
                who = f"rank {', '.join(map(str, key[1]))}" if key[1] else "the job"
                self._say(f"{who} goes on, {now - since:.0f} s after that")
        changed = tuple(findings) != self.findings
        self.findings = tuple(findings)
        if changed or now - self._kept_at >= _LOOK:
            self._keep(now, "failed" if any(f.kind in ("failed", "gone") for f in findings) else "runs")

    def _ask(self, now: float) -> None:
        """Ask all ranks for their last calls with the lines of the program that have made them."""
        if self._asked_at is None:
            self._asked_at = now
            self._client().set("ask", str(now))

    def _lacks_lines(self) -> bool:
        """Whether lines were asked for less than three seconds ago, and have not come from all who can answer."""
        if self._asked_at is None or time.monotonic() - self._asked_at > 3.0:
            return False
        return any(
            state.life == "runs"
            and not any(call.where for channel in state.channels.values() for call in channel.recent)
            for state in self._states.values()
        )

    def _say(self, text: str) -> None:
        self.lines.append(text)
        self._past = [*self._past, (time.time(), text)][-_KEPT:]
        _logger.warning("fusionlayer watch, %s: %s", datetime.now().strftime("%H:%M:%S"), text)

    def _keep(self, now: float, life: str) -> None:
        self._kept_at = now
        report = _report.Report(
            version=_report.VERSION,
            command=" ".join(sys.argv)[:200],
            size=self._size,
            writer=self._identity,
            started=self._started,
            written=time.time(),
            life=life,
            states=tuple(self._states[rank] for rank in sorted(self._states)),
            findings=self.findings,
            past=tuple(self._past),
        )
        try:
            _report.write(report, self._path)
        except OSError as error:
            if not self._file_lost:
                _logger.warning("status %s cannot be written: %s", self._path, error.strerror)
            self._file_lost = True

    def _end(self) -> None:
        """Write the last state. A rank that compares then tells what has become of the others."""
        now, store = time.monotonic(), self._client()
        channels = self._recorder.progress()
        if self._error:
            channels = self._recorder.detailed(channels, stacks=True)
        self._state = replace(
            self._state,
            life="failed" if self._error else "ended",
            error=self._error,
            where=self._error_at or self._state.where,
            channels=channels if self._error else self._state.channels,
        )
        self._write(now, store)
        deadline = now + (_LINGER if self._error else 0.0)
        if self._error and self._rank:
            while time.monotonic() < deadline and not store.check(["seen"]) and not self._is_first():
                time.sleep(_TICK)
        compares = self._is_first()
        while compares:
            self._read_states(now, range(self._size))
            trouble = self._trouble(now)
            self.findings = tuple(judge(self._states, trouble, self._size))
            is_open = any(
                state.life == "runs" and rank not in trouble
                for rank, state in self._states.items()
                if rank != self._rank
            )
            if not is_open or time.monotonic() > deadline or not self._error:
                break
            time.sleep(_TICK)
        if compares:
            self._conclude(list(self.findings))
            store.set("seen", "1")

    def _conclude(self, findings: list[Finding]) -> None:
        """Tell what the job has died of, and leave the file; without a cause, remove it."""
        self.findings = tuple(finding for finding in findings if finding.kind not in ("late", "stuck", "silent"))
        for finding in self.findings:
            if finding.key not in self._told:
                self._say(finding.text)
        if self.findings or self._error:
            self._keep(time.monotonic(), "failed")
        else:
            with suppress(OSError):
                self._path.unlink()


def _with_calls(channel: Channel, before: Channel | None) -> Channel:
    """Return the channel with the calls that were looked at before."""
    if before is None:
        return channel
    return replace(
        channel,
        recent=before.recent,
        blocks=before.blocks,
        call=channel.call or (before.call if channel.entered == before.entered else ""),
    )


_watcher: Watcher | None = None


def begin(store: dist.Store, rank: int, size: int, settings: config.Config, patience: float = 5.0) -> Watcher | None:
    """Watch this process of a job whose ranks have met by a store, unless it is watched already or is alone."""
    global _watcher
    if size < 2 or settings.watch is False:
        return None
    if _watcher is None or _watcher.is_closed:
        try:
            _watcher = Watcher(store, rank, size, patience, Path(settings.status) if settings.status else None)
        except FusionLayerError as error:
            _logger.warning("this job is not watched: %s", error)
            return None
    return _watcher


def watch(patience: float = 5.0) -> Watcher | None:
    """Watch the job of torch.distributed that this process belongs to; all ranks call it.

    While a rank is late, stopped, gone or in another call, rank 0 logs one line that names it, and the line of the program
    at which it is. ``fusionlayer status`` shows the job meanwhile. It costs no call anything: torch's flight recorder
    notes them in any case, and a thread of this process reads it.

    Args:
        patience: seconds that a rank may wait in a call before it is asked why. Where longer waits are usual,
            three times as long as those.

    Returns:
        The watcher, to ``close`` it early; None for a job of one process, and where the setting ``watch`` is false.

    Raises:
        UsageError: torch.distributed is not initialized.
    """
    if not (dist.is_available() and dist.is_initialized()):
        raise UsageError(
            "fusionlayer.watch needs torch.distributed; call init_process_group() or fusionlayer.init() first"
        )
    if not 0 < patience < float("inf"):
        raise UsageError(f"patience={patience!r}; expected seconds above 0")
    store = dist.distributed_c10d._get_default_store()
    return begin(store, dist.get_rank(), dist.get_world_size(), config.load(), patience)
