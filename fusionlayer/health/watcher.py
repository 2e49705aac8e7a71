"""The thread that lets other ranks know where this one is, and on the first rank alive reports what is wrong."""

from __future__ import annotations

import logging
import sys
import threading
import time
import weakref
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

import torch.distributed as dist

from ..observe import counts
from ..process import forks
from ..process.processes import Identity
from . import report, stack
from .monitor import monitor
from .recorder import Recorder
from .reporter import Reporter
from .state import ChannelState, Finding, RankState
from .store import StatusKeys
from .tcp import Links, counters
from .waits import UsualWait

_logger = logging.getLogger("fusionlayer")

# Seconds between two checks of this host's processes and of this rank's position.
_TICK, _LOOK = 0.2, 1.0
# Seconds between two states that a rank writes: normally, and while ranks wait.
_BEAT, _STILL = 3.0, 1.5
# The share of the time that looking at single calls may take, and looking at connections.
_SHARE = 1 / 300
# Seconds for which a rank that fails waits until the first one has read why.
_LINGER = 3.0
_PREFIX = "fusionlayer/watch"


class _Membership(NamedTuple):
    """The place where the ranks have met, and the number of this process among them."""

    store: weakref.ref[dist.Store] | None
    rank: int
    size: int


def _membership(store: dist.Store | None, rank: int, size: int) -> _Membership:
    return _Membership(None if store is None else weakref.ref(store), rank, size)


class Watcher:
    """Watches one process of a job. Make it by ``watch``.

    Args:
        store: the store by which the ranks have met. The watcher uses a client of its own. It does not keep the store,
            which may be a server: when the program drops it, the watcher ends. None: this process is alone in an
            elastic job, until ``move``.
        rank: this rank.
        size: number of ranks.
        patience: seconds that a rank may wait in a call before it is asked why, at least.
        path: file for the job's state; None: one of this user's folder.
        name: the name of the watch among those that use the store; equal on all ranks.

    Raises:
        ConfigError: there is no place for the file.
    """

    def __init__(
        self,
        store: dist.Store | None,
        rank: int,
        size: int,
        patience: float,
        path: Path | None,
        name: str = "",
    ) -> None:
        process = Identity.own()
        if path is None:
            report.forget_old()
        # Guards _membership, where the job has moved to, and _error, _error_at: other threads set them, and the
        # watcher's takes them over in its next tick.
        self._lock = threading.Lock()
        self._membership = self._here = _membership(store, rank, size)
        self._prefix = f"{_PREFIX}/{name}" if name else _PREFIX
        self._reporter = Reporter(rank, size, process, path or report.folder() / f"job-{process.pid}.json")
        self._watched = threading.get_ident()
        self._generation = forks.generation
        self._keys: StatusKeys | None = None
        self._recorder = Recorder()
        self._links = Links()
        self._usual = UsualWait(patience)
        self._state = RankState(rank, process, 0)
        # Times on the monotonic clock: of the last state written, and of the last check of this rank, its single calls,
        # and other ranks.
        self._written = self._looked = self._detailed = self._read = -1e9
        # Seconds that looking at single calls takes, and whether there are some that were not looked at.
        self._cost, self._has_news = 0.0, False
        # When the kernel's counts of all connections were read last, and the seconds that this takes.
        self._counted, self._counting = -1e9, 0.0
        self._answered = ""
        self._error = self._error_at = ""
        self._ending = threading.Event()
        self._hook = sys.excepthook
        sys.excepthook = self._note_exception
        self._thread = threading.Thread(target=self._run, name="fusionlayer watch", daemon=True)
        self._thread.start()
        forks.at_exit(self.close)

    @property
    def store(self) -> dist.Store | None:
        """The store by which the ranks have met, if there still is one."""
        membership = self._joined
        return None if membership.store is None else membership.store()

    @property
    def place(self) -> tuple[int, int]:
        """This rank, and how many there are."""
        return self._joined[1:]

    @property
    def _joined(self) -> _Membership:
        with self._lock:
            return self._membership

    @property
    def findings(self) -> tuple[Finding, ...]:
        """The job's present problem, on the first rank that is alive; empty while there is none."""
        return self._reporter.findings

    @property
    def lines(self) -> list[str]:
        """The lines that were logged last."""
        return self._reporter.lines

    @property
    def is_closed(self) -> bool:
        """Whether it has stopped watching, or belongs to the parent of a forked process."""
        return self._ending.is_set() or self._generation != forks.generation

    def counts(self) -> dict[str, float]:
        """Return its counts so far, by the names of ``fusionlayer.metrics``. Any thread may call it."""
        return {
            "retransmits": float(self._links.again),
            "stalls": float(self._reporter.count),
            "ranks": float(self.place[1]),
            "ranks_to_blame": float(len({rank for finding in self.findings for rank in finding.ranks})),
        }

    def move(self, store: dist.Store | None, rank: int, size: int) -> None:
        """Continue as another rank, or of another number of ranks, which have met in another store. Any thread."""
        with self._lock:
            self._membership = _membership(store, rank, size)

    def close(self) -> None:
        """Notify the other ranks that this one has ended, and stop watching. A second call does nothing."""
        if self.is_closed:
            return
        kind, error, trace = sys.exc_info()
        if kind is not None and error is not None:  # it is closed because of that, as in a finally clause
            self._note(kind, error, trace)
        self._ending.set()
        self._thread.join(_LINGER + 2)
        self._release()

    def _note_exception(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """Note what the process ends with; instead of ``sys.excepthook``, which it calls."""
        self._note(kind, error, trace)
        self._hook(kind, error, trace)

    def _note(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if issubclass(kind, Exception):
            frames, step = [], trace
            while step is not None:
                frames.append((step.tb_frame.f_code.co_filename, step.tb_lineno))
                step = step.tb_next
            text = next(iter(str(error).splitlines()), "")
            where = stack.of_frames(reversed(frames))
            with self._lock:
                self._error, self._error_at = f"{kind.__name__}: {text:.200}", where

    @property
    def _failure(self) -> tuple[str, str]:
        """The exception that ends the process, and its line; "" if none does."""
        with self._lock:
            return self._error, self._error_at

    # ---- on the thread ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        stumbled = False
        while not self._ending.wait(_TICK):
            if self._joined.store is not None and self.store is None:
                break  # the program has destroyed its process group
            now = time.monotonic()
            try:
                self._tick(now)
            except RuntimeError:
                # The store does not answer. The state of this host's processes is still seen.
                if self._reporter.is_first and self._reporter.sees_trouble:
                    self._reporter.report(now, None)
            except Exception:
                if not stumbled:
                    _logger.exception("the thread that watches this job met an error, and goes on")
                stumbled = True
        try:
            self._end()
        except (RuntimeError, OSError):
            # The store went with the process that has kept it.
            if self._failure[0] and self._reporter.is_first:
                self._reporter.conclude(has_failed=True)
        self._keys = None
        if not self._ending.is_set():
            self._ending.set()
            self._release()

    def _release(self) -> None:
        """Undo what keeps this watcher for the life of the process."""
        if sys.excepthook == self._note_exception:
            sys.excepthook = self._hook
        forks.not_at_exit(self.close)

    def _reach(self) -> StatusKeys | None:
        """Return the status keys; None for a rank that is alone. Ranks that have reconnected have no earlier keys."""
        membership = self._joined
        if membership is not self._here:
            self._here, self._keys = membership, None
            _, rank, size = membership
            self._reporter.move(rank, size)
            self._state = RankState(rank, self._state.process, 0)
            self._written = self._looked = self._detailed = self._read = -1e9
            self._answered = ""
        met_by = None if membership.store is None else membership.store()
        if self._keys is None and met_by is not None:
            self._keys = StatusKeys(monitor.own_store(met_by), self._prefix, membership.rank, membership.size)
            self._keys.begin()
        return self._keys

    def _tick(self, now: float) -> None:
        keys, reporter = self._reach(), self._reporter
        if keys is None:
            return
        if now - self._looked >= _LOOK:
            self._looked = now
            self._look(now, keys)
        is_first = reporter.is_first
        ranks = range(keys.size) if is_first else reporter.unknown
        if ranks and now - self._read >= _LOOK:
            self._read = now
            reporter.read(keys, ranks, now)
            reporter.hear(self._state, now)
        elif not reporter.sees_trouble:
            return
        if is_first:
            reporter.report(now, keys)

    def _look(self, now: float, keys: StatusKeys) -> None:
        """Look where this rank is, and write it if the others should know."""
        channels = self._recorder.progress()
        was_still, waited, slow = self._usual.is_still, self._state.waits, bool(self._state.links)
        moved = self._usual.note(now, {name: (each.entered, each.done) for name, each in channels.items()})
        self._has_news = self._has_news or moved
        place = stack.of_thread(self._watched)
        in_call = place.peer is not None or any(each.entered > each.done for each in channels.values())
        waits = in_call and self._usual.is_long(now)
        asked, _ = keys.news()
        wanted = asked != self._answered or (waits and not waited)
        links = self._state.links
        if now - self._counted >= max(_LOOK, self._counting / _SHARE):
            begun = time.thread_time()
            self._counted, links = now, self._links.look(now, counters())
            self._counting = time.thread_time() - begun
        self._state = replace(
            self._state,
            idle=self._usual.idle(now),
            waits=waits,
            doing=place.doing,
            where=place.where,
            peer=place.peer,
            channels=self._with_calls(now, channels, wanted, asked),
            ends=self._links.ends,
            links=links,
            held_up=self._links.held_up,
        )
        changed = bool(links) != slow or wanted or waits != waited or self._usual.is_still != was_still
        if changed or now - self._written >= (_STILL if self._usual.is_still else _BEAT):
            self._write(keys, replace(self._state, counts=counts.read()))

    def _with_calls(
        self, now: float, channels: dict[str, ChannelState], wanted: bool, asked: str
    ) -> dict[str, ChannelState]:
        """Return the channels with their single calls, read again on request, otherwise seldom."""
        if wanted or (self._has_news and now - self._detailed >= max(_BEAT, self._cost / _SHARE)):
            begun = time.thread_time()
            channels = self._recorder.progress(anew=True) if wanted else channels
            channels = self._recorder.detailed(channels, stacks=wanted, asked=asked)
            if not wanted:  # lines take longer, and a second for the first time
                self._cost = time.thread_time() - begun
            self._answered, self._detailed, self._has_news = asked, now, False
            return channels
        found = {}
        for name, channel in channels.items():
            before = self._state.channels.get(name)
            if before is not None:
                lasts = channel.call or (before.call if channel.entered == before.entered > channel.done else None)
                channel = replace(channel, call=lasts, recent=before.recent, blocks=before.blocks)
            found[name] = channel
        return found

    def _write(self, keys: StatusKeys, state: RankState) -> None:
        written = replace(state, serial=state.serial + 1)
        keys.write(written)
        self._state, self._written = written, time.monotonic()  # its number is in the store before it is seen here

    def _end(self) -> None:
        """Write the last state. The first rank alive then reports why the job has failed."""
        keys, reporter, deadline = self._reach(), self._reporter, time.monotonic() + _LINGER
        error, where = self._failure
        if keys is None:
            reporter.conclude(has_failed=bool(error))
            return
        if error:
            calls = self._recorder.detailed(self._recorder.progress(anew=True), stacks=True)
            where = where or self._state.where
            state = replace(self._state, life="failed", error=error, where=where, channels=calls)
        else:  # it may have waited when it looked last, and does so no more
            state = replace(self._state, life="ended", waits=False)
        self._write(keys, state)
        while error and time.monotonic() < deadline and not keys.cause():
            # Lower ranks may be gone without a word: then this one is the first.
            reporter.read(keys, reporter.unknown, time.monotonic())
            if reporter.is_first:
                break
            time.sleep(_TICK)
        while reporter.is_first:
            now = time.monotonic()
            reporter.read(keys, keys.others, now)
            reporter.hear(self._state, now)
            if not error or reporter.all_have_ended or now > deadline:
                reporter.conclude(has_failed=bool(error))
                keys.settle(next(iter(reporter.findings), Finding("unknown", (), "")))  # as ranks that fail wait for it
                break
            time.sleep(_TICK)
        keys.leave()
