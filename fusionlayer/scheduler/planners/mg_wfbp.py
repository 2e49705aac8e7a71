"""``mg_wfbp``: merged-gradient wait-free back-propagation (Shi et al., INFOCOM 2019)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...base.plan import TensorInfo
from ._base import Planner, split_at
from ._costs import StepCosts


@dataclass(frozen=True)
class MGWFBP(Planner, name="mg_wfbp"):
    """Merge a tensor into the bucket before it if waiting for the tensor costs less than a startup.

    The tensor must arrive before the bucket would have been sent. In addition, the bucket must still be in the queue
    then, or wait for less than a startup. After a merge the bucket's times are computed again.
    """

    @property
    def needs_costs(self) -> bool:
        """Yes."""
        return True

    def cut(self, tensors: Sequence[TensorInfo], costs: StepCosts | None) -> list[list[TensorInfo]]:
        """Return the runs that remain after each tensor in turn was merged or not."""
        pipeline = self.pipeline(tensors, costs)
        assert costs is not None
        ends: list[int] = []
        begin, free = 0, 0.0
        for end in range(1, len(tensors)):
            start = max(free, pipeline.ready(end))
            sent = start + pipeline.communicating(begin, end)
            arrives = pipeline.ready(end + 1)
            if not (arrives < sent and (arrives < start or arrives - start < costs.startup)):
                ends.append(end)
                begin, free = end, sent
        return split_at(tensors, [*ends, len(tensors)] if tensors else [])
