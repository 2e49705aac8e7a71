"""``gaussiank``: a threshold from the spread of the values, as if they were normal."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from .. import native
from ._sparse import ThresholdSparsifier
from ._state import TensorState

__all__ = ["GaussianK"]


@dataclass(frozen=True)
class GaussianK(ThresholdSparsifier, name="gaussiank"):
    """The elements beyond the quantile of a normal distribution (Shi et al., 2019, "Understanding Top-k
    Sparsification in Distributed Deep Learning").

    The mean is assumed to be 0, and elements that are exactly 0 do not count. As published, a threshold that sends less
    than 2/3 of k is halved, and one that sends more than 4/3 is raised by half. Here this happens at most twice, not
    three times; then the ladder decides.
    """

    def _chooser(self, wanted: Tensor, k: int, state: TensorState, seed: int) -> tuple[native.Chooser, None]:
        return self._how(native.NORMAL, wanted, k), None
