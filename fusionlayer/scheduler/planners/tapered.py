"""``tapered``: small buckets at both ends of a step, large ones in between."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...base.errors import ConfigError
from ...base.plan import TensorInfo
from ._base import Planner
from ._costs import StepCosts


@dataclass(frozen=True)
class Tapered(Planner, name="tapered"):
    """Fuse consecutive tensors into buckets whose size doubles from both ends towards the middle.

    Nothing hides the time that fills the first bucket, nor the transfer of the last one after backward. Both grow with
    the bucket, so these buckets are small. Between them, larger buckets pay fewer fixed costs.

    Attributes:
        threshold: largest number of bytes in a bucket; a larger tensor is sent alone. None: as ``sized`` was given, or
            8 MiB.
        edge: largest number of bytes in the first and in the last bucket. None: as ``sized`` was given, or 1 MiB.
    """

    threshold: int | None = None
    edge: int | None = None

    def __post_init__(self) -> None:
        for name in ("threshold", "edge"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 1):
                raise ConfigError(f"tapered planner: {name}={value!r}; expected bytes, a whole number above 0")

    def sized(self, edge: int, threshold: int) -> Tapered:
        """Return the planner with these bytes where an option is None."""
        return Tapered(self.threshold or threshold, self.edge or edge)

    def cut(self, tensors: Sequence[TensorInfo], costs: StepCosts | None) -> list[list[TensorInfo]]:
        """Return runs whose size is limited by the bytes before them and by the bytes after them."""
        threshold, edge = self.threshold or 8 << 20, self.edge or 1 << 20
        after = sum(tensor.nbytes for tensor in tensors)
        before = 0
        runs: list[list[TensorInfo]] = []
        room = 0
        for tensor in tensors:
            if not runs or tensor.nbytes > room:
                runs.append([])
                # Runs have edge, 2 edge, 4 edge, ... bytes: each may have as many as all earlier ones and one edge
                # more.
                room = min(threshold, before + edge, max(edge, (after + edge) // 2))
            runs[-1].append(tensor)
            room -= tensor.nbytes
            before += tensor.nbytes
            after -= tensor.nbytes
        return runs
