"""``gaussiank``: a threshold from the spread of the values, as if they were normal."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ...base.libraries import Chooser
from ...native import selection
from ..state import TensorState
from .sparsifier import ThresholdSparsifier, check_guarded


@dataclass(frozen=True)
class GaussianK(ThresholdSparsifier, name="gaussiank"):
    """The elements beyond the quantile of a normal distribution (Shi et al., 2019, "Understanding Top-k
    Sparsification in Distributed Deep Learning").

    The mean is assumed to be 0, and elements that are exactly 0 do not count. A threshold that sends less than 2/3 of k
    is halved, and one that sends more than 4/3 is raised by half, three times at most. The elements above the last
    threshold are sent, if the message has space for them; otherwise the k largest.

    Attributes:
        slack: as for all thresholds, but with more room, because the rule may end far from k: with 1.67 k on Laplace
            values.
        guarded: refine twice, and let the ladder and then the k-th magnitude replace a threshold that sends less than
            0.8 k. It sends nearly as many elements as top-k, so a slack of 1.1 is enough.
    """

    slack: float = 2.0
    guarded: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_guarded(self.name, self.guarded)

    def _chooser(self, wanted: Tensor, k: int, state: TensorState, seed: int) -> tuple[Chooser, None]:
        return self._how(selection.NORMAL, wanted, k, published=not self.guarded), None
