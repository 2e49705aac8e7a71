"""A link whose calls only queue their work on a device: it knows when the work has begun and ended, and can end it."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from ...base.errors import again
from .._capture import beside_captures
from .base import DeviceError, Link, LinkError

# Seconds between two looks at an event, at first and at most.
_POLL, _LONGEST_POLL = 0.0001, 0.01
_OVERDUE = "an operation on the device timed out"


@dataclass(slots=True)
class Pending:
    """An operation that the device may still have to do.

    Attributes:
        begun: an event after all work that was queued before the call.
        ended: an event after the call's own work.
        since: when it was first seen to have begun, or 0.
        awaited: the awaited event, if the link knows it: a rank, one of its counters, and the number.
    """

    begun: torch.cuda.Event
    ended: torch.cuda.Event
    since: float = 0.0
    awaited: list[tuple[int, int, int]] = field(default_factory=list)


class QueueingLink(Link):
    """One rank's end of a group on a device. Every operation runs in the order of the device's current stream.

    Calls return before the device has done the work. Events before and after each operation show ``overdue`` when it
    began and ended.
    """

    only_queues = True

    def __init__(self, rank: int, timeout: float, device: torch.device) -> None:
        self.device = device
        self._rank = rank
        self._timeout = timeout
        # The thread that makes calls appends to it; the monitor's thread checks and removes its head.
        self._pending: deque[Pending] = deque()
        self._last: torch.cuda.Event | None = None
        self._is_drained = False
        # Why no call can be made any more, and what overdue() has found.
        self._lost: LinkError | None = None
        self._found: LinkError | None = None

    def overdue(self) -> LinkError | None:
        if self._found is None:
            self._found = self._look()
        return self._found

    def drain(self) -> None:
        deadline, pause = time.monotonic() + self._timeout, _POLL
        with self._failing():
            # Not synchronize(): nothing could interrupt it when a rank is lost.
            while self._last is not None and not _is_over(self._last):
                self._check_open()
                if time.monotonic() > deadline:
                    raise self._late(next(iter([*self._pending]), None))
                time.sleep(pause)
                pause = min(2 * pause, _LONGEST_POLL)
        self._check_open()  # an operation that was cut off ends like any other
        self._is_drained = True

    def close(self) -> None:
        if self._lost is None:
            self._lost = self._found or LinkError(self._rank, "the connections are closed")
            # A device that has failed lets nothing be ended in good order, and its error is known already.
            with suppress(RuntimeError):
                self._end()

    @abstractmethod
    def _end(self) -> None:
        """Make what is queued end, after ``drain`` in good order. It is called once."""

    @contextmanager
    def _operation(self) -> Iterator[Pending]:
        """Let the body queue one operation."""
        self._check_open()
        self._is_drained = False
        with self._failing():
            pending = Pending(torch.cuda.Event(), torch.cuda.Event())
            # The caller's current device may be another one.
            stream = torch.cuda.current_stream(self.device)
            pending.begun.record(stream)
            yield pending
            pending.ended.record(stream)
        self._last = pending.ended
        self._pending.append(pending)

    def _look(self) -> LinkError | None:
        """Return why the oldest operation can no longer be waited for, or None."""
        try:
            while self._pending and _is_over(self._pending[0].ended):
                self._pending.popleft()
            oldest = self._pending[0] if self._pending else None
            if oldest is None or not _is_over(oldest.begun):
                return None  # the work queued before it takes its time, and that is no fault of the other ranks
        except RuntimeError as error:
            return DeviceError(self._rank, str(error))
        oldest.since = oldest.since or time.monotonic()
        return self._late(oldest) if time.monotonic() - oldest.since > self._timeout else None

    def _is_at_work(self) -> bool:
        """Return whether the device may still have to do something of what was queued."""
        try:
            return self._last is not None and not _is_over(self._last)
        except RuntimeError:
            return True

    def _late(self, pending: Pending | None) -> LinkError:
        """Return the error for an operation that has not ended in time."""
        return LinkError(self._rank, _OVERDUE)

    @contextmanager
    def _failing(self) -> Iterator[None]:
        """Close the link after an error in the body, and raise it as ``LinkError``."""
        try:
            yield
        except (LinkError, RuntimeError) as error:
            self._found = self._found or self._named(error)
            self.close()
            self._check_open()

    def _named(self, error: LinkError | RuntimeError) -> LinkError:
        if isinstance(error, LinkError):
            return error
        # NCCL has an error of its own, and says so if its call of CUDA has failed.
        by_device = not isinstance(error, dist.DistBackendError) or "cuda error" in str(error).lower()
        return (DeviceError if by_device else LinkError)(self._rank, str(error))

    def _check_open(self) -> None:
        if self._lost is not None:
            raise again(self._lost) from None


def _is_over(event: torch.cuda.Event) -> bool:
    with beside_captures():
        is_over: bool = event.query()
    return is_over
