"""The plans that autotuning chooses from: all made from the plan that training began with."""

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
"""The shape of the plan that training began with, whatever it is."""

EVEN = "even"
SHAPES = (EVEN, "tapered", "tensors")
STEEPEST_TAPER = 8


@dataclass(frozen=True)
class Point:
    """A plan, by what makes it.

    Attributes:
        shape: "even": buckets of equally many bytes; "tapered": of bytes that double from both ends of backward towards
            the middle, up to eightfold; "tensors": of equally many tensors, SAFusion's naive scheme (section 3.2);
            "planned": the plan that training began with.
        buckets: how many, those of the user's groups left out.
    """

    shape: str
    buckets: int

    def __str__(self) -> str:
        return f"{self.buckets} buckets, {self.shape}"


class Space:
    """Pure functions from points to plans of the same tensors, codecs and collectives; the user's groups stay whole.

    Args:
        plan: what training began with; its tensors stand in order of arrival.
        tensors: of the plan, in any order.

    Attributes:
        start: the point of ``plan``.
        most: buckets with one tensor each.
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
                [bucket.dtype, bucket.codec, dict(bucket.options), bucket.algorithm, bucket.ahead], sort_keys=True
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
        """Return the nearest number of buckets that there can be."""
        return min(max(round(buckets), len(self._free)), self.most)

    def neighbours(self, point: Point) -> list[Point]:
        """Return the same number of buckets in the other shapes, and half an octave more and fewer in the same."""
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
        """Return a bucket for each run that travels like another one."""
        align = slot_alignment(codecs.get(like.codec, **like.options), like.ahead)
        size = self._planned.world_size
        return FusionPlan.build(runs, size, like.codec, like.options, like.algorithm, align, like.ahead).buckets


def cut(tensors: Sequence[TensorInfo], shape: str, buckets: int) -> list[list[TensorInfo]]:
    """Return ``tensors`` as so many consecutive runs, whose weights are as near to those of ``shape`` as can be."""
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
