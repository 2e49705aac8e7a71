"""The thread that tells the other ranks where this one is, and on the first rank what is wrong with the job."""

from __future__ import annotations

import logging
import sys
import threading
import time
import weakref
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

import torch.distributed as dist

from ..base import config
from ..base.errors import FusionLayerError, UsageError
from ..observe import counts
from ..process import forks
from ..process.processes import Identity
from . import report, stack
from .judge import Finding
from .monitor import monitor
from .recorder import Recorder
from .reporter import Reporter
from .state import Channel, State, encode
from .tcp import Links, counters
from .waits import UsualWait

__all__ = ["Watcher", "begin", "follow", "leave", "watch"]

_logger = logging.getLogger("fusionlayer")

# Seconds between two looks at the processes of this host, and at how far this rank is.
_TICK, _LOOK = 0.2, 1.0
# Seconds between two states that a rank writes: while all is well, and while it waits or others may wait for it.
_BEAT, _STILL = 3.0, 1.5
# The share of the time that looking at single calls may take.
_SHARE = 1 / 300
# Seconds for which a rank that fails waits until the first one has read why.
_LINGER = 3.0
_PREFIX = "fusionlayer/watch"


class _Place(NamedTuple):
    """Where the ranks have met, and which of them this process is."""

    store: weakref.ref[dist.Store] | None
    rank: int
    size: int


def _place(store: dist.Store | None, rank: int, size: int) -> _Place:
    return _Place(None if store is None else weakref.ref(store), rank, size)


class Watcher:
    """Watches one process of a job. Make it by ``watch``.

    Args:
        store: by which the ranks have met. The watcher uses a client of its own. It does not keep the store, which may
            be a server: when the program drops it, the watcher ends. None: this process is alone in an elastic job,
            until ``move``.
        rank: this rank.
        size: number of ranks.
        patience: seconds that a rank may wait in a call before it is asked why, at least.
        path: file for the job's state; None: one of this user's folder.
        name: of the watch among those that use the store; equal on all ranks.

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
        # Where the job has moved to, which the thread takes over in its next tick.
        self._place = self._here = _place(store, rank, size)
        self._prefix = f"{_PREFIX}/{name}" if name else _PREFIX
        self._reporter = Reporter(rank, size, process, path or report.folder() / f"job-{process.pid}.json")
        self._watched = threading.get_ident()
        self._generation = forks.generation
        self._store: dist.Store | None = None
        self._recorder = Recorder()
        self._links = Links()
        self._pace = UsualWait(patience)
        self._state = State(rank, process, 0)
        # Moments on the monotonic clock: of the last state written, look at this rank, look at its single calls, and
        # look at other ranks.
        self._written = self._looked = self._detailed = self._read = -1e9
        # Seconds that looking at single calls takes, and whether there are some that were not looked at.
        self._cost, self._has_news = 0.0, False
        self._answered = b""
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
        return None if self._place.store is None else self._place.store()

    @property
    def place(self) -> tuple[int, int]:
        """This rank, and how many there are."""
        return self._place.rank, self._place.size

    @property
    def findings(self) -> tuple[Finding, ...]:
        """What is wrong with the job now, on the first rank that is alive; empty while it is well."""
        return self._reporter.findings

    @property
    def lines(self) -> list[str]:
        """What was logged so far."""
        return list(self._reporter.lines)

    @property
    def is_closed(self) -> bool:
        """Whether it has stopped watching, or belongs to the parent of a forked process."""
        return self._ending.is_set() or self._generation != forks.generation

    def counts(self) -> dict[str, float]:
        """Return what it has counted, by the names of ``fusionlayer.metrics``. Any thread may call it."""
        return {
            "retransmits": float(self._links.again),
            "stalls": float(self._reporter.told),
            "ranks": float(self.place[1]),
            "ranks_to_blame": float(len({rank for finding in self.findings for rank in finding.ranks})),
        }

    def move(self, store: dist.Store | None, rank: int, size: int) -> None:
        """Go on as another rank, or of another number of ranks, which have met in another store. Any thread."""
        self._place = _place(store, rank, size)

    def close(self) -> None:
        """Tell the other ranks that this one has ended, and stop watching. A second call does nothing."""
        if self.is_closed:
            return
        kind, error, trace = sys.exc_info()
        if kind is not None and error is not None:  # it is closed because of that, as in a finally clause
            self._note(kind, error, trace)
        self._ending.set()
        self._thread.join(_LINGER + 2)
        self._release()

    def _note_exception(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """Note what the process ends with; in place of ``sys.excepthook``, which it calls."""
        self._note(kind, error, trace)
        self._hook(kind, error, trace)

    def _note(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if issubclass(kind, Exception):
            frames, step = [], trace
            while step is not None:
                frames.append((step.tb_frame.f_code.co_filename, step.tb_lineno))
                step = step.tb_next
            text = next(iter(str(error).splitlines()), "")
            self._error_at = stack.of_frames(reversed(frames))
            self._error = f"{kind.__name__}: {text:.200}"

    # ---- on the thread ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        stumbled = False
        while not self._ending.wait(_TICK):
            if self._place.store is not None and self.store is None:
                break  # the program has destroyed its process group
            now = time.monotonic()
            try:
                self._tick(now)
            except RuntimeError:
                # The store does not answer. What the processes of this host show is still seen.
                if self._reporter.is_first and self._reporter.sees_trouble:
                    self._reporter.tell(now, None)
            except Exception:
                if not stumbled:
                    _logger.exception("the thread that watches this job met an error, and goes on")
                stumbled = True
        try:
            self._end()
        except (RuntimeError, OSError):
            # The store went with the process that has kept it.
            if self._error and self._reporter.is_first:
                self._reporter.conclude(has_failed=True)
        self._store = None
        if not self._ending.is_set():
            self._ending.set()
            self._release()

    def _release(self) -> None:
        """Undo what keeps this watcher for the life of the process."""
        if sys.excepthook == self._note_exception:
            sys.excepthook = self._hook
        forks.not_at_exit(self.close)

    def _client(self) -> dist.Store | None:
        """Return a client of the store; None for a rank that is alone. Ranks that have met anew know nothing before."""
        if self._place is not self._here:
            self._here, self._store = self._place, None
            _, rank, size = self._here
            self._reporter.move(rank, size)
            self._state = State(rank, self._state.process, 0)
            self._written = self._looked = self._detailed = self._read = -1e9
            self._answered = b""
        met_by = self.store
        if self._store is None and met_by is not None:
            self._store = dist.PrefixStore(self._prefix, monitor.own_store(met_by))
        return self._store

    def _tick(self, now: float) -> None:
        store, reporter = self._client(), self._reporter
        if store is None:
            return
        _, rank, size = self._here
        if now - self._looked >= _LOOK:
            self._looked = now
            self._look(now, store)
        is_first = reporter.is_first
        if now - self._read >= (_LOOK if is_first or not reporter.knows_lower else _BEAT):
            self._read = now
            reporter.read(store, range(size if is_first else rank), now)
            reporter.hear(self._state, now)
        elif not reporter.sees_trouble:
            return
        if is_first:
            reporter.tell(now, store)

    def _look(self, now: float, store: dist.Store) -> None:
        """Look where this rank is, and write it if the others should know."""
        channels = self._recorder.progress()
        was_still, waited = self._pace.is_still, self._state.waits
        moved = self._pace.note(now, {name: (each.entered, each.done) for name, each in channels.items()})
        self._has_news = self._has_news or moved
        place = stack.of_thread(self._watched)
        in_call = place.peer is not None or any(each.entered > each.done for each in channels.values())
        waits = in_call and self._pace.is_long(now)
        asked = store.get("ask") if store.check(["ask"]) else b""
        wanted = asked != self._answered or (waits and not waited)
        if wanted or (self._has_news and now - self._detailed >= max(_BEAT, self._cost / _SHARE)):
            begun = time.thread_time()
            channels = self._recorder.progress(anew=True) if wanted else channels
            channels = self._recorder.detailed(channels, stacks=wanted, asked=asked.decode(errors="replace"))
            if not wanted:  # lines take longer, and a second for the first time
                self._cost = time.thread_time() - begun
            self._answered, self._detailed, self._has_news = asked, now, False
        else:
            channels = {name: _with_calls(each, self._state.channels.get(name)) for name, each in channels.items()}
        slow, known = self._links.look(now, counters()), self._state.links
        self._state = replace(
            self._state,
            idle=self._pace.idle(now),
            waits=waits,
            doing=place.doing,
            where=place.where,
            peer=place.peer,
            channels=channels,
            ends=self._links.ends,
            links=slow,
            held_up=self._links.held_up,
        )
        changed = bool(slow) != bool(known) or wanted or waits != waited or self._pace.is_still != was_still
        if changed or now - self._written >= (_STILL if self._pace.is_still else _BEAT):
            self._write(store, replace(self._state, counts=counts.read()))

    def _write(self, store: dist.Store, state: State) -> None:
        written = replace(state, serial=state.serial + 1)
        store.set(f"at/{written.rank}", encode(written))
        self._state, self._written = written, time.monotonic()  # who sees its number finds it in the store

    def _end(self) -> None:
        """Write the last state. The first rank then tells what has become of the job."""
        store, reporter, deadline = self._client(), self._reporter, time.monotonic() + _LINGER
        if store is None:
            reporter.conclude(has_failed=bool(self._error))
            return
        _, rank, size = self._here
        state = replace(self._state, life="failed" if self._error else "ended", error=self._error)
        if not self._error:
            state = replace(state, waits=False)  # it may have waited when it looked last, and does so no more
        if self._error:
            calls = self._recorder.detailed(self._recorder.progress(anew=True), stacks=True)
            state = replace(state, where=self._error_at or state.where, channels=calls)
        self._write(store, state)
        while self._error and time.monotonic() < deadline and not store.check(["seen"]):
            # Lower ranks may be gone without a word: then this one is the first.
            reporter.read(store, range(rank), time.monotonic())
            if reporter.is_first:
                break
            time.sleep(_TICK)
        if not reporter.is_first:
            self._leave(store, size)
            return
        while True:
            now = time.monotonic()
            reporter.read(store, range(size), now)
            reporter.hear(self._state, now)
            if not self._error or reporter.all_have_ended or now > deadline:
                break
            time.sleep(_TICK)
        reporter.conclude(has_failed=bool(self._error))
        store.set("seen", "1")
        self._leave(store, size)

    def _leave(self, store: dist.Store, size: int) -> None:
        """Count this rank as ended; the last one deletes all keys."""
        if store.add("left", 1) == size:
            for key in ("ask", "seen", "left", *(f"at/{rank}" for rank in range(size))):
                store.delete_key(key)


def _with_calls(channel: Channel, before: Channel | None) -> Channel:
    """Return the channel with the calls that were looked at before."""
    if before is None:
        return channel
    lasts = channel.call or (before.call if channel.entered == before.entered > channel.done else "")
    return replace(channel, call=lasts, recent=before.recent, blocks=before.blocks)


_watcher: Watcher | None = None
# Where the members of an elastic job have met last, and who this process is there; None: the job is not elastic.
_members: tuple[dist.Store | None, int, int] | None = None


def begin(
    store: dist.Store,
    rank: int,
    size: int,
    settings: config.Config,
    patience: float = 5.0,
    *,
    asked: bool = True,
    name: str = "",
) -> Watcher | None:
    """Heartbeat this process of a job whose ranks have met by a store, unless it is watched already or is alone.

    Args:
        store: by which the ranks have met; the watcher ends with it.
        rank: this rank.
        size: number of ranks.
        settings: of the job.
        patience: as for ``watch``.
        asked: whether the program has asked for it. A FileStore keeps every write, so nobody else begins with one.
        name: as for ``Watcher``.
    """
    global _watcher
    if size < 2 or settings.watch is False or (not asked and not settings.watch and _is_file(store)):
        return None
    if _watcher is not None and not _watcher.is_closed and _watcher.store is not store:
        _watcher.close()  # of a process group that was destroyed
    return _open(store, rank, size, settings, patience, name)


def _open(
    store: dist.Store | None, rank: int, size: int, settings: config.Config, patience: float = 5.0, name: str = ""
) -> Watcher | None:
    global _watcher
    if _watcher is None or _watcher.is_closed:
        try:
            path = Path(settings.status) if settings.status else None
            _watcher = Watcher(store, rank, size, patience, path, name)
        except FusionLayerError as error:
            _logger.warning("this job is not watched: %s", error)
            return None
    return _watcher


def follow(store: dist.Store | None, rank: int, size: int, settings: config.Config) -> None:
    """Heartbeat the members of an elastic job as they are now, if this process is watched or its settings ask for it.

    Args:
        store: by which they have met; None: this process is alone.
        rank, size: of this process, and of the members.
        settings: of the job.
    """
    global _members
    _members = store, rank, size
    if _watcher is not None and not _watcher.is_closed:
        _watcher.move(store, rank, size)
    elif settings.watch:
        _open(store, rank, size, settings)


def leave() -> None:
    """End what ``follow`` has begun: this process leaves the elastic job while the others can be reached."""
    global _members
    if _members is not None and _watcher is not None:
        _watcher.close()
    _members = None


def _is_file(store: dist.Store) -> bool:
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return isinstance(store, dist.FileStore)


@counts.add_gauges
def _gauges() -> Mapping[str, float]:
    return {} if _watcher is None else _watcher.counts()


def watch(patience: float = 5.0) -> Watcher | None:
    """Heartbeat the job of torch.distributed that this process belongs to; all ranks call it.

    While a rank is late, stopped, gone or in another call, rank 0 logs one line that names it, and the line of the
    program at which it is. ``fusionlayer status`` shows the job meanwhile. No call costs more: torch's flight recorder
    notes calls in any case, and a thread of this process reads it. The thread that calls this is the one whose place is
    told. In an elastic job it goes on with those who are left and who come.

    Args:
        patience: seconds that a rank may wait in a call before it is asked why. Where longer waits are usual, three
            times as long as those.

    Returns:
        The watcher, to ``close`` it early; None for a job of one process, and where the setting ``watch`` is false.

    Raises:
        UsageError: torch.distributed is not initialized.
        ConfigError: a setting cannot be used.
    """
    if _members is None and not (dist.is_available() and dist.is_initialized()):
        raise UsageError(
            "fusionlayer.watch needs torch.distributed; call init_process_group() or fusionlayer.init() first"
        )
    if not 0 < patience < float("inf"):
        raise UsageError(f"patience={patience!r}; expected seconds above 0")
    if _members is not None:
        settings = config.load()
        return None if settings.watch is False else _open(*_members, settings, patience)
    store = dist.distributed_c10d._get_default_store()
    return begin(store, dist.get_rank(), dist.get_world_size(), config.load(), patience)
