"""``gaussiank``: a threshold from the spread of the values, as if they were normal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

from torch import Tensor

from .. import native
from ._sparse import SMALLEST, ThresholdSparsifier
from ._state import TensorState

__all__ = ["GaussianK", "gaussian_threshold"]

_REFINEMENTS = 2
_LOWER, _RAISE = 0.5, 1.5
# All factors that two refinements of an estimate can reach; 1, the estimate itself, comes first.
_FACTORS = [_LOWER**down * _RAISE**up for down in range(_REFINEMENTS + 1) for up in range(_REFINEMENTS + 1 - down)]


def gaussian_threshold(rms: float, ratio: float) -> float:
    """Return the magnitude that a share ``ratio`` of normal values of mean 0 exceeds."""
    return rms * NormalDist().inv_cdf(1 - ratio / 2)


@dataclass(frozen=True)
class GaussianK(ThresholdSparsifier, name="gaussiank"):
    """The elements beyond the quantile of a normal distribution (Shi et al., 2019, "Understanding Top-k
    Sparsification in Distributed Deep Learning").

    The mean is assumed to be 0, and elements that are exactly 0 do not count. As published, a threshold that sends less
    than 2/3 of k is halved, and one that sends more than 4/3 is raised by half. Here this happens at most twice, not
    three times; then the ladder decides.
    """

    def _estimate(self, wanted: Tensor, k: int, state: TensorState, seed: int) -> list[float]:
        stats = native.magnitude_stats(wanted, 1)
        if stats.count <= k:
            return [SMALLEST]
        estimate = gaussian_threshold((stats.squares / stats.count) ** 0.5, k / stats.count)
        return [estimate * factor for factor in _FACTORS]

    def _choose(self, counts: Sequence[int], k: int, state: TensorState) -> int:
        factor = 1.0
        for _ in range(_REFINEMENTS if len(counts) > 1 else 0):
            count = counts[_FACTORS.index(factor)]
            if 2 * k / 3 <= count <= 4 * k / 3:
                break
            factor *= _LOWER if count < k else _RAISE
        return _FACTORS.index(factor)
