"""``cupcake``: fusion with few compressions (Wang et al., MLSys 2023)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...base.errors import ConfigError
from ...base.plan import TensorInfo
from ._base import Planner, registry, split_at
from ._costs import Pipeline, StepCosts

_PARTITIONS = ("two", "optimal")


@dataclass(frozen=True)
class Cupcake(Planner, name="cupcake"):
    """Choose the partition with the shortest predicted step; the paper measures steps instead.

    Attributes:
        partition: "two": at most two buckets. A binary search finds the cut; it assumes that the step, as a function of
            the cut, has one minimum. "optimal": any number of buckets, by dynamic programming in O(n^2).
    """

    partition: str = "two"

    def __post_init__(self) -> None:
        if self.partition not in _PARTITIONS:
            raise ConfigError(f"cupcake planner: partition={self.partition!r}; expected one of: {_PARTITIONS}")

    @property
    def needs_costs(self) -> bool:
        """Yes."""
        return True

    def cut(self, tensors: Sequence[TensorInfo], costs: StepCosts | None) -> list[list[TensorInfo]]:
        """Return the runs of the best partition found."""
        pipeline = self.pipeline(tensors, costs)
        if not tensors:
            return []
        ends = _two_groups(pipeline) if self.partition == "two" else _optimal(pipeline)
        return split_at(tensors, ends)


def _two_groups(pipeline: Pipeline) -> list[int]:
    whole = len(pipeline)

    def ends(place: int) -> list[int]:
        return [place, whole] if place < whole else [whole]

    low, high = 1, whole
    while low < high:
        middle = (low + high) // 2
        if pipeline.score(ends(middle)) <= pipeline.score(ends(middle + 1)):
            high = middle
        else:
            low = middle + 1
    return min(ends(low), [whole], key=pipeline.score)


def _optimal(pipeline: Pipeline) -> list[int]:
    """Return the ends of the runs of the best partition."""
    # If communication of a prefix ends sooner, the rest never ends later: the best partition of each prefix suffices.
    if pipeline.disturbance:
        return _optimal_disturbed(pipeline)
    # For each prefix: when its communication ends, number of its buckets, where the last of them begins.
    best: list[tuple[float, int, int]] = [(0.0, 0, 0)]
    for j in range(1, len(pipeline) + 1):
        ready = pipeline.ready(j)
        best.append(min((max(best[i][0], ready) + pipeline.communicating(i, j), best[i][1] + 1, i) for i in range(j)))
    ends = [len(pipeline)]
    while best[ends[0]][2]:
        ends.insert(0, best[ends[0]][2])
    return ends


def _optimal_disturbed(pipeline: Pipeline) -> list[int]:
    """Return the ends of the runs of the best partition, where each bucket delays the computing after it."""
    # More buckets delay the rest more, so only partitions of a prefix into equally many buckets can be compared.
    whole = len(pipeline)
    # By number of buckets and by prefix: the end of its communication, and the beginning of its last bucket.
    rows: list[dict[int, tuple[float, int]]] = [{0: (0.0, 0)}]
    for count in range(1, whole + 1):
        delay = (count - 1) * pipeline.disturbance
        if len(rows) > 1 and pipeline.ready(whole) + delay >= min(row[whole][0] for row in rows[1:]):
            break
        before = rows[-1]
        rows.append(
            {
                j: min(
                    (max(end, pipeline.ready(j) + delay) + pipeline.communicating(i, j), i)
                    for i, (end, _) in before.items()
                    if i < j
                )
                for j in range(count, whole + 1)
            }
        )
    count = min(range(1, len(rows)), key=lambda count: rows[count][whole][0])
    ends = [whole]
    for row in reversed(rows[2 : count + 1]):
        ends.insert(0, row[ends[0]][1])
    return ends


registry.add_preset("cupcake_optimal", "cupcake", partition="optimal")
