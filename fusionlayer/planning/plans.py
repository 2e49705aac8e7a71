"""Plans from profiles: what a planner makes of measured costs, and what a plan is predicted to take."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from .. import codecs, collectives
from ..codecs import Codec, TwoLevelCodec
from ..errors import ConfigError
from ..plan import Bucket, FusionPlan, TensorInfo
from ..scheduler.fusing import fuse
from ..scheduler.planners import Planner, Prediction, StepCosts, predict
from .codec_rules import CodecChoice, CodecRules
from .cost_model import CodecCost
from .profile import Profile
from .projection import Scenario
from .step_costs import step_costs

__all__ = [
    "bucket_costs",
    "choose_codecs",
    "codec_cost",
    "codec_of",
    "make_plan",
    "plan_costs",
    "predict_plan",
    "short_name",
]

_BITS_FROM = 1 << 20


def codec_cost(profile: Profile, codec: Codec) -> CodecCost:
    """Return the measured costs of a codec, with the bits of its own options.

    Where just these options were not measured, those count whose bits are nearest.

    Raises:
        ConfigError: the codec was measured with no options at all.
    """
    bits = _bits(codec)
    measured = {name: codecs.get(name).bare for name in profile.codecs if name in codecs.names()}
    alike = [name for name, other in measured.items() if other.name == codec.name]
    best = min(
        alike, key=lambda name: (measured[name] != codec.bare, abs(profile.codecs[name].bits - bits)), default=""
    )
    found = profile.codec(best or codec.name)
    if codec.zips:
        return found  # what the data made of it was measured
    return replace(found, bits=bits, within_bits=_bits(codec.within) if isinstance(codec, TwoLevelCodec) else None)


def _bits(codec: Codec) -> float:
    return 8 * codec.bare.wire(_BITS_FROM).capacity / _BITS_FROM


def short_name(codec: Codec) -> str:
    """Return the registered name, of a preset if there is one, of a codec with just these options, or else them too."""
    names = [name for name in codecs.names() if codecs.get(name).bare == codec.bare]
    return min([*reversed(names), str(codec)], key=len)


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
    codec: Codec | Mapping[str, Codec],
    scenario: Scenario,
    workers: int,
    *,
    algorithm: str | None = None,
    ahead: bool | None = None,
    measured: bool = False,
    tensors: Iterable[TensorInfo] = (),
) -> FusionPlan:
    """Return the planner's plan for the profile's model.

    Args:
        profile: what was measured; its model is what is planned for.
        planner: cuts the gradients into buckets; those of different codecs never share one.
        codec: of all gradients, or of each by its name.
        scenario: the cluster.
        workers: number of ranks.
        algorithm: collective; None chooses.
        ahead: encode gradients one by one as they arrive; None: as the codec does by default.
        measured: as for ``bucket_costs``.
        tensors: those that belong to a group of the user's; a profile knows no groups.

    Raises:
        ConfigError: the profile lacks costs, or the collective does not go with ``ahead``.
    """

    def costs(each: Codec, collective: str) -> StepCosts:
        return bucket_costs(profile, each, collective, scenario, workers, measured)

    groups = {tensor.name: tensor.group for tensor in tensors}
    infos = [replace(tensor.info, group=groups.get(tensor.name)) for tensor in profile.model.tensors]
    return fuse(infos, planner, codec, workers, algorithm=algorithm, ahead=ahead, costs=costs)


def choose_codecs(
    profile: Profile, policy: CodecRules, scenario: Scenario, workers: int, measured: bool = False
) -> dict[str, CodecChoice]:
    """Return the codec of each gradient of the profile's model, by name, and why it is that.

    "auto" chooses among the codecs that the profile has costs of, each as it goes by default.
    """
    candidates = {name: codecs.get(name) for name in profile.codecs if name in codecs.names()}
    known: dict[Codec, StepCosts] = {}

    def seconds(codec: Codec, tensor: TensorInfo) -> float:
        if codec not in known:
            algorithm, _ = collectives.settle(None, None, codec, workers)
            known[codec] = bucket_costs(profile, codec, algorithm, scenario, workers, measured)
        cost = known[codec]
        return cost.encode(tensor.numel) + cost.communicate(tensor.numel) + cost.decode(tensor.numel)

    tensors = [tensor.info for tensor in profile.model.tensors]
    return {tensor.name: policy.choose(tensor, candidates, seconds) for tensor in tensors}


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
