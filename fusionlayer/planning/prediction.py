"""Predicts steps: ``predict``, which every prediction comes from, and ``predict_plan``, which calls it for a plan.

``explain``, ``plan``, codec selection and online planning assume one lane and a core for each thread, like planners.
``simulate`` has as many lanes as an engine, and cores and links that they share (``projection.py``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from .. import collectives
from ..base.errors import ConfigError
from ..base.plan import FusionPlan
from ..scheduler.order import send_order
from .bucket_costs import BucketCosts, codec_of, costs_of
from .cluster import Scenario
from .profile import Gradient, Model, Profile
from .simulation import OWN_CORES, Compute, Load, Resources, SimulatedStep, run_local_steps, run_step


@dataclass(frozen=True)
class PlannedBucket:
    """The names of tensors that are sent together, and the costs."""

    names: Sequence[str]
    costs: BucketCosts


def predict(
    model: Model, buckets: Sequence[PlannedBucket], resources: Resources = OWN_CORES, *, whole: bool = True
) -> SimulatedStep:
    """Return the simulated step of a model whose gradients are sent in ``buckets``.

    Args:
        model: its step without communication.
        buckets: in sending order; every gradient of the model is in one.
        resources: cores and threads of the rank.
        whole: predict update and next forward too; otherwise the step ends with the last result, and backward with the
            last gradient.
    """
    bucket_of = {name: bucket for bucket in buckets for name in bucket.names}
    backward = backward_seconds(model.tensors)
    ready: dict[str, float] = {}
    at = encoded = 0.0
    for tensor in model.tensors:
        costs = bucket_of[tensor.name].costs
        ahead = costs.encode(tensor.numel) if costs.ahead else 0.0
        encoded += ahead
        at += backward[tensor.name] + ahead
        ready[tensor.name] = at
    tensors = {tensor.name: tensor for tensor in model.tensors}
    loads = [_load([tensors[name] for name in b.names], ready, b.costs, resources) for b in buckets]
    compute = Compute(model.forward, model.backward + encoded, model.optimizer) if whole else Compute(0.0, at, 0.0)

    found = run_step(compute, loads, resources)
    if not resources.overlap_forward:
        return found
    # The engine does the same: it measures in the order of completion, then reorders.
    busy = [(span.end - span.start) / resources.lanes for span in found.spans]
    return run_step(compute, [loads[i] for i in send_order([load.ready for load in loads], busy)], resources)


def predict_local_steps(
    profile: Profile,
    plan: FusionPlan,
    scenario: Scenario,
    every: int,
    *,
    fragments: int = 1,
    delay: int = 0,
    resources: Resources = OWN_CORES,
    measured: bool = False,
) -> SimulatedStep:
    """Return the mean step of training whose buckets are sent once in ``every`` steps; it has no spans.

    Differences of parameters are sent, which exist at the end of a step. Steps between do not wait.

    Args:
        profile: the costs, and the model.
        plan: the buckets.
        scenario: the cluster.
        every, fragments: as for ``FusionPlan.staggered``.
        delay: steps after which a bucket's result is waited for.
        resources: cores and threads of the rank.
        measured: see ``costs_of``.

    Raises:
        ConfigError: the plan is not for the profile's model, the profile lacks costs, or there are too many fragments.
    """
    plan = plan.staggered(every, fragments)
    model, numels = profile.model, {tensor.name: tensor.numel for tensor in profile.model.tensors}
    loads = []
    for bucket, costs in zip(plan.buckets, plan_costs(profile, plan, scenario, measured), strict=True):
        sizes = [numels[name] for name in bucket.names]
        encoded = sum(map(costs.encode, sizes)) if costs.ahead else 0.0
        disturbance = costs.disturbance if math.isinf(resources.cores) else 0.0
        loads.append(Load(encoded, 0.0, sum(sizes), costs.phases(sizes, unpack=False), disturbance))
    compute, leaving = Compute(model.forward, model.backward, model.optimizer), [plan.due(s) for s in range(every)]
    return run_local_steps(compute, loads, leaving, resources, delay=delay)


def _load(members: Sequence[Gradient], ready: dict[str, float], costs: BucketCosts, resources: Resources) -> Load:
    sizes = [tensor.numel for tensor in members]
    return Load(
        max(ready[tensor.name] for tensor in members),
        min(tensor.used for tensor in members),
        sum(sizes),
        costs.phases(sizes, unpack=not resources.overlap_forward),
        costs.disturbance if math.isinf(resources.cores) else 0.0,
    )


def backward_seconds(tensors: Sequence[Gradient]) -> dict[str, float]:
    """Return the seconds of backward for each tensor, by name, counted from the arrival of the one before it."""
    arrivals = [0.0, *(tensor.ready for tensor in tensors)]
    return {t.name: max(0.0, t.ready - before) for t, before in zip(tensors, arrivals, strict=False)}


# ---- plans ----------------------------------------------------------------------------------------------------------


def plan_costs(profile: Profile, plan: FusionPlan, scenario: Scenario, measured: bool = False) -> list[BucketCosts]:
    """Return the costs of each bucket of a plan; ``measured``: as for ``costs_of``."""
    plan.check([tensor.info for tensor in profile.model.tensors], plan.world_size)
    known: dict[str, BucketCosts] = {}
    costs = []
    for bucket in plan.buckets:
        codec = codec_of(bucket)
        key = f"{codec} {bucket.algorithm}"
        if key not in known:
            known[key] = costs_of(profile, codec, bucket.algorithm, scenario, plan.world_size, measured)
        if known[key].ahead != bucket.ahead:
            raise ConfigError(
                f"plan: a bucket with ahead={bucket.ahead} is sent by {bucket.algorithm!r}; expected one of: "
                f"{', '.join(collectives.gather_names() if bucket.ahead else collectives.names())}"
            )
        costs.append(known[key])
    return costs


def predict_plan(profile: Profile, plan: FusionPlan, scenario: Scenario, measured: bool = False) -> SimulatedStep:
    """Return the step of a plan until the last result, as planners predict it; ``measured``: as for ``costs_of``."""
    costs = plan_costs(profile, plan, scenario, measured)
    buckets = [PlannedBucket(bucket.names, cost) for bucket, cost in zip(plan.buckets, costs, strict=True)]
    return predict(profile.model, buckets, whole=False)
