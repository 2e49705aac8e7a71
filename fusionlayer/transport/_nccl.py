"""A link between the ranks of an NCCL group. Every operation runs in the order of the device's current stream."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ._link import LinkError, LinkMessage, RowLink

__all__ = ["NcclLink"]

# torch's own watchdog would end the process. It is switched off. In case it runs nevertheless, its time-out is longer
# than ours, so that ours comes first.
_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
_WATCHDOG_FACTOR = 4


class NcclLink(RowLink):
    """One rank's end of an NCCL group that no other code uses, on the current CUDA device.

    Calls return before the device has done the work. An event after each operation tells ``is_overdue`` when it ended.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: float) -> None:
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=_WATCHDOG_FACTOR * timeout)
        self.device = torch.device("cuda", torch.cuda.current_device())
        self._rank = rank
        self._timeout = timeout
        with _environment(_HANDLING, "0"):
            # Any: torch's type stubs lack some of its methods.
            self._group: Any = dist.ProcessGroupNCCL(dist.PrefixStore("nccl", store), rank, size, options)
        self._pending: deque[tuple[float, torch.cuda.Event]] = deque()
        self._lost = False

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

    def is_overdue(self) -> bool:
        while self._pending and self._pending[0][1].query():
            self._pending.popleft()
        return bool(self._pending) and time.monotonic() - self._pending[0][0] > self._timeout

    def close(self) -> None:
        if not self._lost:
            self._lost = True
            self._group.abort()

    @contextmanager
    def _operation(self) -> Iterator[None]:
        if self._lost:
            raise LinkError(self._rank, "an operation on the device did not end in time")
        try:
            yield
        except RuntimeError as error:
            self.close()
            raise LinkError(self._rank, str(error)) from None
        done = torch.cuda.Event()
        done.record()
        self._pending.append((time.monotonic(), done))


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
