"""From what a user asks for, and the settings, to an engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from .. import codecs, context
from ..codecs import Codec
from ..config import Config
from ..errors import ConfigError
from ..functional import make_codec
from ..plan import FusionPlan, TensorInfo
from ..scheduler import CPU_LANES, Engine, Scaling, Steering, planners
from ..scheduler.autotune import Autotune, Autotuner
from ..scheduler.planners import Planner
from ..scheduler.policy import AUTO, Policy, Rule
from ..scheduler.profile import Profile
from ..timeline import Timeline
from ..transport import Transport

__all__ = ["Wishes", "autotuning", "make_engine"]


@dataclass(frozen=True)
class Wishes:
    """How gradients are to be fused and encoded: arguments of ``DistributedOptimizer``; None: as settings have it."""

    codec: str | Codec | None = None
    codec_options: Mapping[str, Any] = field(default_factory=dict)
    algorithm: str | None = None
    ahead: bool | None = None
    planner: str | Planner | None = None
    plan: FusionPlan | str | Path | None = None
    profile: Profile | str | Path | None = None
    policy: Policy | str | Path | None = None
    fidelity: str | None = None
    replan: bool | None = None
    error_feedback: bool | None = None
    autotune: bool | Autotune | None = None


def make_engine(
    wishes: Wishes,
    tensors: Sequence[TensorInfo],
    transport: Transport,
    device: torch.device,
    *,
    scaling: Scaling,
    timeline: Timeline,
    overlap_forward: bool,
) -> Engine:
    """Return an engine as ``wishes`` and the job's settings want it, on a duplicate of ``transport``.

    Raises:
        ConfigError: what the wishes cannot be, with what they can.
    """
    settings = context.settings()
    codec = _codec(wishes, settings)
    algorithm = wishes.algorithm if wishes.algorithm is not None else settings.algorithm
    ahead = wishes.ahead if wishes.ahead is not None else settings.ahead
    planner = _planner(wishes.planner, settings)
    plan = FusionPlan.from_yaml(wishes.plan) if isinstance(wishes.plan, (str, Path)) else wishes.plan
    first = codec if isinstance(codec, Codec) else _by_rules(codec, tensors)
    by_costs = planner.needs_costs or isinstance(codec, Policy) and _has_auto(codec, tensors)
    if isinstance(codec, Policy) and plan is None and not (algorithm is None and ahead is None):
        raise ConfigError(
            f"algorithm={algorithm!r} and ahead={ahead!r} beside codec 'auto' or a policy, whose codecs each go their "
            "own way; leave them out"
        )
    tuning = autotuning(wishes.autotune)
    replan = settings.replan if wishes.replan is None else wishes.replan
    if tuning is not None and wishes.replan:
        raise ConfigError("replan=True beside autotune, which itself looks for drift, by measured steps; leave one out")
    steering: Steering | None = None
    if plan is None and by_costs:
        _refuse_cuda(device, planner)
        from ..scheduler.online import OnlinePlanner  # not above: it brings the profiler along

        steering = by_measuring = OnlinePlanner(
            tensors,
            planner,
            codec if isinstance(codec, Policy) and _has_auto(codec, tensors) else first,
            transport.rank,
            transport.size,
            algorithm=algorithm,
            ahead=ahead,
            replan=replan and tuning is None,
            local_size=context.local_size(),
        )
        profile = wishes.profile if wishes.profile is not None else settings.profile
        if profile is not None:
            plan = by_measuring.plan_by(Profile.from_yaml(profile) if isinstance(profile, (str, Path)) else profile)
    if tuning is not None:
        steering = Autotuner(
            tensors, tuning, transport.rank, device, overlap_forward, first=None if plan is not None else steering
        )
    return Engine(
        tensors,
        transport.duplicate(),
        codec=first,
        algorithm=algorithm,
        ahead=ahead,
        planner=planners.get(Config.planner) if planner.needs_costs else planner,
        plan=plan,
        device=device,
        error_feedback=wishes.error_feedback if wishes.error_feedback is not None else settings.error_feedback,
        scaling=scaling,
        checksum=settings.checksum,
        timeline=timeline,
        lanes=settings.lanes or (1 if device.type == "cuda" else CPU_LANES),
        overlap_forward=overlap_forward,
        steering=steering,
    )


def autotuning(asked: bool | Autotune | None) -> Autotune | None:
    """Return how to autotune, or None for not at all; ``asked`` is an argument, which the job's settings complete.

    Raises:
        ConfigError: it is something else, or the settings have options that there are not.
    """
    settings = context.settings()
    if isinstance(asked, Autotune):
        return asked
    if asked is not None and not isinstance(asked, bool):
        raise ConfigError(f"autotune={asked!r}; expected True, False or fusionlayer.Autotune(...)")
    wanted = settings.autotune if asked is None else asked
    return Autotune.of(settings.autotune_options) if wanted else None


def _codec(wishes: Wishes, settings: Config) -> Codec | Policy:
    """Return the codec of all gradients, or the policy that gives each its own."""
    policy, fidelity = wishes.policy, wishes.fidelity
    if wishes.codec is None and policy is None:
        policy = settings.policy
    elif wishes.codec is not None and policy is not None:
        raise ConfigError("got a codec and a policy; a policy names the codecs, so leave the codec out")
    if policy is not None:
        if wishes.codec_options or fidelity is not None:
            raise ConfigError("options of a codec and fidelity stand in the policy's file; leave them out")
        return Policy.from_yaml(policy) if isinstance(policy, (str, Path)) else policy
    if (settings.codec if wishes.codec is None else wishes.codec) == AUTO:
        if wishes.codec_options:
            raise ConfigError(f"codec 'auto' takes no options, got {dict(wishes.codec_options)}; name them in a policy")
        return Policy((Rule(AUTO),), settings.fidelity if fidelity is None else fidelity)
    if fidelity is not None:
        raise ConfigError(f"fidelity={fidelity!r} is for codec='auto'; a codec that is named is what it is")
    return make_codec(wishes.codec, wishes.codec_options).bare


def _planner(planner: str | Planner | None, settings: Config) -> Planner:
    if isinstance(planner, Planner):
        return planner
    if planner is not None:
        return planners.get(planner)
    return planners.get(settings.planner, **settings.planner_options)


def _by_rules(policy: Policy, tensors: Sequence[TensorInfo]) -> dict[str, Codec]:
    """Return the codec of each gradient until costs are known: as it is, where the policy leaves it to them."""
    rules = {tensor.name: policy.rule_for(tensor)[1] for tensor in tensors}
    return {
        name: codecs.get("raw") if rule.codec == AUTO else codecs.get(rule.codec, **rule.options).bare
        for name, rule in rules.items()
    }


def _has_auto(policy: Policy, tensors: Sequence[TensorInfo]) -> bool:
    return any(policy.rule_for(tensor)[1].codec == AUTO for tensor in tensors)


def _refuse_cuda(device: torch.device, planner: Planner) -> None:
    """Costs are wall and CPU seconds of the host, which on a GPU say when kernels are queued, not when they run."""
    if device.type != "cpu":
        what = f"planner {planner.name!r}" if planner.needs_costs else "codec 'auto'"
        raise ConfigError(
            f"{what} plans by costs that are measured for the CPU only, and the gradients are on {device}; give a "
            "plan, a codec by its name and a planner that needs no costs, such as 'tapered'"
        )
