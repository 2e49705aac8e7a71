"""Plans whose codecs follow from rules, and where these say "auto" from what the whole step is predicted to take."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from .. import codecs
from ..plan import FusionPlan, TensorInfo
from ..scheduler.planners import Planner, Prediction
from .codec_rules import CodecChoice, CodecRules
from .plans import choose_codecs, make_plan, plan_costs, predict_plan
from .profile import Profile
from .projection import Scenario

__all__ = ["Selection", "select"]


@dataclass(frozen=True)
class Selection:
    """A plan with its codecs, and why it is that.

    Attributes:
        choices: codec of each gradient, by name.
        plan: that was made with them.
        prediction: of its step.
        verdict: how the ways to choose were predicted to compare; empty where rules leave no choice.
    """

    choices: Mapping[str, CodecChoice]
    plan: FusionPlan
    prediction: Prediction
    verdict: str


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
    """Return the plan with the least predicted step of those that the policy allows.

    The codec that is fastest for each tensor by itself can lose to one codec for all: pools of tensors that cannot
    share a bucket pay more startups. So with "auto" both are planned and predicted, each allowed codec for all tensors
    that a rule leaves to "auto".

    Args:
        profile: what was measured; its codecs are what "auto" chooses from.
        policy: the rules.
        planner: makes the buckets.
        scenario: the cluster.
        workers: number of ranks.
        measured: as for ``bucket_costs``.
        tensors: as for ``make_plan``.

    Raises:
        ConfigError: the profile lacks costs, or no rule fits a tensor.
    """

    def planned(choices: Mapping[str, CodecChoice]) -> tuple[FusionPlan, Prediction]:
        by_name = {name: choice.codec for name, choice in choices.items()}
        plan = make_plan(profile, planner, by_name, scenario, workers, measured=measured, tensors=known)
        return plan, predict_plan(profile, plan, plan_costs(profile, plan, scenario, measured))

    known = list(tensors)
    alone = choose_codecs(profile, policy, scenario, workers, measured)
    if not any(choice.auto for choice in alone.values()):
        return Selection(alone, *planned(alone), verdict="")
    candidates = {name: codecs.get(name) for name in profile.codecs if name in codecs.names()}
    ways = {
        name: {tensor: replace(choice, codec=codec) if choice.auto else choice for tensor, choice in alone.items()}
        for name, codec in policy.allowed(candidates).items()
    }
    found = {name: planned(choices) for name, choices in ways.items()}
    best = min(found, key=lambda name: (found[name][1].rank, name))
    mixed = planned(alone)
    verdict = "predicted step: " + ", ".join(
        [
            f"the fastest codec for each tensor alone {mixed[1].step * 1e3:.2f} ms",
            *(f"{name} for all {prediction.step * 1e3:.2f} ms" for name, (_, prediction) in found.items()),
        ]
    )
    if mixed[1].rank <= found[best][1].rank:
        return Selection(alone, *mixed, verdict)
    reason = f"auto, {policy.fidelity}: {best} for all is predicted to be fastest"
    one = {
        tensor: replace(choice, reason=f"rule {policy.rule_for(info)[0]}: {reason}") if choice.auto else choice
        for (tensor, choice), info in zip(
            ways[best].items(), (tensor.info for tensor in profile.model.tensors), strict=True
        )
    }
    return Selection(one, *found[best], verdict)
