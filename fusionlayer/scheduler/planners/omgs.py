"""``omgs``: optimal merged-gradient sparsification (Shi et al., INFOCOM 2020)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...base.plan import TensorInfo
from ._base import Planner, split_at
from ._costs import StepCosts


@dataclass(frozen=True)
class OMGS(Planner, name="omgs"):
    """Merge a tensor into the previous bucket if that saves more communication than it adds waiting.

    The waiting is backward of the tensor, plus the extra time of encoding both at once, less the time that the bucket
    would have spent in the queue anyway. The saving is the communication of both apart less that of both at once. The
    paper sparsifies merged tensors. If tensors are encoded ahead, merging does not change the time of encoding.
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
            ready = pipeline.ready(end)
            start = max(free, ready)
            now, more = pipeline.elements(begin, end), tensors[end].numel
            encoding = 0.0 if costs.ahead else costs.encode(now + more) - costs.encode(now) - costs.encode(more)
            waited = pipeline.computing(end, end + 1) + encoding - (start - ready)
            saved = costs.communicate(now) + costs.communicate(more) - costs.communicate(now + more)
            if waited >= saved:
                ends.append(end)
                free = start + pipeline.communicating(begin, end)
                begin = end
        return split_at(tensors, [*ends, len(tensors)] if tensors else [])
