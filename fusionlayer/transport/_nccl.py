"""A link between the ranks of an NCCL group. Every operation runs in the order of the device's current stream."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..bounded import Overdue, bounded
from ..errors import again
from ._capture import beside_captures
from ._link import DeviceError, LinkError, LinkMessage, RowLink

__all__ = ["NcclLink"]

# torch's own watchdog would end the process. It is switched off. In case it runs nevertheless, its time-out is longer
# than ours, so that ours comes first.
_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
_WATCHDOG_FACTOR = 4
# Seconds between two looks at an event, at first and at most.
_POLL, _LONGEST_POLL = 0.0001, 0.01
# Seconds that NCCL has, when the device has done its part, to send what is still in NCCL's buffers.
_FLUSH = 5.0
_OVERDUE = "an operation on the device did not end in time"


@dataclass(slots=True)
class _Pending:
    """An operation that the device may still have to do. ``since``: when it was first seen to have begun, or 0."""

    begun: torch.cuda.Event
    ended: torch.cuda.Event
    since: float = 0.0


class NcclLink(RowLink):
    """One rank's end of an NCCL group that no other code uses, on one CUDA device.

    Calls return before the device has done the work. Events before and after each operation tell ``is_overdue`` when it
    began and ended. The constructor waits for the other ranks.

    Args:
        store: for NCCL's keys alone.
        rank: rank of this process in the group.
        size: number of ranks in the group.
        timeout: seconds that an operation may take on the device.
        device: of all tensors.
    """

    only_queues = True
    can_launch = True

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: float, device: torch.device) -> None:
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=_WATCHDOG_FACTOR * timeout)
        # Where both have work, messages go before the kernels of backward: other ranks wait for them.
        options.is_high_priority_stream = True
        self.device = device
        self._rank = rank
        self._timeout = timeout
        with _environment(_HANDLING, "0"):
            # Any: torch's type stubs lack some of its methods.
            self._group: Any = dist.ProcessGroupNCCL(dist.PrefixStore("nccl", store), rank, size, options)
        # Here and not in the first call, in which a rank that has nothing to exchange would have no part.
        self._group.eager_connect_single_device(device)
        # The thread that makes calls appends to it; the monitor's thread looks at its head and removes that.
        self._pending: deque[_Pending] = deque()
        self._last: torch.cuda.Event | None = None
        self._is_drained = False
        self._stop: Tensor | None = None
        # Why no call can be made any more, and what is_overdue has found.
        self._lost: LinkError | None = None
        self._found: LinkError | None = None

    def exchange(self, outgoing: Sequence[LinkMessage], incoming: Sequence[LinkMessage]) -> None:
        if not outgoing and not incoming:
            return
        with self._operation():
            self._group._start_coalescing()
            for peer, data, _ in outgoing:
                self._group.send([data], peer, 0)
            for peer, data, _ in incoming:
                self._group.recv([data], peer, 0)
            self._group._end_coalescing().wait()

    def all_gather(self, x: Tensor, out: Tensor) -> None:
        with self._operation():
            self._group._allgather_base(out.view(-1), x).wait()

    def all_to_all(self, x: Tensor, out: Tensor) -> None:
        with self._operation():
            self._group.alltoall_base(out.view(-1), x.view(-1), [], []).wait()

    def all_reduce(self, x: Tensor, key: int) -> None:
        with self._operation():
            self._group.allreduce([x]).wait()

    def broadcast(self, x: Tensor, root: int, key: int) -> None:
        options = dist.BroadcastOptions()
        options.rootRank = root
        with self._operation():
            self._group.broadcast([x], options).wait()

    @contextmanager
    def launching(self) -> Iterator[Tensor]:
        with self._operation():
            if self._stop is None:
                self._stop = _word()
            yield self._stop

    def is_overdue(self) -> bool:
        if self._pending and self._found is None:
            with beside_captures():
                self._found = self._look()
        return self._found is not None

    def _look(self) -> LinkError | None:
        """Return why the oldest operation can no longer be waited for, or None."""
        try:
            while self._pending and self._pending[0].ended.query():
                self._pending.popleft()
            oldest = self._pending[0] if self._pending else None
            if oldest is None or not oldest.begun.query():
                return None  # what was queued before it takes its time, and that is no fault of the other ranks
        except RuntimeError as error:
            return DeviceError(self._rank, str(error))
        oldest.since = oldest.since or time.monotonic()
        late = time.monotonic() - oldest.since > self._timeout
        return LinkError(self._rank, _OVERDUE) if late else None

    def drain(self) -> None:
        deadline, pause = time.monotonic() + self._timeout, _POLL
        with self._failing(), beside_captures() if self._last is not None else nullcontext():
            # Not synchronize(): nothing could interrupt it when a rank is lost.
            while self._last is not None and not self._last.query():
                self._check_open()
                if time.monotonic() > deadline:
                    raise LinkError(self._rank, _OVERDUE)
                time.sleep(pause)
                pause = min(2 * pause, _LONGEST_POLL)
        self._check_open()  # an operation that was aborted ends like any other
        self._is_drained = True

    def close(self) -> None:
        if self._lost is not None:
            return
        self._lost = self._found or LinkError(self._rank, "the connections are closed")
        if self._stop is not None:
            self._stop.fill_(1)
        if self._is_drained:
            # NCCL's threads may still have to send what the device has handed over, and abort() would drop it.
            with suppress(Overdue, RuntimeError):
                bounded(self._group.shutdown, time.monotonic() + _FLUSH, name="end of NCCL")
                return
        self._group.abort()

    @contextmanager
    def _operation(self) -> Iterator[None]:
        self._check_open()
        self._is_drained = False
        with self._failing():
            begun, ended = torch.cuda.Event(), torch.cuda.Event()
            begun.record()
            yield
            ended.record()
        self._last = ended
        self._pending.append(_Pending(begun, ended))

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


def _word() -> Tensor:
    """Return (1,) int32, 0, in memory of the host that the device reads."""
    return torch.zeros(1, dtype=torch.int32, pin_memory=True)


@contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    """Set an environment variable while the body runs, unless the user has set it."""
    if name in os.environ:
        yield
        return
    os.environ[name] = value
    try:
        yield
    finally:
        del os.environ[name]
