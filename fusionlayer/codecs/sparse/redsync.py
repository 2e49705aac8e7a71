"""``redsync`` and ``redsync_trim``: thresholds between the mean and the largest magnitude."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from ...base.libraries import Chooser
from ...native import selection
from ..state import TensorState
from .sparsifier import ThresholdSparsifier, check_guarded


@dataclass(frozen=True)
class RedSync(ThresholdSparsifier, name="redsync"):
    """Threshold binary search: bisects between the mean and the largest magnitude until between k and 2 k elements are
    above, three times at most (Fang et al., "RedSync", JPDC 2019).

    Elements that are exactly 0 do not count. With long tails three bisections end far off, by a factor of 100 for
    Student-t values with 3 degrees of freedom. What the last threshold sends goes, unless the message has no room for
    it: then the k largest go.

    Attributes:
        slack: as for all thresholds, but with room for the 2 k that the rule allows.
        guarded: let the ladder and then the k-th magnitude replace a threshold that sends less than 0.8 k. It sends
            nearly as many elements as top-k, so a slack of 1.1 is enough.
    """

    _estimator: ClassVar[int] = selection.BISECTED

    slack: float = 2.2
    guarded: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_guarded(self.name, self.guarded)

    def _chooser(self, wanted: Tensor, k: int, state: TensorState, seed: int) -> tuple[Chooser, None]:
        return self._how(self._estimator, wanted, k, published=not self.guarded), None


@dataclass(frozen=True)
class RedSyncTrim(RedSync, name="redsync_trim"):
    """Trimmed top-k: lowers the threshold from 4/5 of the way between mean and largest magnitude in steps of 1/5 until
    k elements are above, and of those takes the k largest (Fang et al., "RedSync", JPDC 2019).

    So exactly k go: trimming only makes the selection of the k largest faster.

    Attributes:
        slack: as for all thresholds; without ``guarded`` and ``reuse`` no message needs it.
        guarded: send all elements above the threshold if the message has room for them.
    """

    _estimator: ClassVar[int] = selection.TRIMMED

    slack: float = 1.0
