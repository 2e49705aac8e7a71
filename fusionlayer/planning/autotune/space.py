"""The plans that autotuning chooses from; all are made from the plan that training began with."""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate, pairwise

from ... import codecs
from ...plan import Bucket, FusionPlan, TensorInfo
from ...scheduler.fusing import slot_alignment

__all__ = ["EVEN", "PLANNED", "SHAPES", "Point", "Space", "cut"]

PLANNED = "planned"
"""Stands for the shape of the plan that training began with."""

EVEN = "even"
SHAPES = (EVEN, "tapered", "tensors")
STEEPEST_TAPER = 8


@dataclass(frozen=True)
class Point:
    """A plan, given by the number and shape of its buckets.

    Attributes:
        shape: "even": equally many bytes in each bucket; "tapered": bytes double from both ends of backward towards the
            middle, up to eightfold; "tensors": equally many tensors, SAFusion's naive scheme (section 3.2); "planned":
            the plan that training began with.
        buckets: their number, without those of the user's groups.
    """

    shape: str
    buckets: int

    def __str__(self) -> str:
        return f"{self.buckets} buckets, {self.shape}"


class Space:
    """Makes plans from points: with the same tensors, codecs and collectives, and the user's groups kept whole.

    Args:
        plan: the plan that training began with; its tensors are in order of arrival.
        tensors: of the plan, in any order.

    Attributes:
        start: the point of ``plan``.
        most: largest number of buckets: one for each tensor.
    """

    def __init__(self, plan: FusionPlan, tensors: Iterable[TensorInfo]) -> None:
        by_name = {tensor.name: tensor for tensor in tensors}
        self._planned = plan
        self._position = {name: i for i, name in enumerate(name for bucket in plan.buckets for name in bucket.names)}
        self._free: dict[str, tuple[Bucket, list[TensorInfo]]] = {}
        groups: dict[tuple[str, int], tuple[Bucket, list[TensorInfo]]] = {}
        planned = 0
        for bucket in plan.buckets:
            key = json.dumps(
                [bucket.dtype, bucket.codec, dict(bucket.options), bucket.algorithm, bucket.ahead, bucket.shares],
                sort_keys=True,
            )
            members = [by_name[name] for name in bucket.names]
            for tensor in members:
                _, pool = (
                    self._free.setdefault(key, (bucket, []))
                    if tensor.group is None
                    else groups.setdefault((key, tensor.group), (bucket, []))
                )
                pool.append(tensor)
            planned += any(tensor.group is None for tensor in members)
        self._whole = list(groups.values())
        self.start = Point(PLANNED, planned)
        self.most = sum(len(pool) for _, pool in self._free.values())
        self.plan = cache(self._plan)

    def clamp(self, buckets: float) -> int:
        """Return the nearest possible number of buckets."""
        return min(max(round(buckets), len(self._free)), self.most)

    def neighbours(self, point: Point) -> list[Point]:
        """Return points with as many buckets in other shapes, and with half an octave more and fewer in this shape."""
        shape = EVEN if point.shape == PLANNED else point.shape
        others = [Point(other, point.buckets) for other in SHAPES if other != point.shape]
        return others + [Point(shape, self.clamp(point.buckets * factor)) for factor in (2**-0.5, 2**0.5)]

    def _plan(self, point: Point) -> FusionPlan:
        if point.shape == PLANNED:
            return self._planned
        total = sum(tensor.nbytes for _, pool in self._free.values() for tensor in pool)
        buckets: list[Bucket] = []
        for like, pool in self._free.values():
            share = sum(tensor.nbytes for tensor in pool) / total if total else 1 / len(self._free)
            count = min(max(round(point.buckets * share), 1), len(pool))
            buckets += self._fuse(like, cut(pool, point.shape, count))
        for like, group in self._whole:
            buckets += self._fuse(like, [group])
        buckets.sort(key=lambda bucket: self._position[bucket.names[-1]])
        return replace(self._planned, buckets=tuple(buckets))

    def _fuse(self, like: Bucket, runs: Sequence[Sequence[TensorInfo]]) -> tuple[Bucket, ...]:
        """Return a bucket for each run, with codec, collective and shares of the bucket ``like``."""
        align = slot_alignment(codecs.get(like.codec, **like.options), like.ahead)
        size = self._planned.world_size
        plan = FusionPlan.build(runs, size, like.codec, like.options, like.algorithm, align, like.ahead)
        return plan.shared(like.shares, like.algorithm).buckets


def cut(tensors: Sequence[TensorInfo], shape: str, buckets: int) -> list[list[TensorInfo]]:
    """Return ``tensors`` as so many consecutive runs, with sizes as near as possible to those of ``shape``."""
    weights = [1 if shape == "tensors" else max(tensor.nbytes, 1) for tensor in tensors]
    shares = [1.0] * buckets
    if shape == "tapered":
        shares = [float(min(2 ** min(i, buckets - 1 - i, 10), STEEPEST_TAPER)) for i in range(buckets)]
    before = list(accumulate(weights, initial=0))
    unit = before[-1] / sum(shares)
    ends = [0]
    for left, target in zip(range(buckets - 1, -1, -1), accumulate(shares), strict=True):
        end = bisect_left(before, target * unit)
        if end and target * unit - before[end - 1] < before[min(end, len(tensors))] - target * unit:
            end -= 1
        ends.append(min(max(end, ends[-1] + 1), len(tensors) - left))  # every run has a tensor
    ends[-1] = len(tensors)
    return [list(tensors[begin:end]) for begin, end in pairwise(ends)]
