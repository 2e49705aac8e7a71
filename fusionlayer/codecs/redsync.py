"""``redsync`` and ``redsync_trim``: thresholds between the mean and the largest magnitude."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from .. import native
from ._sparse import ThresholdSparsifier
from ._state import TensorState

__all__ = ["RedSync", "RedSyncTrim"]


@dataclass(frozen=True)
class RedSync(ThresholdSparsifier, name="redsync"):
    """Threshold binary search: bisects between the mean and the largest magnitude until between k and 2 k elements are
    above, three times at most (Fang et al., "RedSync", JPDC 2019).

    Elements that are exactly 0 do not count. With long tails three bisections end far off (by a factor of 100 for
    Student-t values with 3 degrees of freedom); what decides then is the k-th magnitude.
    """

    _estimator: ClassVar[int] = native.BISECTED

    def _chooser(self, wanted: Tensor, k: int, state: TensorState, seed: int) -> tuple[native.Chooser, None]:
        return self._how(self._estimator, wanted, k), None


@dataclass(frozen=True)
class RedSyncTrim(RedSync, name="redsync_trim"):
    """Trimmed top-k: lowers the threshold from 4/5 of the way between mean and largest magnitude in steps of 1/5 until
    k elements are above, and of those takes the k largest (Fang et al., "RedSync", JPDC 2019).

    If all elements above the threshold fit into the message, all are sent.
    """

    _estimator: ClassVar[int] = native.TRIMMED
