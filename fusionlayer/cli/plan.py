"""``fusionlayer plan``: a fusion plan from a measured profile."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from ..base.errors import ConfigError
from ..base.plan import FusionPlan
from ..codecs import Codec
from ..planning.bucket_costs import short_name
from ..planning.cluster import Scenario
from ..planning.codec_rules import AUTO, LOCAL, CodecRule, CodecRules
from ..planning.cost_model import parse_rate
from ..planning.local_choice import LocalChoice, choose_local
from ..planning.losses import LossCosts
from ..planning.measured_losses import MEASURED
from ..planning.plans import make_plan
from ..planning.prediction import predict_plan
from ..planning.profile import Profile
from ..planning.selection import Selection, select
from ..planning.simulation import SimulatedStep
from ..scheduler import planners
from ..scheduler.planners import Planner
from .arguments import as_options, check_file
from .outputs import keep
from .progress import ProgressLine
from .resolve import get_codec, scenario_of
from .tables import Column, Table, print_text, show
from .units import SECONDS, in_one_unit


def run(options: argparse.Namespace) -> None:
    """Make the plan, or the comparison, that ``options`` ask for."""
    if options.out is not None:
        check_file(options.out, "--out")
    profile = Profile.from_yaml(options.profile)
    codec = _codec(options)
    skips = isinstance(codec, CodecRules) and codec.fidelity == LOCAL
    if (options.loss_budget is not None or options.losses) and not skips:
        raise ConfigError("--loss-budget and --losses are for --codec auto --fidelity local, which may skip steps")
    planner = planners.get(options.planner or "safusion", **as_options(options.planner_option))
    if options.compare:
        rates = sorted(options.rates or [scenario_of(options, profile).rate], key=parse_rate)
        scenarios = [scenario_of(options, profile, rate) for rate in rates]
        compare(profile, codec, scenarios, options)
    if options.out is not None:
        scenario = scenario_of(options, profile)
        if isinstance(codec, CodecRules) and codec.fidelity == LOCAL:
            choice = _choose_local(profile, planner, codec, scenario, options)
            plan, found = choice.selection.plan, choice.selection.prediction
            _show_codecs(profile, choice.selection, options.columns)
            _show_ways(choice, options)
        elif isinstance(codec, CodecRules):
            chosen = _select(profile, planner, codec, scenario, options)
            plan, found = chosen.plan, chosen.prediction
            _show_codecs(profile, chosen, options.columns)
        else:
            plan, found = predicted(profile, planner, codec, scenario, options)
        keep(options.out, plan.to_yaml, "--out")
        print_text(
            f"{options.out}: {len(plan.buckets)} buckets of {len(profile.model.tensors)} tensors; predicted "
            f"{_ms(found.seconds)} ms from the start of backward to the last result, of which {_ms(found.waiting)} ms "
            f"waiting{plan.reason and f'. {plan.reason}'}"
        )


def _codec(options: argparse.Namespace) -> Codec | CodecRules:
    """Return the codec of all gradients, or the rules that give each gradient its codec."""
    if options.policy is None and options.codec != AUTO:
        if options.fidelity:
            raise ConfigError("--fidelity is for --codec auto; a codec given by name needs none")
        return get_codec(options.codec, options.codec_option, options.density)
    if options.algorithm is not None or options.ahead is not None:
        raise ConfigError("--algorithm and --ahead are for one codec; a policy and auto choose their own")
    if options.policy is None:
        return CodecRules((CodecRule(AUTO),), options.fidelity or "near_lossless")
    if options.fidelity:
        raise ConfigError("--fidelity is for --codec auto; a policy names it in its file")
    return CodecRules.from_yaml(options.policy)


def _select(
    profile: Profile, planner: Planner, policy: CodecRules, scenario: Scenario, options: argparse.Namespace
) -> Selection:
    return select(profile, policy, planner, scenario, options.workers, measured=_measured(options))


def _choose_local(
    profile: Profile, planner: Planner, policy: CodecRules, scenario: Scenario, options: argparse.Namespace
) -> LocalChoice:
    return choose_local(
        profile,
        policy,
        planner,
        scenario,
        options.workers,
        budget=options.loss_budget,
        losses=LossCosts.from_yaml(options.losses) if options.losses else MEASURED,
        measured=_measured(options),
    )


def _show_ways(choice: LocalChoice, options: argparse.Namespace) -> None:
    """Print the best way of each codec, which one to train with, and why."""
    found = [way for way, _ in choice.others]
    table = Table(
        "How often to send, as predicted",
        [
            Column("codec", [way.codec for way in found], text=True),
            Column("sends", [way.when for way in found], text=True),
            Column("mean step", [_ms(way.seconds) for way in found], "ms"),
            Column("loss", ["?" if way.loss is None else f"{way.loss.percent:+.1f}" for way in found], "%"),
            Column("verdict", [verdict for _, verdict in choice.others], text=True, wraps=True),
        ],
    )
    show([table], options.columns)
    sync = "" if choice.way.sync is None else f", sync=fusionlayer.Local.{choice.way.sync}"
    print_text(f'{"Local steps" if sync else "No local steps"}: plan="{options.out}"{sync}')
    for sentence in choice.reason.splitlines():
        print_text(sentence)
    print()


def _show_codecs(profile: Profile, chosen: Selection, columns: Sequence[str] | None) -> None:
    """Print the codec of each gradient, and the reason."""
    tensors = profile.model.tensors
    choices = [chosen.choices[tensor.name] for tensor in tensors]
    table = Table(
        "Codecs",
        [
            Column("tensor", [tensor.name for tensor in tensors], text=True),
            Column("elements", [str(tensor.numel) for tensor in tensors], gives_way=1),
            Column("codec", [short_name(choice.codec) for choice in choices], text=True),
            Column("why", [choice.reason for choice in choices], text=True, wraps=True),
        ],
    )
    show([table], columns)
    if chosen.verdict:
        print_text(f"{chosen.verdict[0].upper()}{chosen.verdict[1:]}.")


def _measured(options: argparse.Namespace) -> bool:
    """Return whether measured costs of collectives may be used: only if no network is named."""
    return options.rate is None and not options.rates


def predicted(
    profile: Profile,
    planner: Planner,
    codec: Codec | CodecRules,
    scenario: Scenario,
    options: argparse.Namespace,
) -> tuple[FusionPlan, SimulatedStep]:
    """Return a planner's plan and its timeline."""
    if isinstance(codec, CodecRules):
        chosen = _select(profile, planner, codec, scenario, options)
        return chosen.plan, chosen.prediction
    measured = _measured(options)
    plan = make_plan(
        profile,
        planner,
        codec,
        scenario,
        options.workers,
        algorithm=options.algorithm,
        ahead=options.ahead,
        measured=measured,
    )
    return plan, predict_plan(profile, plan, scenario, measured)


def compare(
    profile: Profile, codec: Codec | CodecRules, scenarios: Sequence[Scenario], options: argparse.Namespace
) -> None:
    """Print a table for each rate: the predicted figures of each planner's plan."""
    names = planners.names()
    total = len(scenarios) * len(names)
    tables: list[Table] = []
    with ProgressLine("plan", total) as progress:
        for scenario in scenarios:
            found: list[tuple[FusionPlan, SimulatedStep]] = []
            for name in names:
                progress.at(len(tables) * len(names) + len(found), f"{name} at {scenario.rate}")
                found.append(predicted(profile, planners.get(name), codec, scenario, options))
            steps = [step for _, step in found]
            unit, (waiting, idle, seconds) = in_one_unit(
                SECONDS, *([getattr(step, what) for step in steps] for what in ("waiting", "idle", "seconds"))
            )
            codecs = codec if isinstance(codec, Codec) else "codecs by policy"
            title = f"{profile.title}: {codecs} on {options.workers} workers at {scenario.rate}, predicted"
            columns = [
                Column("planner", names, text=True),
                Column("buckets", [str(len(plan.buckets)) for plan, _ in found]),
                *(Column("waiting", waiting, unit), Column("idle", idle, unit), Column("step", seconds, unit)),
            ]
            tables.append(Table(title, columns))
    show(tables, options.columns)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f}"
