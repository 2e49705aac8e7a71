"""Chooses codecs, collectives and plan together: by rules, and where these say "auto", by the predicted step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from .. import codecs
from ..base.plan import FusionPlan, TensorInfo
from ..codecs import Codec
from ..scheduler.planners import Planner
from .bucket_costs import BucketCosts, collectives_for, costs_of
from .cluster import Scenario
from .codec_rules import CodecChoice, CodecRules, Sending
from .plans import make_plan
from .prediction import predict_plan
from .profile import Profile
from .simulation import SimulatedStep

WORTH = 0.02
"""Share of the predicted step that a codec must save to be chosen, if it loses anything."""


@dataclass(frozen=True)
class Selection:
    """A plan with its codecs, and the reasons.

    Attributes:
        choices: codec and collective of each gradient, by name.
        plan: made with these codecs.
        prediction: of its step.
        verdict: the predicted steps of all candidates, in words; empty if rules leave no choice.
    """

    choices: Mapping[str, CodecChoice]
    plan: FusionPlan
    prediction: SimulatedStep
    verdict: str

    @property
    def lossless(self) -> bool:
        """Whether no "auto" tensor loses anything."""
        return all(choice.codec.lossless for choice in self.choices.values() if choice.auto)

    @property
    def algorithm(self) -> str:
        """The collectives of the "auto" tensors, in words."""
        return " and ".join(sorted({c.algorithm for c in self.choices.values() if c.auto and c.algorithm is not None}))

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
    """Return codec and collective of each gradient of the profile's model, by name, with the reason.

    "auto" chooses among the codecs that the profile has costs for, each with its default options.
    """
    candidates = {
        _name(name, algorithm, place): Sending(codec, algorithm)
        for name, codec in _known(profile).items()
        for place, algorithm in enumerate(collectives_for(codec, scenario, workers))
    }
    known: dict[Sending, BucketCosts] = {}

    def seconds(sending: Sending, tensor: TensorInfo) -> float:
        if sending not in known:
            assert sending.algorithm is not None
            known[sending] = costs_of(profile, sending.codec, sending.algorithm, scenario, workers, measured)
        return known[sending].alone(tensor.numel)

    tensors = [tensor.info for tensor in profile.model.tensors]
    return {tensor.name: policy.choose(tensor, candidates, seconds) for tensor in tensors}


def _known(profile: Profile) -> dict[str, Codec]:
    return {name: codecs.get(name) for name in profile.codecs if codecs.knows(name)}


def _name(codec: str, algorithm: str, place: int) -> str:
    """Return how a codec's collective number ``place`` is named; number 0 is the usual one."""
    return f"{codec} by {algorithm}" if place else codec


def ways(
    profile: Profile,
    policy: CodecRules,
    planner: Planner,
    scenario: Scenario,
    workers: int,
    measured: bool = False,
    tensors: Iterable[TensorInfo] = (),
) -> tuple[Selection, dict[str, Selection]]:
    """Return the candidates: the fastest way for each tensor alone, and each codec for all "auto" tensors.

    Each codec, by name, has the collective with which the predicted step is the shortest. Without an "auto" tensor
    there is no other way than the first. Arguments and errors are ``select``'s.
    """
    known = list(tensors)

    def planned(choices: Mapping[str, CodecChoice]) -> Selection:
        plan = make_plan(
            profile,
            planner,
            {name: choice.codec for name, choice in choices.items()},
            scenario,
            workers,
            algorithm={name: choice.algorithm for name, choice in choices.items()},
            measured=measured,
            tensors=known,
        )
        return Selection(choices, plan, predict_plan(profile, plan, scenario, measured), verdict="")

    def same(codec: Codec, algorithm: str) -> Selection:
        return planned({t: replace(c, codec=codec, algorithm=algorithm) if c.auto else c for t, c in alone.items()})

    alone = choose_codecs(profile, policy, scenario, workers, measured)
    if not any(choice.auto for choice in alone.values()):
        return planned(alone), {}
    return planned(alone), {
        name: min(
            (same(codec, algorithm) for algorithm in collectives_for(codec, scenario, workers)),
            key=lambda way: way.prediction.score,
        )
        for name, codec in policy.allowed(_known(profile)).items()
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
    """Return the permitted plan with approximately the shortest predicted step.

    A codec is compared with each collective that may send its messages. The fastest way for each tensor alone can lose
    to one for all: tensors of different codecs or collectives share no bucket and pay more startups. So this compares
    the plan with the fastest way for each tensor with the plans that give all "auto" tensors the same permitted one. A
    lossless way is preferred to one that saves less than 2 % of the step.
    """
    alone, found = ways(profile, policy, planner, scenario, workers, measured, tensors)
    if not found:
        return alone
    named = {f"{name} by {way.algorithm}": way for name, way in sorted(found.items())}
    verdict = "predicted step: " + ", ".join(
        [
            f"the fastest codec for each tensor alone {alone.prediction.seconds * 1e3:.2f} ms",
            *(f"{name} for all {way.prediction.seconds * 1e3:.2f} ms" for name, way in named.items()),
        ]
    )
    every = {"": alone, **named}
    best = min(every, key=lambda name: every[name].prediction.score)
    why = f"{best} for all is predicted to be fastest"
    exact = min(
        (name for name in every if every[name].lossless), key=lambda name: every[name].prediction.score, default=best
    )
    if exact != best and every[exact].prediction.seconds <= (1 + WORTH) * every[best].prediction.seconds:
        best, why = exact, f"no codec saves {100 * WORTH:g} % of the step; {exact} loses nothing"
    chosen = replace(every[best], verdict=verdict)
    return chosen.because(f"auto, {policy.fidelity}: {why}") if best else chosen
