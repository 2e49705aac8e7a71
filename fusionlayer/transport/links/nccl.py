"""A link between the ranks of an NCCL group. Every operation runs in the order of the device's current stream."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...process.bounded import Overdue, bounded
from .base import LinkMessage, RowLink
from .queueing import QueueingLink

# torch's own watchdog would end the process, and abort it where the device has failed. Both are switched off. In case
# it runs nevertheless, its time-out is longer than ours, so that ours comes first.
_WATCHDOG = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0"}
_WATCHDOG_FACTOR = 4
# Seconds that NCCL has, when the device has done its part, to send what is still in NCCL's buffers.
_FLUSH = 5.0
# NCCL has no numbers of 16 bits. Sums of wider ones have the same low bits.
_SUMMED_AS = {torch.int16: torch.int32}


class NcclLink(QueueingLink, RowLink):
    """One rank's end of an NCCL group that no other code uses, on one CUDA device.

    The constructor waits for the other ranks.
    """

    can_launch = True

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: float, device: torch.device) -> None:
        super().__init__(rank, timeout, device)
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=_WATCHDOG_FACTOR * timeout)
        # If both have work, messages go before the kernels of backward, because other ranks wait for them.
        options.is_high_priority_stream = True
        with _environment(_WATCHDOG), _without_desync_debug():
            # Any: torch's type stubs lack some of its methods.
            self._group: Any = dist.ProcessGroupNCCL(dist.PrefixStore("nccl", store), rank, size, options)
        # Here and not in the first call, in which a rank that has nothing to exchange would have no part.
        self._group.eager_connect_single_device(device)
        self._stop: Tensor | None = None

    def set_timeout(self, seconds: float) -> None:
        super().set_timeout(seconds)
        self._group._set_default_timeout(timedelta(seconds=_WATCHDOG_FACTOR * seconds))

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
            summed = x.to(_SUMMED_AS[x.dtype]) if x.dtype in _SUMMED_AS else x
            self._group.allreduce([summed]).wait()
            if summed is not x:
                x.copy_(summed)

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

    def _end(self) -> None:
        if self._stop is not None:
            self._stop.fill_(1)
        if self._is_drained:
            # NCCL's threads may still have to send what the device has handed over, and abort() would drop it.
            with suppress(Overdue, RuntimeError):
                bounded(self._group.shutdown, time.monotonic() + _FLUSH, name="end of NCCL")
                return
        self._group.abort()


def _word() -> Tensor:
    """Return (1,) int32, 0, in memory of the host that the device reads."""
    return torch.zeros(1, dtype=torch.int32, pin_memory=True, device="cpu")


@contextmanager
def _without_desync_debug() -> Iterator[None]:
    """Let torch's debug level be INFO at most while the body runs: DETAIL switches the watchdog on again."""
    level = dist.get_debug_level()
    if level == dist.DebugLevel.DETAIL:
        dist.set_debug_level(dist.DebugLevel.INFO)
    try:
        yield
    finally:
        dist.set_debug_level(level)


@contextmanager
def _environment(wanted: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables while the body runs, except those that the user has set."""
    missing = {name: value for name, value in wanted.items() if name not in os.environ}
    os.environ.update(missing)
    try:
        yield
    finally:
        for name in missing:
            del os.environ[name]
