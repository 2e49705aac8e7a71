"""Records the activity of a rank's threads, in Chrome's trace format (chrome://tracing, Perfetto) and in torch's
profiler.

Code that works for an unknown bucket, such as a codec, reports its activity by ``with here.doing(...)``. While nothing
records, that makes one C object and calls nothing in Python.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, Protocol

import torch
from torch.autograd import profiler

from ..process import forks
from ..process.clock import Clock, Stamp
from .trace_file import TraceFile, encode, metadata

_NOTHING = nullcontext()
_PREFIX = "fusionlayer: "
_IN_PROFILES = {
    "ALLREDUCE": "all-reduce",
    "MEMCPY_IN_FUSION_BUFFER": "pack",
    "MEMCPY_OUT_FUSION_BUFFER": "unpack",
    "NEGOTIATE_ALLREDUCE": "compare plans",
}
"""Names in torch's profiler of spans that have Horovod's name in the timeline."""
PROFILER_STATE = (profiler, "_is_profiler_enabled", True)
"""``getattr(*PROFILER_STATE)`` is whether torch's profiler is active, without a call in Python. A torch that does not
have the attribute may activate it at any time."""
# A context that torch's profiler sees, by its name. It costs a fifth of a microsecond while no profiler is active.
_profiled: Callable[[str], AbstractContextManager[object]] = getattr(
    getattr(torch._C, "_profiler", None), "_RecordFunctionFast", nullcontext
)


class _CountsBytes(Protocol):
    bytes_sent: int


class _Here(threading.local):
    """The recorder of the calling thread's work.

    Attributes:
        doing: returns a context for a piece of work: "fusionlayer: encode", "decode", "recode" or "wire". Only torch's
            profiler sees it, unless the thread works for a bucket whose timeline is enabled. Contexts within another
            one are not recorded in timelines.
    """

    def __init__(self) -> None:
        self.doing: Callable[[str], AbstractContextManager[object]] = _profiled


here = _Here()


def carried(work: Callable[[], None]) -> Callable[[], None]:
    """Return ``work`` for another thread, where it is recorded as work for the calling thread's bucket."""
    doing = here.doing
    if not isinstance(doing, _Parts):
        return work
    parts = doing

    def run() -> None:
        here.doing = _Parts(parts.timeline, parts.transport, parts.details)
        try:
            work()
        finally:
            here.doing = _profiled

    return run


_LONG_AGO = 4.0
"""Seconds from which on single precision is coarser than the half microsecond that a device resolves."""


class _TimedSpan(NamedTuple):
    """A span whose beginning and end a device has yet to reach."""

    name: str
    start: Stamp
    end: Stamp
    row: str
    details: Mapping[str, Any]


class _Device:
    """The moments of a device on the time axis of the host, and the spans that wait for them."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        clock.finish()
        self._origin, self._at = clock.stamp(), time.perf_counter_ns()
        self.pending: deque[_TimedSpan] = deque()

    def place(self, span: _TimedSpan) -> tuple[int, int] | None:
        """Return beginning and end of a span in ``perf_counter_ns``; None if the device has not reached both."""
        before, until = (self.clock.seconds(self._origin, moment) for moment in (span.start, span.end))
        if before is None or until is None:
            return None
        start, end = self._at + round(before * 1e9), self._at + round(until * 1e9)
        # A device measures milliseconds in single precision, so they are counted from a moment that is not long ago.
        if before > _LONG_AGO:
            self._origin, self._at = span.start, start
        return start, end


Listener = Callable[[str, float, Mapping[str, Any]], object]
_listeners: tuple[Listener, ...] = ()
_timelines: weakref.WeakSet[Timeline] = weakref.WeakSet()
# Guards both: any thread makes timelines and listens to them.
_listeners_lock = threading.Lock()


def hear(listener: Listener) -> None:
    """Call ``listener(name, seconds, details)`` at the end of each span of any timeline, on the span's thread."""
    global _listeners
    with _listeners_lock:
        _listeners = (*_listeners, listener)
        for timeline in _timelines:
            timeline.enabled = timeline.is_open


def unhear(listener: Listener) -> None:
    """Call a listener no more; spans without a listener or a file are not made."""
    global _listeners
    with _listeners_lock:
        _listeners = tuple(other for other in _listeners if other != listener)
        for timeline in _timelines:
            timeline.enabled = timeline.is_open and (timeline.has_file or bool(_listeners))


class Timeline:
    """Writes one event for each span. Any thread may record.

    After ``time_by`` with a device's clock the times of spans are the device's. Such spans are written when the device
    has reached them.

    All timelines of a process with the same path share one file. If the file can no longer be written, as on a full
    disk, one warning says so and recording ends; the timed code continues. While torch's profiler is active it gets the
    spans too, with or without a file.

    Args:
        path: file to write, with ``.rank`` appended, so that each rank has its own. None: there is no file.
        rank: this rank, the process id in the trace.

    Raises:
        ConfigError: the file cannot be opened.

    Attributes:
        enabled: whether spans are written, or a listener receives them.
        is_open: whether it has not been closed.
    """

    def __init__(self, path: str | None, rank: int) -> None:
        self._rank = rank
        self._file = TraceFile.join(f"{path}.{rank}", rank) if path else None
        self._device: _Device | None = None
        self.is_open = True
        with _listeners_lock:
            _timelines.add(self)
            self.enabled = self.has_file or bool(_listeners)
        if self.has_file:
            forks.at_exit(self.close)

    @property
    def has_file(self) -> bool:
        """Whether spans are written to a file."""
        return self._file is not None

    def span(self, name: str, **details: Any) -> AbstractContextManager[None]:
        """Return a context that records the time and CPU time of its body, on the calling thread's row.

        Details that JSON cannot hold, such as a codec, are written as strings. Within ``bucket_span`` the details of
        the bucket are added.
        """
        if not (self.enabled or getattr(*PROFILER_STATE)):
            return _NOTHING
        doing = here.doing
        return _Span(self, name, {**doing.details, **details} if isinstance(doing, _Parts) else details)

    def bucket_span(self, transport: _CountsBytes, **details: Any) -> AbstractContextManager[None]:
        """Return the context ALLREDUCE, in which codecs and ``transport`` record their activity, with its details."""
        return _BucketSpan(self, transport, details) if self.enabled or getattr(*PROFILER_STATE) else _NOTHING

    def part(self, name: str, **details: Any) -> AbstractContextManager[None]:
        """Return the context of a part of the bucket that this thread works for; codecs record nothing within it."""
        doing = here.doing
        return doing(name, details) if isinstance(doing, _Parts) else _NOTHING

    def time_by(self, clock: Clock) -> None:
        """Let spans have the times of a device, if its ``clock`` is one's; this waits for the device."""
        if self.enabled and clock.lags:
            self._device = _Device(clock)
            if self._file is not None:
                self._file.write(metadata("device", self._rank, 0, name=str(clock.device)))

    def now(self) -> Stamp:
        """Return the present moment for ``record``: ``perf_counter_ns``, or a stamp of the device's clock."""
        return time.perf_counter_ns() if self._device is None else self._device.clock.stamp()

    def record(self, name: str, start: Stamp, end: Stamp, *, row: str | None = None, **details: Any) -> None:
        """Record a span that is over, from ``start`` to ``end`` of ``now``; ``row``: None is the calling thread's."""
        self._write(name, start, end, row or threading.current_thread().name, details)

    def settle(self) -> None:
        """Write the spans that the device has reached; called by one thread at a time, and it does not wait."""
        device = self._device
        while device is not None and device.pending:
            span = device.pending[0]
            times = device.place(span)
            if times is None:
                break
            device.pending.popleft()
            self._put(span.name, *times, span.row, span.details)

    def note_clock(self, offset: int, error: int, ranks: int) -> None:
        """Write by how many nanoseconds rank 0's clock is ahead of this one, and how wrong that may be."""
        if self._file is not None:
            # The stamps of spans stay unchanged: the reader of several files adds the offset.
            args = {"offset_us": offset / 1000, "error_us": error / 1000, "ranks": ranks}
            self._file.write(metadata("clock", self._rank, 0, **args))

    def _write(
        self, name: str, start: Stamp, end: Stamp, row: str, details: Mapping[str, Any], busy: int | None = None
    ) -> None:
        if self._device is not None and not isinstance(start, int):
            # The thread's own activity reveals nothing about the device.
            self._device.pending.append(_TimedSpan(name, start, end, row, details))
        else:
            self._put(name, start, end, row, details, busy)

    def _put(
        self, name: str, start: int, end: int, row: str, details: Mapping[str, Any], busy: int | None = None
    ) -> None:
        for listener in _listeners:
            listener(name, (end - start) / 1e9, details)
        file = self._file
        if file is not None:
            cpu = "" if busy is None else f', "tdur": {busy / 1000}'
            file.write_span(
                row,
                f'{{"name": {encode(name)}, "ph": "X", "ts": {start / 1000}, "dur": {(end - start) / 1000}{cpu}, '
                f'"pid": {self._rank}, "args": {encode(details)}',
            )

    def close(self) -> None:
        """End this timeline; complete the file if no other timeline writes to it. A second call does nothing.

        Spans that a device has not reached are left out.
        """
        self.settle()
        self._device = None
        file, self._file = self._file, None
        self.enabled = self.is_open = False
        if file is not None:
            file.leave()
            forks.not_at_exit(self.close)


class _Span:
    """Records its body in the timeline, if that is enabled, and in torch's profiler, if one is active."""

    __slots__ = ("_cpu", "_details", "_name", "_profile", "_start", "_timeline")

    def __init__(self, timeline: Timeline, name: str, details: dict[str, Any]) -> None:
        self._timeline, self._name, self._details = timeline, name, details
        title = _PREFIX + _IN_PROFILES.get(name, name.lower())
        self._profile = _profiled(f"{title} bucket {details['bucket']}" if "bucket" in details else title)

    def __enter__(self) -> None:
        self._profile.__enter__()
        self._start, self._cpu = self._timeline.now(), time.thread_time_ns()

    def __exit__(self, *error: Any) -> None:
        busy, end = time.thread_time_ns() - self._cpu, self._timeline.now()
        row = threading.current_thread().name
        self._timeline._write(self._name, self._start, end, row, self._details, busy)
        self._profile.__exit__(*error)


class _BucketSpan(_Span):
    """The work for one bucket. On this thread ``here.doing`` records its parts."""

    __slots__ = ("_parts",)

    def __init__(self, timeline: Timeline, transport: _CountsBytes, details: dict[str, Any]) -> None:
        super().__init__(timeline, "ALLREDUCE", details)
        self._parts = _Parts(timeline, transport, details)

    def __enter__(self) -> None:
        here.doing = self._parts
        super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        here.doing = _profiled


class _Parts:
    """Makes the spans of a thread's work for a bucket; ``here.doing`` holds it meanwhile."""

    def __init__(self, timeline: Timeline, transport: _CountsBytes, details: dict[str, Any]) -> None:
        self.timeline, self.transport, self.details = timeline, transport, details
        self.inside = False

    def __call__(self, name: str, more: Mapping[str, Any] | None = None) -> AbstractContextManager[None]:
        return _NOTHING if self.inside else _LeafSpan(self, name.removeprefix(_PREFIX).upper(), more or {})


class _LeafSpan(_Span):
    """A span that no other span of ``here.doing`` lies in."""

    __slots__ = ("_parts", "_sent")

    def __init__(self, parts: _Parts, name: str, more: Mapping[str, Any]) -> None:
        super().__init__(parts.timeline, name, {**parts.details, **more})
        self._parts = parts

    def __enter__(self) -> None:
        self._parts.inside = True
        self._sent = self._parts.transport.bytes_sent
        super().__enter__()

    def __exit__(self, *error: Any) -> None:
        self._parts.inside = False
        if self._name == "WIRE":
            self._details["bytes"] = self._parts.transport.bytes_sent - self._sent
        super().__exit__(*error)
