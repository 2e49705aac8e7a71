"""The launch order of buckets when the next forward takes their results one by one."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import torch

from ..process.clock import HOST, Clock, Stamp
from ..transport import Transport

WARM_UP = 2
MEASURED = 3


def send_order(ready: Sequence[float], cost: Sequence[float]) -> list[int]:
    """Return bucket numbers in launch order.

    Buckets are numbered in the order in which backward completes them, so the next forward wants the last one first.
    Whenever the network is free, of the complete buckets the one that forward wants first is launched. This is priority
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
    """The order of an engine's buckets: first that of completion, after some measured steps that of ``send_order``.

    It needs no lock. Hooks call ``note_complete`` with the engine's lock held. Lanes call ``note_sent``, each for other
    buckets, and so for other lists. ``agree`` runs on a lane while the training thread waits for it. By then the jobs
    of all buckets of measured steps have ended, and their locks order the lanes' writes before the reads of ``agree``.

    Attributes:
        sequence: bucket numbers in launch order; the same on all ranks.
    """

    def __init__(self, buckets: int, lanes: int, clock: Clock = HOST) -> None:
        self.sequence: Sequence[int] = list(range(buckets))
        self._lanes = lanes
        self._clock = clock
        self._steps = 0
        self._first: Stamp | None = None
        self._complete: list[list[tuple[Stamp, Stamp]]] = [[] for _ in range(buckets)]
        self._busy: list[list[tuple[Stamp, Stamp]]] = [[] for _ in range(buckets)]

    @property
    def measures(self) -> bool:
        """Whether the times of the present step count."""
        return WARM_UP <= self._steps < WARM_UP + MEASURED

    @property
    def due(self) -> bool:
        """Whether enough has been measured; true once."""
        return self._steps == WARM_UP + MEASURED

    def end_step(self) -> None:
        """Count a step."""
        self._steps += 1
        self._first = None

    def note_complete(self, index: int) -> None:
        """Record that a bucket has all its gradients."""
        if self.measures:
            now = self._clock.stamp()
            self._first = now if self._first is None else self._first
            self._complete[index].append((self._first, now))

    def note_sent(self, index: int, start: Stamp, end: Stamp) -> None:
        """Record from when to when a bucket was in flight; called by the lanes."""
        if self.measures:
            self._busy[index].append((start, end))

    def agree(self, transport: Transport) -> None:
        """Order by the mean of all ranks' measurements. All ranks call it together."""
        # Once for each plan, and not in backward: so a device may be waited for, and no time is missing.
        self._clock.finish()
        # Ranks measure different seconds but must send in one order: lanes would otherwise exchange different buckets.
        every = torch.tensor(
            [self._medians(self._complete), self._medians(self._busy)], dtype=torch.float64, device="cpu"
        )
        every[1] /= self._lanes
        transport.all_reduce(every)
        ready, cost = (every / transport.size).tolist()
        self.sequence = send_order(ready, cost)

    def _medians(self, rows: Sequence[Sequence[tuple[Stamp, Stamp]]]) -> list[float]:
        spans = [[self._clock.seconds(start, end) or 0.0 for start, end in row] for row in rows]
        return [statistics.median(span or [0.0]) for span in spans]
