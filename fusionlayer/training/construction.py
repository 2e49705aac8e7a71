"""Makes the engine that a user's arguments and the job's settings describe."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from .. import codecs, collectives, context
from ..base.config import Config, PlanningSettings, blame
from ..base.errors import ConfigError, require
from ..base.plan import FusionPlan, TensorInfo
from ..codecs import Codec
from ..collectives import choice
from ..functional import make_codec
from ..observe.timeline import Timeline
from ..planning.codec_rules import AUTO, FIDELITIES, LOCAL, CodecRule, CodecRules
from ..planning.profile import Profile
from ..planning.rates import shares_by
from ..process.clock import clock_of
from ..scheduler import LANES, Engine, Memory, PlanController, Scaling, planners
from ..scheduler.planners import Planner
from ..transport import Transport
from .fallback import CodecFallback
from .planning_options import Planning

_logger = logging.getLogger("fusionlayer")


@dataclass(frozen=True)
class GradientOptions:
    """The arguments of ``DistributedOptimizer`` that say how to fuse and encode; None takes the configured value."""

    codec: str | Codec | None = None
    codec_options: Mapping[str, Any] = field(default_factory=dict)
    algorithm: str | None = None
    planning: Planning = field(default_factory=Planning)
    error_feedback: bool | None = None
    feedback_bits: int | None = None


@dataclass(frozen=True)
class EnginePlanning:
    """The settings from which an engine makes its plans; the attributes are arguments of ``Engine``. Some depend on the
    tensors."""

    codec: Codec | Mapping[str, Codec]
    algorithm: str | None
    ahead: bool | None
    planner: Planner
    plan: FusionPlan | None
    plan_controller: PlanController | None


Arrange = Callable[[EnginePlanning, Sequence[TensorInfo], Sequence[int]], EnginePlanning]
"""Returns a planning made from another one, for these tensors and the number of ranks of each node."""


def as_it_is(planning: EnginePlanning, tensors: Sequence[TensorInfo], nodes: Sequence[int]) -> EnginePlanning:
    """Return ``planning``: an ``Arrange`` that changes nothing."""
    return planning


def make_engine(
    options: GradientOptions,
    tensors: Sequence[TensorInfo],
    transport: Transport,
    device: torch.device,
    *,
    arrange: Arrange = as_it_is,
    more: Sequence[TensorInfo] = (),
    scaling: Scaling,
    timeline: Timeline,
    overlap_forward: bool,
    hold_results: bool = False,
    undoable: bool = False,
    idle: Collection[str] = (),
) -> Engine:
    """Return an engine as ``options`` and the job's settings describe it, on a duplicate of ``transport``.

    ``arrange`` may change its planning, and ``more`` tensors are sent than those that are planned.
    """
    settings = context.settings()
    for name, value in {"ahead": options.planning.ahead, "error_feedback": options.error_feedback}.items():
        if value not in (None, True, False):
            raise ConfigError(f"{name}={value!r}; expected True, False or None")
    planning = make_planning(options, tensors, transport.rank, transport.node_sizes, device, overlap_forward, idle=idle)
    planning = arrange(planning, tensors, transport.node_sizes)
    own = transport.duplicate()
    with blame(settings, "rates"):
        shares = shares_by(settings.rates, own)
    if own.rank == 0 < own.size - 1:
        _say_what_is_sent(planning, tensors, own.node_sizes, bool(shares))
    return Engine(
        [*tensors, *more],
        own,
        **vars(planning),
        device=device,
        memory=Memory(settings.feedback_bits if options.feedback_bits is None else options.feedback_bits),
        error_feedback=options.error_feedback if options.error_feedback is not None else settings.error_feedback,
        scaling=scaling,
        timeline=timeline,
        lanes=settings.lanes or LANES,
        overlap_forward=overlap_forward,
        hold_results=hold_results,
        undoable=undoable,
        shares=shares,
        clock=clock_of(device),
    )


def _say_what_is_sent(
    planning: EnginePlanning, tensors: Sequence[TensorInfo], nodes: Sequence[int], shares: bool
) -> None:
    """Log each codec with its collective and the bytes between nodes; warn if there are ``shares`` that none takes."""
    sent: Counter[tuple[Codec, str, str]] = Counter()
    if planning.plan is not None:
        for bucket in planning.plan.buckets:
            sent[codecs.get(bucket.codec, **bucket.options), bucket.algorithm, bucket.dtype] += bucket.numel
    else:
        for tensor in tensors:
            codec = planning.codec if isinstance(planning.codec, Codec) else planning.codec[tensor.name]
            algorithm = collectives.choose(codec, nodes, planning.algorithm, ahead=planning.ahead)
            sent[codec, algorithm, tensor.dtype] += tensor.numel
    for (codec, algorithm, dtype), numel in sent.items():
        words = choice.describe(codec, algorithm, numel, getattr(torch, dtype), nodes, half=False)
        _logger.info("gradients of %s: %s", dtype, words)
    used = {algorithm for _, algorithm, _ in sent}
    if shares and collectives.TAKES_SHARES not in used and planning.plan_controller is None:
        _logger.warning(
            "the links have unequal rates, but shares count for %s alone and gradients are sent by %s; choose "
            "algorithm=%r, or a lossy codec, for it",
            collectives.TAKES_SHARES,
            ", ".join(sorted(used)) or "nothing",
            collectives.TAKES_SHARES,
        )


def make_planning(
    options: GradientOptions,
    tensors: Sequence[TensorInfo],
    rank: int,
    nodes: Sequence[int],
    device: torch.device,
    overlap_forward: bool,
    *,
    idle: Collection[str] = (),
    changed: bool = False,
) -> EnginePlanning:
    """Return the planning of these tensors' steps, from ``options`` and the job's settings.

    Args:
        options: the options of the optimizer.
        tensors: every tensor of a step.
        rank: this rank.
        nodes: number of ranks of each node.
        device: the device of the tensors.
        overlap_forward: see ``Engine``.
        idle: names of tensors that steps lack at present; a given plan may have them.
        changed: the tensors are others than at first. A profile was of those, so costs are measured again.

    Raises:
        ConfigError: an option is invalid, or two are incompatible; the message names the expected value.
    """
    settings = context.settings()
    codec = _codec(options, settings)
    algorithm = options.algorithm if options.algorithm is not None else settings.algorithm
    ahead = options.planning.ahead if options.planning.ahead is not None else settings.planning.ahead
    planner = _planner(options.planning.planner, settings)
    plan = (
        FusionPlan.from_yaml(options.planning.plan)
        if isinstance(options.planning.plan, (str, Path))
        else options.planning.plan
    )
    if plan is not None:
        require(plan, FusionPlan, "plan", "a fusionlayer.FusionPlan, or the path of a file with one")
    if plan is None and settings.planning.plan is not None:
        with blame(settings, "plan"):
            plan = FusionPlan.from_yaml(settings.planning.plan)
            plan.without(idle).check(tensors, sum(nodes))
    if plan is not None and idle:
        plan = plan.without(idle)
    first = codec if isinstance(codec, Codec) else _by_rules(codec, tensors)
    with blame(
        settings, *(k for k, v in (("algorithm", options.algorithm), ("ahead", options.planning.ahead)) if v is None)
    ):
        for each in [first] if isinstance(first, Codec) else first.values():
            collectives.choose(each, nodes, algorithm, ahead=ahead)
    by_costs = planner.needs_costs or isinstance(codec, CodecRules) and _has_auto(codec, tensors)
    if isinstance(codec, CodecRules) and plan is None and not (algorithm is None and ahead is None):
        raise ConfigError(
            f"algorithm={algorithm!r} and ahead={ahead!r} with codec 'auto' or a policy, which choose both for each "
            "codec; leave them out"
        )
    plan_controller: PlanController | None = None
    if plan is None and by_costs:
        from ..planning.online import OnlinePlanner  # imported here, because it imports the profiler

        plan_controller = by_measuring = OnlinePlanner(
            tensors,
            planner,
            codec if isinstance(codec, CodecRules) and _has_auto(codec, tensors) else first,
            rank,
            nodes,
            algorithm=algorithm,
            ahead=ahead,
            clock=clock_of(device),
        )
        profile = options.planning.profile if options.planning.profile is not None else settings.planning.profile
        if profile is not None and not changed:
            with blame(settings, *([] if options.planning.profile is not None else ["profile"])):
                measured = Profile.from_yaml(profile) if isinstance(profile, (str, Path)) else profile
                require(measured, Profile, "profile", "the path of a file that `fusionlayer profile` has written")
                plan = by_measuring.plan_by(measured)
    fallback = settings.planning.fallback if options.planning.fallback is None else options.planning.fallback
    if fallback:
        with blame(settings, *([] if options.planning.fallback is not None else ["fallback"])):
            if plan_controller is not None:
                raise ConfigError(
                    f"fallback={fallback!r} with codec 'auto' or a planner that needs costs, which choose codecs by "
                    "what they lose and cost; leave one of them out"
                )
            plan_controller = CodecFallback(codecs.get(fallback).bare, nodes)
    return EnginePlanning(
        codec=first,
        algorithm=algorithm,
        ahead=ahead,
        planner=planners.get(PlanningSettings.planner) if planner.needs_costs else planner,
        plan=plan,
        plan_controller=plan_controller,
    )


def _codec(options: GradientOptions, settings: Config) -> Codec | CodecRules:
    """Return the codec of all gradients, or the rules that give each gradient a codec."""
    policy, fidelity = options.planning.policy, options.planning.fidelity
    if options.codec is None and policy is None:
        policy = settings.planning.policy
    elif options.codec is not None and policy is not None:
        raise ConfigError("got a codec and a policy; a policy names the codecs, so leave the codec out")
    if policy is not None:
        if options.codec_options or fidelity is not None:
            raise ConfigError("codec options and fidelity stand in the policy's file; leave them out of the arguments")
        with blame(settings, *([] if options.planning.policy is not None else ["policy"])):
            rules = CodecRules.from_yaml(policy) if isinstance(policy, (str, Path)) else policy
            require(rules, CodecRules, "policy", "a fusionlayer.CodecRules, or the path of a file with rules")
            return _in_every_step(rules)
    if (settings.codec if options.codec is None else options.codec) == AUTO:
        if options.codec_options:
            raise ConfigError(
                f"codec 'auto' takes no options, got {dict(options.codec_options)}; name them in a policy"
            )
        with blame(settings, *([] if fidelity is not None else ["fidelity"])):
            return _in_every_step(
                CodecRules((CodecRule(AUTO),), settings.planning.fidelity if fidelity is None else fidelity)
            )
    if fidelity is not None:
        raise ConfigError(f"fidelity={fidelity!r} is for codec='auto'; leave it out when you name a codec")
    return make_codec(options.codec, options.codec_options).bare


def _in_every_step(rules: CodecRules) -> CodecRules:
    """Return rules for a trainer that sends each gradient in each step; refuse others."""
    if rules.fidelity == LOCAL:
        raise ConfigError(
            "fidelity='local' is for `fusionlayer plan`, which prints how often to exchange; here expected one of: "
            f"{', '.join(fidelity for fidelity in FIDELITIES if fidelity != LOCAL)}"
        )
    return rules


def _planner(planner: str | Planner | None, settings: Config) -> Planner:
    if isinstance(planner, Planner):
        return planner
    if planner is not None:
        return planners.get(planner)
    with blame(settings, "planner", "planner_options"):
        return planners.get(settings.planning.planner, **settings.planning.planner_options)


def _by_rules(policy: CodecRules, tensors: Sequence[TensorInfo]) -> dict[str, Codec]:
    """Return the codec of each gradient until costs are known; "auto" gradients are sent raw until then."""
    rules = {tensor.name: policy.rule_for(tensor)[1] for tensor in tensors}
    return {
        name: codecs.get("raw") if rule.codec == AUTO else codecs.get(rule.codec, **rule.options).bare
        for name, rule in rules.items()
    }


def _has_auto(policy: CodecRules, tensors: Sequence[TensorInfo]) -> bool:
    return any(policy.rule_for(tensor)[1].codec == AUTO for tensor in tensors)
