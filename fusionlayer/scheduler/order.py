"""The order in which buckets leave when the next forward takes their results one by one."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

import torch

from ..transport import Transport

__all__ = ["SendOrder", "send_order"]

WARM_UP = 2
MEASURED = 3


def send_order(ready: Sequence[float], cost: Sequence[float]) -> list[int]:
    """Return bucket numbers in the order in which they should leave.

    Buckets are numbered in the order in which backward completes them, so the next forward wants the last one first.
    Whenever the network is free, of the complete buckets the one that forward wants first leaves. This is priority
    scheduling as in P3 (MLSys 2019) and ByteScheduler (SOSP 2019), but without preemption.

    Args:
        ready: when each bucket is complete, seconds from any common origin.
        cost: seconds for which each bucket occupies the network.
    """
    left = set(range(len(ready)))
    now = 0.0
    order = []
    while left:
        complete = [index for index in left if ready[index] <= now]
        chosen = max(complete) if complete else min(left, key=lambda index: (ready[index], index))
        now = max(now, ready[chosen]) + cost[chosen]
        order.append(chosen)
        left.remove(chosen)
    return order


class SendOrder:
    """The order of an engine's buckets: that of completion first, after some measured steps that of ``send_order``.

    It needs no lock. Hooks call ``note_complete`` with the engine's lock held. Lanes call ``note_sent``, each for other
    buckets. ``agree`` runs on a lane while the training thread waits for it; by then no bucket of a measured step is
    under way.

    Args:
        buckets: number of buckets.
        lanes: number of buckets that are under way at once.

    Attributes:
        sequence: bucket numbers in the order in which they leave; the same on all ranks.
    """

    def __init__(self, buckets: int, lanes: int) -> None:
        self.sequence = list(range(buckets))
        self._lanes = lanes
        self._steps = 0
        self._first = 0.0
        self._complete: list[list[float]] = [[] for _ in range(buckets)]
        self._busy: list[list[float]] = [[] for _ in range(buckets)]

    @property
    def due(self) -> bool:
        """Whether enough has been measured; true once."""
        return self._steps == WARM_UP + MEASURED

    def end_step(self) -> None:
        """Count a step."""
        self._steps += 1
        self._first = 0.0

    def note_complete(self, index: int) -> None:
        """Record that a bucket has all its gradients."""
        now = time.perf_counter()
        self._first = self._first or now
        if WARM_UP <= self._steps < WARM_UP + MEASURED:
            self._complete[index].append(now - self._first)

    def note_sent(self, index: int, seconds: float) -> None:
        """Record for how many seconds a bucket was under way; called by the lanes."""
        if WARM_UP <= self._steps < WARM_UP + MEASURED:
            self._busy[index].append(seconds / self._lanes)

    def agree(self, transport: Transport) -> None:
        """Order by the mean of all ranks' measurements. All ranks call it together."""
        # Ranks measure different seconds but must send in one order: lanes would otherwise exchange different buckets.
        mine = [[statistics.median(samples or [0.0]) for samples in rows] for rows in (self._complete, self._busy)]
        every = torch.tensor(mine, dtype=torch.float64)
        transport.all_reduce(every)
        ready, cost = (every / transport.size).tolist()
        self.sequence = send_order(ready, cost)
