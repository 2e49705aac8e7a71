"""Another codec for buckets whose own loses too much, on all ranks from the same step on."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

import torch

from .. import collectives
from ..base.plan import Bucket, FusionPlan
from ..codecs import Codec
from ..scheduler import PlanController
from ..scheduler.compression_error import EVERY, FIRST, LIMIT, ErrorProbe
from ..scheduler.plan_controller import StepSeconds
from ..transport import Transport

_logger = logging.getLogger("fusionlayer")


class CodecFallback(PlanController):
    """Gives a bucket another codec for good, once any rank has measured an error above the limit."""

    def __init__(self, codec: Codec, nodes: Sequence[int]) -> None:
        self._codec = codec
        self._algorithm = collectives.choose(codec, nodes)
        self._plan: FusionPlan | None = None
        self._probes: Sequence[ErrorProbe | None] = ()

    def __str__(self) -> str:
        return f"fallback to {self._codec}"

    def note_step(self, plan: FusionPlan | None, step: int, seconds: StepSeconds | None) -> None:
        """Do nothing: seconds do not count here."""

    def due(self, step: int) -> bool:
        """Return whether errors are measured in this step."""
        return step % EVERY == FIRST

    def note_errors(self, plan: FusionPlan, probes: Sequence[ErrorProbe | None]) -> None:
        """Keep them for ``next_plan``."""
        self._plan, self._probes = plan, probes

    def next_plan(self, transport: Transport) -> FusionPlan | None:
        """Return the plan in which the buckets that lose too much on any rank have the other codec; None: none does."""
        plan, probes = self._plan, self._probes
        if plan is None or not probes:
            return None
        worst = torch.tensor([_excess(probe) for probe in probes], device="cpu")
        transport.all_reduce_max(worst)
        fallen = {
            index
            for index, error in enumerate(worst.tolist())
            if error > LIMIT and plan.buckets[index].codec != self._codec.name
        }
        if not fallen:
            return None
        if transport.rank == 0:
            for index in sorted(fallen):
                _logger.warning(
                    "bucket %d (%s and others) uses %s instead of %s from the next step on: a rank loses %.2f of it",
                    *(index, plan.buckets[index].names[0], self._codec, plan.buckets[index].codec, worst[index]),
                )
        return replace(
            plan,
            buckets=tuple(self._other(each) if index in fallen else each for index, each in enumerate(plan.buckets)),
        )

    def _other(self, bucket: Bucket) -> Bucket:
        codec = self._codec
        return replace(bucket, codec=codec.name, options=codec.options, algorithm=self._algorithm, shares=())


def _excess(probe: ErrorProbe | None) -> float:
    """Return the error of a bucket whose codec has a limit, and 0 of others."""
    has_limit = probe is not None and not probe.is_made_to_lose
    error = probe.report() if probe is not None and has_limit else None
    return error or 0.0
