"""Chooses codecs and plan together: by rules, and where these say "auto", by the predicted step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from .. import codecs, collectives
from ..base.plan import FusionPlan, TensorInfo
from ..codecs import Codec
from ..scheduler.planners import Planner
from .bucket_costs import BucketCosts, costs_of
from .cluster import Scenario
from .codec_rules import CodecChoice, CodecRules
from .plans import make_plan
from .prediction import predict_plan
from .profile import Profile
from .simulation import SimulatedStep

__all__ = ["Selection", "choose_codecs", "select", "ways"]


@dataclass(frozen=True)
class Selection:
    """A plan with its codecs, and the reasons.

    Attributes:
        choices: codec of each gradient, by name.
        plan: made with these codecs.
        prediction: of its step.
        verdict: the predicted steps of all candidates, in words; empty if rules leave no choice.
    """

    choices: Mapping[str, CodecChoice]
    plan: FusionPlan
    prediction: SimulatedStep
    verdict: str

    def because(self, why: str) -> Selection:
        """Return the same with another reason for each codec that "auto" chose."""
        choices = {
            tensor: replace(choice, reason=f"{choice.reason.partition(':')[0]}: {why}") if choice.auto else choice
            for tensor, choice in self.choices.items()
        }
        return replace(self, choices=choices)


def choose_codecs(
    profile: Profile, policy: CodecRules, scenario: Scenario, workers: int, measured: bool = False
) -> dict[str, CodecChoice]:
    """Return the codec of each gradient of the profile's model, by name, with the reason.

    "auto" chooses among the codecs that the profile has costs for, each with its default options and collective.
    """
    candidates = {name: codecs.get(name) for name in profile.codecs if codecs.knows(name)}
    known: dict[Codec, BucketCosts] = {}

    def seconds(codec: Codec, tensor: TensorInfo) -> float:
        if codec not in known:
            algorithm = collectives.choose(codec, scenario.node_sizes(workers), ahead=None)
            known[codec] = costs_of(profile, codec, algorithm, scenario, workers, measured)
        return known[codec].alone(tensor.numel)

    tensors = [tensor.info for tensor in profile.model.tensors]
    return {tensor.name: policy.choose(tensor, candidates, seconds) for tensor in tensors}


def ways(
    profile: Profile,
    policy: CodecRules,
    planner: Planner,
    scenario: Scenario,
    workers: int,
    measured: bool = False,
    tensors: Iterable[TensorInfo] = (),
) -> tuple[Selection, dict[str, Selection]]:
    """Return what may be chosen: the fastest codec for each tensor alone, and by name each one for all "auto" tensors.

    Without an "auto" tensor there is no other way than the first. Arguments and errors are those of ``select``.
    """
    known = list(tensors)

    def planned(choices: Mapping[str, CodecChoice]) -> Selection:
        by_name = {name: choice.codec for name, choice in choices.items()}
        plan = make_plan(profile, planner, by_name, scenario, workers, measured=measured, tensors=known)
        return Selection(choices, plan, predict_plan(profile, plan, scenario, measured), verdict="")

    alone = choose_codecs(profile, policy, scenario, workers, measured)
    if not any(choice.auto for choice in alone.values()):
        return planned(alone), {}
    candidates = {name: codecs.get(name) for name in profile.codecs if codecs.knows(name)}
    return planned(alone), {
        name: planned({tensor: replace(c, codec=codec) if c.auto else c for tensor, c in alone.items()})
        for name, codec in policy.allowed(candidates).items()
    }


def select(
    profile: Profile,
    policy: CodecRules,
    planner: Planner,
    scenario: Scenario,
    workers: int,
    *,
    measured: bool = False,
    tensors: Iterable[TensorInfo] = (),
) -> Selection:
    """Return the plan with the shortest predicted step of those that the policy allows.

    The fastest codec for each tensor alone can lose to one codec for all: tensors of different codecs share no bucket
    and pay more startups. So this compares the plan with the fastest codec for each tensor with the plans in which all
    "auto" tensors have the same allowed codec.

    Args:
        profile: the costs; "auto" chooses among its codecs.
        policy: the rules.
        planner: makes the buckets.
        scenario: the cluster.
        workers: number of ranks.
        measured: as for ``costs_of``.
        tensors: as for ``make_plan``.

    Raises:
        ConfigError: the profile lacks costs, or no rule fits a tensor.
    """
    alone, found = ways(profile, policy, planner, scenario, workers, measured, tensors)
    if not found:
        return alone
    best = min(found, key=lambda name: (found[name].prediction.score, name))
    verdict = "predicted step: " + ", ".join(
        [
            f"the fastest codec for each tensor alone {alone.prediction.seconds * 1e3:.2f} ms",
            *(f"{name} for all {way.prediction.seconds * 1e3:.2f} ms" for name, way in found.items()),
        ]
    )
    if alone.prediction.score <= found[best].prediction.score:
        return replace(alone, verdict=verdict)
    one = found[best].because(f"auto, {policy.fidelity}: {best} for all is predicted to be fastest")
    return replace(one, verdict=verdict)
