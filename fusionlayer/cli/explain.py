"""``fusionlayer explain``: the buckets of a plan, when each is predicted to be sent, and why."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from .. import codecs
from ..base.plan import FusionPlan
from ..collectives import choice
from ..planning.bucket_costs import BucketCosts, codec_cost, codec_of, costs_of, short_name
from ..planning.cluster import Scenario
from ..planning.prediction import backward_seconds, plan_costs, predict_plan
from ..planning.profile import Profile
from ..planning.simulation import SimulatedStep
from ..scheduler.fusing import check_pairs
from . import ratio
from .arguments import check_file
from .outputs import keep
from .resolve import scenario_of
from .tables import Column, Table, print_text, show
from .units import BYTES, SECONDS, in_one_unit, in_words

_BACKWARD, _ENCODING, _NETWORK = range(3)  # rows
Bar = tuple[int, str, float, float]
"""Row, name, start and length in seconds."""


def run(options: argparse.Namespace) -> None:
    """Print the reports that ``options`` select."""
    if options.plan is None:
        ratio.run(options)
        return
    if options.timeline:
        check_file(options.timeline, "--timeline")
    profile = Profile.from_yaml(options.profile)
    plan = FusionPlan.from_yaml(options.plan)
    check_pairs(plan)
    scenario = scenario_of(options, profile)
    measured = options.rate is None
    costs = plan_costs(profile, plan, scenario, measured)
    found = predict_plan(profile, plan, scenario, measured)
    title = f"{profile.title}: {plan.world_size} workers, {scenario.rate}"
    raw = _alone(profile, scenario, plan.world_size, measured)
    show([_buckets(title, profile, plan, found), _tensors(profile, plan, costs, raw)], options.columns)
    print_text(_sent_by_node(profile, plan, scenario))
    if plan.reason:
        print_text(f"Sizes: {plan.reason}.")
    if plan.skips:
        print_text("Buckets are sent once in several steps; times are those of a step in which all of them are sent.")
    print_text(
        f"Backward, with what is encoded in it: {_ms(found.alone)} ms. Last result: {_ms(found.seconds)} ms. The "
        f"optimizer waits {_ms(found.waiting)} ms{_disturbed(costs)}; communication is idle for {_ms(found.idle)} ms "
        f"between buckets.{profile.machine.assumed}"
    )
    if options.timeline:
        keep(options.timeline, lambda path: _write_trace(path, title, profile, plan, costs, found), "--timeline")


def _sent_by_node(profile: Profile, plan: FusionPlan, scenario: Scenario) -> str:
    """Return a sentence: how many bytes a node sends to other nodes, as far as collectives are known."""
    nodes = scenario.node_sizes(plan.world_size)
    times = [choice.sent_by_node(bucket.algorithm, nodes) for bucket in plan.buckets]
    nbytes = [
        each * codec_cost(profile, codec_of(bucket)).nbytes(sum(slot.numel for slot in bucket.slots))
        for bucket, each in zip(plan.buckets, times, strict=True)
        if each is not None
    ]
    unknown = sorted({bucket.algorithm for bucket, each in zip(plan.buckets, times, strict=True) if each is None})
    more = f", and what {', '.join(unknown)} sends" if unknown else ""
    return f"A node sends {in_words(sum(nbytes), BYTES)} to other nodes{more} ({choice.in_words(nodes)})."


def _disturbed(costs: Sequence[BucketCosts]) -> str:
    seconds = sum(cost.disturbance for cost in costs[:-1])  # nothing is computed after the last bucket
    return f", {_ms(seconds)} ms of that because buckets disturb backward" if seconds else ""


def _buckets(title: str, profile: Profile, plan: FusionPlan, found: SimulatedStep) -> Table:
    elements = [sum(slot.numel for slot in bucket.slots) for bucket in plan.buckets]
    sent = [
        codec_cost(profile, codec_of(bucket)).nbytes(numel)
        for bucket, numel in zip(plan.buckets, elements, strict=True)
    ]
    spans = found.spans
    computed = [0.0, *(span.ready for span in spans[:-1])]
    volume, (nbytes,) = in_one_unit(BYTES, sent)
    unit, (filling, sending, ready, start, end, idle) = in_one_unit(
        SECONDS,
        [span.ready - before for span, before in zip(spans, computed, strict=True)],
        [span.end - span.start for span in spans],
        *([getattr(span, name) for span in spans] for name in ("ready", "start", "end", "idle")),
    )
    columns = [
        Column("bucket", [str(number) for number in range(len(plan.buckets))]),
        Column("tensors", [str(len(bucket.slots)) for bucket in plan.buckets], gives_way=2),
        Column("elements", [str(numel) for numel in elements], gives_way=3),
        Column("sends", nbytes, volume),
        Column("codec", [short_name(codec_of(bucket)) for bucket in plan.buckets], text=True),
        Column(
            "sent by",
            [f"{bucket.algorithm}, {'ahead' if bucket.ahead else 'after'}" for bucket in plan.buckets],
            text=True,
            gives_way=1,
        ),
        *_leaving(plan),
        Column("F", filling, unit, gives_way=5),
        Column("C", sending, unit, gives_way=4),
        Column("ready", ready, unit),
        Column("start", start, unit),
        Column("end", end, unit),
        Column("idle", idle, unit),
    ]
    return Table(title, columns)


def _leaving(plan: FusionPlan) -> list[Column]:
    """Return a column of the steps in which buckets are sent, or none if all buckets are sent in every step."""
    if not plan.skips:
        return []
    return [Column("sent in steps", [f"{b.phase}, {b.phase + b.every}, .." for b in plan.buckets], text=True)]


def _tensors(profile: Profile, plan: FusionPlan, costs: Sequence[BucketCosts], raw: BucketCosts | None) -> Table:
    bucket_of = {name: i for i, bucket in enumerate(plan.buckets) for name in bucket.names}
    tensors = profile.model.tensors
    numbers = [bucket_of[tensor.name] for tensor in tensors]
    buckets = [plan.buckets[number] for number in numbers]
    alone = [costs[number].alone(tensor.numel) for tensor, number in zip(tensors, numbers, strict=True)]
    saved = [
        None if raw is None or bucket.codec == "raw" else raw.alone(tensor.numel) - seconds
        for tensor, bucket, seconds in zip(tensors, buckets, alone, strict=True)
    ]
    bits = [codec_cost(profile, codec_of(bucket)).bits for bucket in buckets]
    unit, (took, saving) = in_one_unit(SECONDS, alone, saved)
    columns = [
        Column("tensor", [tensor.name for tensor in tensors], text=True),
        Column("elements", [str(tensor.numel) for tensor in tensors], gives_way=1),
        Column("bucket", [str(number) for number in numbers]),
        Column("codec", [short_name(codec_of(bucket)) for bucket in buckets], text=True),
        Column("bits", [f"{count:.3g}" for count in bits], "/element", gives_way=2),
        Column("alone", took, unit),
        Column("saves", saving, unit),
    ]
    return Table("Tensors, in order of arrival: each by itself, and what its codec saves against raw", columns)


def _alone(profile: Profile, scenario: Scenario, workers: int, measured: bool) -> BucketCosts | None:
    """Return the costs of sending values uncompressed, if the profile has them."""
    if "raw" not in profile.codecs:
        return None
    return costs_of(profile, codecs.get("raw"), "dense", scenario, workers, measured)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f}"


# ---- a trace for Perfetto: backward, encoding, communication and waiting --------------------------------------------


def _write_trace(
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
