"""``redsync`` and ``redsync_trim``: thresholds between the mean and the largest magnitude."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from .. import native
from ._sparse import SMALLEST, ThresholdSparsifier, value_of
from ._state import TensorState

__all__ = ["RedSync", "RedSyncTrim", "between", "bisect", "trim"]

_BISECTIONS = (0.5, *(i / 8 for i in (1, 2, 3, 5, 6, 7)))  # all points that three bisections of [0, 1] can reach
_TRIMS = (0.8, 0.6, 0.4, 0.2, 0.0)


def between(mean: float, largest: float, share: float) -> float:
    """Return the magnitude at ``share`` of the way from the mean to the largest one."""
    return mean + share * (largest - mean)


def bisect(counts: Sequence[int], k: int) -> int:
    """Return the index in ``counts`` where bisection for a count between k and 2 k ends.

    ``counts`` belong to the shares 4/8, 1/8, ..., 7/8. There are at most three refinements, after which the interval is
    below 1/5.
    """
    low, high = 0.0, 1.0
    index = 0
    while high - low > 0.2:
        share = (low + high) / 2
        index = _BISECTIONS.index(share)
        if k < counts[index] < 2 * k:
            break
        low, high = (low, share) if counts[index] <= k else (share, high)
    return index


def trim(counts: Sequence[int], k: int) -> int:
    """Return the index of the first threshold, from the highest down, that ``k`` elements reach; else of the lowest."""
    return next((i for i, count in enumerate(counts) if count >= k), len(counts) - 1)


@dataclass(frozen=True)
class RedSync(ThresholdSparsifier, name="redsync"):
    """Threshold binary search: bisects between the mean and the largest magnitude until between k and 2 k elements are
    above, three times at most (Fang et al., "RedSync", JPDC 2019).

    Elements that are exactly 0 do not count. With long tails three bisections end far off (by a factor of 100 for
    Student-t values with 3 degrees of freedom); what decides then is the k-th magnitude.
    """

    _shares: ClassVar[Sequence[float]] = _BISECTIONS

    def _estimate(self, wanted: Tensor, k: int, state: TensorState, seed: int) -> list[float]:
        stats = native.magnitude_stats(wanted, 1)
        if stats.count <= k:
            return [SMALLEST]
        mean, largest = stats.total / stats.count, value_of(stats.largest)
        return [between(mean, largest, share) for share in self._shares]

    def _choose(self, counts: Sequence[int], k: int, state: TensorState) -> int:
        return bisect(counts, k) if len(counts) > 1 else 0


@dataclass(frozen=True)
class RedSyncTrim(RedSync, name="redsync_trim"):
    """Trimmed top-k: lowers the threshold from 4/5 of the way between mean and largest magnitude in steps of 1/5 until
    k elements are above, and of those takes the k largest (Fang et al., "RedSync", JPDC 2019).

    If all elements above the threshold fit into the message, all are sent.
    """

    _shares: ClassVar[Sequence[float]] = _TRIMS

    def _choose(self, counts: Sequence[int], k: int, state: TensorState) -> int:
        return trim(counts, k)
