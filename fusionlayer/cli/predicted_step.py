"""The predicted step of a plan as a trace, which Perfetto shows: backward, encoding, communication and waiting."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ..base.plan import FusionPlan
from ..planning.bucket_costs import BucketCosts
from ..planning.prediction import backward_seconds
from ..planning.profile import Profile
from ..planning.simulation import SimulatedStep

_BACKWARD, _ENCODING, _NETWORK = range(3)  # rows
Bar = tuple[int, str, float, float]
"""Row, name, start and length in seconds."""


def write_trace(
    path: Path, title: str, profile: Profile, plan: FusionPlan, costs: Sequence[BucketCosts], found: SimulatedStep
) -> None:
    """Write the step in Chrome's trace format; times count from the start of backward."""
    events: list[dict[str, Any]] = [{"ph": "M", "name": "process_name", "pid": 0, "args": {"name": title}}]
    for row, name in enumerate(("backward", "encoding", "network")):
        events.append({"ph": "M", "name": "thread_name", "pid": 0, "tid": row, "args": {"name": name}})
    for row, name, start, seconds in _bars(profile, plan, costs, found):
        events.append({"ph": "X", "name": name, "pid": 0, "tid": row, "ts": start * 1e6, "dur": seconds * 1e6})
    path.write_text(json.dumps(events))


def _bars(profile: Profile, plan: FusionPlan, costs: Sequence[BucketCosts], found: SimulatedStep) -> Iterator[Bar]:
    bucket_of = {name: i for i, bucket in enumerate(plan.buckets) for name in bucket.names}
    computing = backward_seconds(profile.model.tensors)
    now = 0.0
    for tensor in profile.model.tensors:
        cost = costs[bucket_of[tensor.name]]
        yield _BACKWARD, tensor.name, now, computing[tensor.name]
        now += computing[tensor.name]
        if cost.ahead:
            yield _ENCODING, tensor.name, now, cost.encode(tensor.numel)
            now += cost.encode(tensor.numel)
    if found.waiting:
        yield _BACKWARD, "waits", found.alone, found.waiting
    for index, (bucket, cost, span) in enumerate(zip(plan.buckets, costs, found.spans, strict=True)):
        before = 0.0 if cost.ahead else cost.encode(sum(slot.numel for slot in bucket.slots))
        if span.idle:
            yield _NETWORK, "idle", span.start - span.idle, span.idle
        if before:
            yield _ENCODING, f"bucket {index}", span.start, before
        yield _NETWORK, f"bucket {index}", span.start + before, span.end - span.start - before
