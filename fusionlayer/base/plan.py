"""Fusion plans: which tensors are sent together, in which order, and how. Plans are frozen data without torch types."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from . import records
from .errors import ConfigError

__all__ = ["Bucket", "FusionPlan", "Slot", "TensorInfo", "plain_name"]

PLAN_VERSION = 1


def plain_name(name: str) -> str:
    """Return a parameter's name without the prefixes of modules compiled by ``torch.compile``."""
    return ".".join(part for part in name.split(".") if part != "_orig_mod")


@dataclass(frozen=True)
class TensorInfo:
    """A gradient, as planners see it.

    Attributes:
        name: name of the parameter.
        numel: number of elements.
        dtype: name of the element type, such as "float32".
        itemsize: bytes of an element.
        group: tensors with the same number are sent in one bucket; None leaves it to the planner.
        shape: shape of the gradient; None if it is not known, and the gradient then counts as flat.
    """

    name: str
    numel: int
    dtype: str
    itemsize: int
    group: int | None = None
    shape: tuple[int, ...] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the gradient."""
        return self.numel * self.itemsize


@dataclass(frozen=True)
class Slot:
    """The place of one gradient in its bucket: ``numel`` elements from element ``offset`` on."""

    name: str
    numel: int
    offset: int


@dataclass(frozen=True)
class Bucket:
    """Gradients that are sent together, in one collective.

    Attributes:
        slots: places of the gradients, in order, without overlap.
        numel: elements of the flat buffer, gaps for alignment included.
        dtype: element type of all gradients.
        codec: registered name of the codec.
        options: options of the codec.
        algorithm: registered name of the collective.
        ahead: True encodes each gradient by itself as it arrives, ahead of fusion; False encodes the flat buffer.
        every: steps of a period; the bucket leaves in one step of each period, so with 1 in every step.
        phase: number of that step within the period, from 0 on.
        shares: of the sum, how much each rank computes: a whole number for each rank, in any unit. Empty: equally much.
    """

    slots: tuple[Slot, ...]
    numel: int
    dtype: str
    codec: str
    options: Mapping[str, Any] = field(default_factory=dict)
    algorithm: str = "dense"
    ahead: bool = False
    every: int = 1
    phase: int = 0
    shares: tuple[int, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the gradients, in order."""
        return tuple(slot.name for slot in self.slots)

    @property
    def nbytes(self) -> int:
        """Bytes of the flat buffer."""
        bits = re.findall(r"\d+", self.dtype)
        return self.numel * (int(bits[0]) // 8 if bits else 1)

    def leaves_in(self, step: int) -> bool:
        """Return whether the bucket leaves in this step."""
        return step % self.every == self.phase


@dataclass(frozen=True)
class FusionPlan:
    """Every bucket of a step, in the order in which all ranks send them.

    Attributes:
        buckets: in that order.
        world_size: number of ranks.
        reason: why buckets have their sizes, in words, where that followed the job; ranks do not compare it.
    """

    buckets: tuple[Bucket, ...]
    world_size: int
    reason: str = field(default="", compare=False)

    @classmethod
    def build(
        cls,
        runs: Iterable[Sequence[TensorInfo]],
        world_size: int,
        codec: str,
        options: Mapping[str, Any],
        algorithm: str,
        align: int,
        ahead: bool = False,
    ) -> FusionPlan:
        """Return the plan that sends each run of tensors in one bucket.

        Slots begin at multiples of ``align`` elements. If ``align`` is the codec's block, tensors share no metadata.
        """
        buckets = []
        for run in runs:
            slots, offset = [], 0
            for tensor in run:
                slots.append(Slot(tensor.name, tensor.numel, offset))
                offset += -(-tensor.numel // align) * align
            buckets.append(Bucket(tuple(slots), offset, run[0].dtype, codec, dict(options), algorithm, ahead))
        return cls(tuple(buckets), world_size)

    def check(self, tensors: Iterable[TensorInfo], world_size: int) -> None:
        """Raise ``ConfigError`` unless this plan is for exactly these tensors and this number of ranks."""
        if world_size != self.world_size:
            raise ConfigError(f"plan is for {self.world_size} ranks, this job has {world_size}; make a plan for it")
        expected = {tensor.name: (tensor.numel, tensor.dtype) for tensor in tensors}
        planned = {slot.name: (slot.numel, bucket.dtype) for bucket in self.buckets for slot in bucket.slots}
        count = sum(len(bucket.slots) for bucket in self.buckets)
        if count != len(planned):
            raise ConfigError("plan names a tensor more than once; every tensor belongs to one bucket")
        differ = sorted(name for name in expected.keys() | planned.keys() if expected.get(name) != planned.get(name))
        if differ:
            name = differ[0]
            raise ConfigError(
                f"plan does not fit the model: {len(differ)} tensors differ, the first is {name!r}: plan has "
                f"{planned.get(name, 'none')}, model has {expected.get(name, 'none')}; make a plan for this model"
            )
        for index, bucket in enumerate(self.buckets):
            end = 0
            for slot in bucket.slots:
                if slot.offset < end:
                    raise ConfigError(f"plan: slot {slot.name!r} of bucket {index} overlaps the one before it")
                end = slot.offset + slot.numel
            if end > bucket.numel:
                raise ConfigError(f"plan: bucket {index} has {bucket.numel} elements, its slots need {end}")
            if not 0 <= bucket.phase < bucket.every:
                raise ConfigError(
                    f"plan: bucket {index} has every={bucket.every} and phase={bucket.phase}; expected every of at "
                    "least 1, and a phase from 0 to every - 1"
                )
            if bucket.shares and (len(bucket.shares) != world_size or min(bucket.shares) < 0 or not any(bucket.shares)):
                raise ConfigError(
                    f"plan: bucket {index} has shares={list(bucket.shares)}; expected {world_size} whole numbers, one "
                    "for each rank, of which none is below 0 and not all are 0"
                )

    @property
    def skips(self) -> bool:
        """Whether there is a bucket that does not leave in every step."""
        return any(bucket.every > 1 for bucket in self.buckets)

    def due(self, step: int) -> tuple[int, ...]:
        """Return the numbers of the buckets that leave in this step, in order."""
        return tuple(index for index, bucket in enumerate(self.buckets) if bucket.leaves_in(step))

    def staggered(self, every: int, fragments: int = 1) -> FusionPlan:
        """Return this plan with buckets that leave once in ``every`` steps, one fragment after the other.

        A fragment is a run of buckets. Their bytes are about equal, and their steps are spread evenly over the period:
        the last fragment leaves in its last step. This is the schedule of Streaming DiLoCo (section 2.2).

        Raises:
            ConfigError: there are fewer steps or buckets than fragments.
        """
        for name, value in (("every", every), ("fragments", fragments)):
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(f"{name}={value!r}; expected a whole number, at least 1")
        for count, what in ((every, "steps of a period"), (len(self.buckets), "buckets of the plan")):
            if fragments > max(1, count):
                raise ConfigError(
                    f"fragments={fragments} is more than the {count} {what}; give at most {count} fragments"
                )
        runs = _even_runs([bucket.nbytes for bucket in self.buckets], fragments)
        phases = [(number + 1) * every // fragments - 1 for number, run in enumerate(runs) for _ in run]
        buckets = [replace(b, every=every, phase=phase) for b, phase in zip(self.buckets, phases, strict=True)]
        return replace(self, buckets=tuple(buckets))

    def shared(self, shares: tuple[int, ...], algorithm: str) -> FusionPlan:
        """Return this plan with ``shares`` in the buckets of the collective ``algorithm`` that have none."""
        buckets = (
            replace(bucket, shares=shares) if bucket.algorithm == algorithm and not bucket.shares else bucket
            for bucket in self.buckets
        )
        return replace(self, buckets=tuple(buckets)) if shares else self

    def without(self, names: Collection[str]) -> FusionPlan:
        """Return this plan without the named tensors: the slots after them move up, and empty buckets are dropped."""
        buckets = []
        for bucket in self.buckets:
            starts = [slot.offset for slot in bucket.slots]
            slots, end = [], 0
            for slot, start, following in zip(bucket.slots, starts, [*starts[1:], bucket.numel], strict=True):
                if slot.name not in names:
                    slots.append(replace(slot, offset=end))
                    end += following - start
            if slots:
                buckets.append(replace(bucket, slots=tuple(slots), numel=end))
        return replace(self, buckets=tuple(buckets))

    def digest(self) -> bytes:
        """Return 32 bytes that are equal on two ranks only if their plans are."""
        return hashlib.sha256(json.dumps(self._as_dict(), sort_keys=True).encode()).digest()

    def to_bytes(self) -> bytes:
        """Return the plan as bytes, for another rank."""
        return json.dumps(self._as_dict() | self._with_reason()).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> FusionPlan:
        """Return the plan that ``to_bytes`` wrote as ``data``."""
        return records.build(_PlanFile, json.loads(data), "plan").plan

    def to_yaml(self, path: str | Path) -> None:
        """Write the plan to a file."""
        Path(path).write_text(yaml.safe_dump(self._with_reason() | self._as_dict(), sort_keys=False))

    @classmethod
    def from_yaml(cls, path: str | Path) -> FusionPlan:
        """Return the plan in a file; raise ``ConfigError`` if the file does not hold one."""
        return records.load(_PlanFile, path, "plan file", PLAN_VERSION).plan

    def _with_reason(self) -> dict[str, Any]:
        return {"reason": self.reason} if self.reason else {}

    def _as_dict(self) -> dict[str, Any]:
        buckets = [
            {**asdict(bucket), "options": dict(bucket.options), "slots": [asdict(slot) for slot in bucket.slots]}
            for bucket in self.buckets
        ]
        for bucket in buckets:
            # Empty keys are left out, so that the plans of versions without them keep their digests.
            if bucket["every"] == 1:
                del bucket["every"], bucket["phase"]
            if bucket["shares"]:
                bucket["shares"] = list(bucket["shares"])
            else:
                del bucket["shares"]
        return {"version": PLAN_VERSION, "world_size": self.world_size, "buckets": buckets}


def _even_runs(sizes: Sequence[int], count: int) -> list[list[int]]:
    """Return ``count`` runs of consecutive ``sizes``, none of them empty, with the least possible largest sum."""
    low, high = max(sizes, default=0), sum(sizes)
    while low < high:
        middle = (low + high) // 2
        if len(_runs_within(sizes, middle, 1)) <= count:
            high = middle
        else:
            low = middle + 1
    return _runs_within(sizes, low, count)


def _runs_within(sizes: Sequence[int], most: int, least_runs: int) -> list[list[int]]:
    """Return as few runs of consecutive ``sizes`` as can be, but ``least_runs``, whose sums are ``most`` at most."""
    runs: list[list[int]] = []
    total = 0
    for place, size in enumerate(sizes):
        needed = least_runs - len(runs) == len(sizes) - place  # from here on each size is a run
        if not runs or needed or total + size > most:
            runs.append([])
            total = 0
        runs[-1].append(size)
        total += size
    return runs


@dataclass(frozen=True)
class _PlanFile:
    version: int
    world_size: int
    buckets: tuple[Bucket, ...]
    reason: str = ""

    def __post_init__(self) -> None:
        if self.world_size < 1:
            raise ConfigError(f"world_size={self.world_size}; expected at least 1")

    @property
    def plan(self) -> FusionPlan:
        return FusionPlan(self.buckets, self.world_size, self.reason)
