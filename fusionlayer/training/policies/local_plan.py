"""The plans of local steps: fragments that take turns in the engine's steps, and states that sync less often."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ... import codecs
from ...base.errors import ConfigError
from ...base.plan import FusionPlan, TensorInfo
from ...scheduler.fusing import fuse
from ..construction import EnginePlanning
from .local import Local, state_tensors


def planned_syncs(
    sync: Local, planning: EnginePlanning, tensors: Sequence[TensorInfo], nodes: Sequence[int]
) -> EnginePlanning:
    """Return the planning of syncs of ``tensors``, from that of steps which average gradients.

    Raises:
        ConfigError: the planning measures steps.
    """
    plan = planning.plan
    if planning.plan_controller is not None:
        raise ConfigError(
            "sync=fl.Local(...) with codec='auto', a planner that needs costs or a fallback, which measure steps in "
            "which gradients are sent; name a codec and a planner that needs no costs"
        )
    if (sync.overlaps or sync.states) and tensors and plan is None:
        plan = _plan_of_fragments(sync, planning, tensors, nodes)
    if plan is None:
        return planning
    # A step of the engine is a sync of one fragment, so they take turns in its steps.
    plan = plan.staggered(sync.fragments, sync.fragments)
    for state, others in state_tensors(sync, tensors).items():
        every = sync.states[state]
        buckets = fuse([*reversed(others)], planning.planner, codecs.get("raw"), nodes).buckets
        late = tuple(replace(bucket, every=every, phase=every - 1) for bucket in buckets)
        plan = replace(plan, buckets=plan.buckets + late)
    return replace(planning, plan=plan)


def _plan_of_fragments(
    sync: Local, planning: EnginePlanning, tensors: Sequence[TensorInfo], nodes: Sequence[int]
) -> FusionPlan:
    """Return the planner's plan, or one with a bucket for each fragment if that has fewer buckets."""

    def fused(ordered: Sequence[TensorInfo]) -> FusionPlan:
        algorithm, ahead = planning.algorithm, planning.ahead
        return fuse(ordered, planning.planner, planning.codec, nodes, algorithm=algorithm, ahead=ahead)

    ordered = [*reversed(tensors)]
    plan = fused(ordered)
    if len(plan.buckets) < sync.fragments:
        count = min(sync.fragments, len(ordered))
        plan = fused([replace(tensor, group=i * count // len(ordered)) for i, tensor in enumerate(ordered)])
    return plan
