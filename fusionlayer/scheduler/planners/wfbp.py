"""``wfbp``: wait-free back-propagation (Poseidon, ATC 2017); every tensor is sent by itself as soon as it arrives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...base.plan import TensorInfo
from ._base import Planner
from ._costs import StepCosts


@dataclass(frozen=True)
class WFBP(Planner, name="wfbp"):
    """Do not fuse: the most overlap, and one message's latency for each tensor."""

    def cut(self, tensors: Sequence[TensorInfo], costs: StepCosts | None) -> list[list[TensorInfo]]:
        """Return a run for each tensor."""
        return [[tensor] for tensor in tensors]
