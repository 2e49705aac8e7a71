"""Makes plans from profiles: a planner cuts the profile's model by its measured costs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from ..base.plan import FusionPlan, TensorInfo
from ..codecs import Codec
from ..scheduler.fusing import fuse
from ..scheduler.planners import Planner, StepCosts
from .bucket_costs import costs_of
from .cluster import Scenario
from .prediction import backward_seconds
from .profile import Profile


def make_plan(
    profile: Profile,
    planner: Planner,
    codec: Codec | Mapping[str, Codec],
    scenario: Scenario,
    workers: int,
    *,
    algorithm: str | None | Mapping[str, str | None] = None,
    ahead: bool | None = None,
    measured: bool = False,
    tensors: Iterable[TensorInfo] = (),
) -> FusionPlan:
    """Return the planner's plan for the profile's model."""

    def costs(each: Codec, collective: str) -> StepCosts:
        return costs_of(profile, each, collective, scenario, workers, measured).for_planner(backward)

    backward = backward_seconds(profile.model.tensors)

    groups = {tensor.name: tensor.group for tensor in tensors}
    infos = [replace(tensor.info, group=groups.get(tensor.name)) for tensor in profile.model.tensors]
    return fuse(
        infos,
        planner,
        codec,
        scenario.node_sizes(workers),
        algorithm=algorithm,
        ahead=ahead,
        costs=costs,
        on_device=profile.machine.on_device,
    )
