"""``single``: one bucket for all gradients of a backward pass, as in Ok-Topk (PPoPP 2022) and SyncEA."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...base.plan import TensorInfo
from ._base import Planner
from ._costs import StepCosts


@dataclass(frozen=True)
class Single(Planner, name="single"):
    """Fuse all tensors: one startup, and no overlap with backward."""

    def cut(self, tensors: Sequence[TensorInfo], costs: StepCosts | None) -> list[list[TensorInfo]]:
        """Return all tensors in one run."""
        return [list(tensors)] if tensors else []
