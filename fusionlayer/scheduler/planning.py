"""Plans from profiles: what a planner makes of measured costs, and what a plan is predicted to take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from .. import codecs, collectives
from ..codecs import Codec
from ..errors import ConfigError
from ..plan import Bucket, FusionPlan
from .cost_model import CodecCost
from .costs import step_costs
from .engine import SLOT_ALIGNMENT
from .planners import Planner, Prediction, StepCosts, predict
from .profile import Profile
from .projection import Scenario

__all__ = ["bucket_costs", "codec_cost", "codec_of", "make_plan", "names_of", "plan_costs", "predict_plan"]

_BITS_FROM = 1 << 20


def codec_cost(profile: Profile, codec: Codec) -> CodecCost:
    """Return the measured costs of a codec, with the bits of its own options.

    Where just these options were not measured, those count whose bits are nearest.

    Raises:
        ConfigError: the codec was measured with no options at all.
    """
    bits = 8 * codec.bare.wire(_BITS_FROM).capacity / _BITS_FROM
    measured = {name: codecs.get(name).bare for name in profile.codecs if name in codecs.names()}
    alike = [name for name, other in measured.items() if other.name == codec.name]
    best = min(
        alike, key=lambda name: (measured[name] != codec.bare, abs(profile.codecs[name].bits - bits)), default=""
    )
    return replace(profile.codec(best or codec.name), bits=bits)


def names_of(codec: Codec) -> list[str]:
    """Return the registered names, presets included, that stand for a codec with just these options."""
    return [name for name in codecs.names() if codecs.get(name).bare == codec.bare]


def bucket_costs(
    profile: Profile, codec: Codec, algorithm: str, scenario: Scenario, workers: int, measured: bool = False
) -> StepCosts:
    """Return what a step costs whose buckets are all encoded by ``codec`` and sent by ``algorithm``.

    Args:
        profile: what was measured.
        codec: of the buckets.
        algorithm: their collective; one that gathers means that gradients are encoded ahead.
        scenario: the cluster.
        workers: number of ranks.
        measured: take the collective's own curve where it was measured with so many ranks, not the link's.
    """
    transfer = profile.transfer(algorithm, workers) if measured else None
    return step_costs(profile, codec_cost(profile, codec), algorithm, scenario.cluster(profile, workers), transfer)


def make_plan(
    profile: Profile,
    planner: Planner,
    codec: Codec,
    scenario: Scenario,
    workers: int,
    *,
    algorithm: str | None = None,
    ahead: bool | None = None,
    measured: bool = False,
) -> FusionPlan:
    """Return the planner's plan for the profile's model.

    Args:
        profile: what was measured; its model is what is planned for.
        planner: cuts the gradients into buckets.
        codec: of all buckets.
        scenario: the cluster.
        workers: number of ranks.
        algorithm: collective; None chooses.
        ahead: encode gradients one by one as they arrive; None: as the codec does by default.
        measured: as for ``bucket_costs``.

    Raises:
        ConfigError: the profile lacks costs, or the collective does not go with ``ahead``.
    """
    if ahead is None:
        ahead = codec.ahead if algorithm is None else algorithm in collectives.gather_names()
    algorithm = algorithm or collectives.choose(codec.lossless, workers, ahead=ahead)
    if ahead:
        collectives.get_gather(algorithm)
    else:
        collectives.get(algorithm)
    costs = bucket_costs(profile, codec, algorithm, scenario, workers, measured)
    runs = planner([tensor.info for tensor in profile.model.tensors], costs)
    align = 1 if ahead else min(max(codec.block, 1), SLOT_ALIGNMENT)
    return FusionPlan.build(runs, workers, codec.name, codec.options, algorithm, align, ahead)


def codec_of(bucket: Bucket) -> Codec:
    """Return the codec of a bucket, its messages without header."""
    return codecs.get(bucket.codec, **bucket.options, header=False)


def plan_costs(profile: Profile, plan: FusionPlan, scenario: Scenario, measured: bool = False) -> list[StepCosts]:
    """Return the costs of each bucket of a plan.

    Raises:
        ConfigError: the plan is not for the profile's model, or the profile lacks costs.
    """
    plan.check([tensor.info for tensor in profile.model.tensors], plan.world_size)
    known: dict[str, StepCosts] = {}
    costs = []
    for bucket in plan.buckets:
        codec = codec_of(bucket)
        key = f"{codec} {bucket.algorithm}"
        if key not in known:
            known[key] = bucket_costs(profile, codec, bucket.algorithm, scenario, plan.world_size, measured)
        if known[key].ahead != bucket.ahead:
            raise ConfigError(
                f"plan: a bucket with ahead={bucket.ahead} travels by {bucket.algorithm!r}; expected one of: "
                f"{', '.join(collectives.gather_names() if bucket.ahead else collectives.names())}"
            )
        costs.append(known[key])
    return costs


def predict_plan(profile: Profile, plan: FusionPlan, costs: Sequence[StepCosts]) -> Prediction:
    """Return the predicted timeline of a plan, whose buckets cost what ``plan_costs`` says."""
    tensors = [tensor.info for tensor in profile.model.tensors]
    return predict(tensors, [bucket.names for bucket in plan.buckets], costs)
