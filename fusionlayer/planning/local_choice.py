"""Chooses codec, number of local steps and overlap together: by predicted steps, and by losses that were measured."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from ..base.errors import ConfigError
from ..scheduler.planners import Planner
from .bucket_costs import short_name
from .cluster import Scenario
from .codec_rules import LOCAL, CodecRules
from .fidelities import BUDGET
from .local_steps import MOST, TOLERANCE
from .losses import LossCost, LossCosts
from .measured_losses import MEASURED
from .prediction import PlannedBucket, plan_costs, predict, predict_local_steps
from .profile import Profile
from .selection import Selection, ways

_LOSSLESS = "it changes no bit"


@dataclass(frozen=True)
class SyncChoice:
    """A codec, and the number of steps between two syncs with it.

    Attributes:
        codec: its name; the names of all, if tensors have different ones.
        sync: see ``LossCost``.
        every, fragments, delay: as in ``LossCost``.
        seconds: predicted mean step.
        loss: its measured cost in loss; None: that was not measured.
    """

    codec: str
    sync: str | None
    every: int
    fragments: int
    delay: int
    seconds: float
    loss: LossCost | None

    @property
    def when(self) -> str:
        """How often it sends, in words."""
        if self.sync is None:
            return "each step"
        preset = self.sync.partition("(")[0]
        return f"{'' if preset == 'averaging' else f'{preset}, '}every {self.every} steps"


@dataclass(frozen=True)
class LocalChoice:
    """The chosen way, and why.

    Attributes:
        way: the chosen way.
        selection: its codecs and plan.
        reason: in words.
        others: the best way of each codec, the chosen one first, each with arguments for or against it.
    """

    way: SyncChoice
    selection: Selection
    reason: str
    others: tuple[tuple[SyncChoice, str], ...]


def choose_local(
    profile: Profile,
    policy: CodecRules,
    planner: Planner,
    scenario: Scenario,
    workers: int,
    *,
    budget: float | None = None,
    losses: LossCosts = MEASURED,
    measured: bool = False,
    most: int = MOST,
) -> LocalChoice:
    """Return codec, number of local steps and overlap for a profile's model.

    The network is no bottleneck if the mean step is at most 5 % longer than its computing. Of these ways, measured
    losses come first, the least loss before the others. Of the others the shortest period comes first, and waiting
    before overlap. If the network always is a bottleneck, the fastest way is chosen.

    Args:
        profile: the costs; "auto" chooses among its codecs.
        policy: rules for codecs, of fidelity "local".
        planner: makes the buckets.
        scenario: the cluster.
        workers: number of ranks.
        budget: percent of the final loss that a way may cost; ways without a measured loss are left out. None: ways
            without a measured loss are allowed, and measured losses above 2 % are left out.
        losses: measured losses; of local steps only those of at least this many workers, if there are any.
        measured: see ``costs_of``.
        most: the longest period that is tried; "averaging" and "overlapped" are tried with 2, 4, 8, ... steps. Ways
            measured with more fragments than the plan has buckets are not tried.

    Raises:
        ConfigError: the profile lacks costs, no rule fits a tensor, no way is within the budget, or the fidelity is not
            "local".
    """
    if policy.fidelity != LOCAL:
        raise ConfigError(f"fidelity={policy.fidelity!r}; only {LOCAL!r} may skip steps")
    losses = losses.at(workers)
    model = profile.model
    compute = model.forward + model.backward + model.optimizer
    limit = (1 + TOLERANCE) * compute

    def tried(codec: str, selection: Selection) -> Iterator[SyncChoice]:
        """Yield ways of a codec, up to the shortest period with which the network is no bottleneck."""
        plan = selection.plan

        def way(sync: str | None, every: int = 1, fragments: int = 1, delay: int = 0) -> SyncChoice:
            if sync is None:
                costs = plan_costs(profile, plan, scenario, measured)
                buckets = [PlannedBucket(bucket.names, cost) for bucket, cost in zip(plan.buckets, costs, strict=True)]
                seconds = predict(model, buckets).seconds
            else:
                seconds = predict_local_steps(
                    profile, plan, scenario, every, fragments=fragments, delay=delay, measured=measured
                ).seconds
            return SyncChoice(codec, sync, every, fragments, delay, seconds, _loss(losses, selection, codec, sync))

        yield way(None)
        for overlapped in (False, True):
            every, enough = 2, False
            while every <= most and not enough:
                if overlapped:
                    found = way(*_overlapped(every, len(plan.buckets)))
                else:
                    found = way(f"averaging(every={every})", every)
                yield found
                every, enough = 2 * every, found.seconds <= limit
        for cost in losses.local(codec):
            if cost.every <= most and cost.fragments <= len(plan.buckets):
                yield way(cost.sync, cost.every, cost.fragments, cost.delay)

    alone, others_of_all = ways(profile, policy, planner, scenario, workers, measured)
    found = {_codecs_of(selection): selection for selection in (alone, *others_of_all.values())}
    every_way = [way for codec, selection in found.items() for way in tried(codec, selection)]
    # A codec's cost in each step counts in full, although steps are skipped.
    bad = {codec for codec in found if (each := losses.of(codec)) is not None and not _allows(each, budget)}
    # Nor is a period that costs one codec too much assumed to be better with another.
    known = [cost for codec in found.keys() - bad for cost in losses.local(codec)]
    too_long = min((cost.every for cost in known if not _allows(cost, budget)), default=math.inf)
    believed = [way for way in every_way if way.loss is not None or (way.codec not in bad and way.every < too_long)]
    allowed = [way for way in believed if _allows(way.loss, budget)]
    if not allowed:
        raise ConfigError(
            f"no codec of the profile was measured to cost at most {BUDGET if budget is None else budget:g} % of the "
            "loss; give a larger budget, measure losses, or leave the budget out"
        )
    best = min(allowed, key=lambda way: _preference(way, limit))
    others = [best]
    for codec in found:
        if codec != best.codec:
            own = [way for way in allowed if way.codec == codec] or [way for way in every_way if way.codec == codec][:1]
            others.append(min(own, key=lambda way: _preference(way, limit)))
    others[1:] = sorted(others[1:], key=lambda way: (way not in allowed, _preference(way, limit)))
    return LocalChoice(
        best,
        found[best.codec].because(f"auto, {policy.fidelity}: {best.codec}, {best.when}"),
        _reason(best, every_way, allowed, compute, limit),
        tuple((way, _verdict(way, best, budget, limit)) for way in others),
    )


def _overlapped(every: int, buckets: int) -> tuple[str, int, int, int]:
    """Return averaging of this many steps under the next step, by name, with its period, fragments and delay."""
    if buckets >= every:
        return f"overlapped(every={every})", every, every, 1
    return f"overlapped(every={every}, fragments={buckets})", every, buckets, 1


def _codecs_of(selection: Selection) -> str:
    return " and ".join(sorted({short_name(choice.codec) for choice in selection.choices.values()}))


def _loss(losses: LossCosts, selection: Selection, codec: str, sync: str | None) -> LossCost | None:
    if sync is None and all(choice.codec.lossless for choice in selection.choices.values()):
        return LossCost(codec, 0.0, _LOSSLESS)
    return losses.of(codec, sync)


def _allows(loss: LossCost | None, budget: float | None) -> bool:
    if loss is None:
        return budget is None
    return loss.percent <= (BUDGET if budget is None else budget)


def _preference(way: SyncChoice, limit: float) -> tuple[object, ...]:
    """Return the sort key of ways; the smallest wins."""
    if way.seconds > limit:
        return (True, way.seconds)
    return (False, way.loss is None, 0.0 if way.loss is None else way.loss.percent, way.every, way.delay, way.seconds)


def _verdict(way: SyncChoice, best: SyncChoice, budget: float | None, limit: float) -> str:
    if way is best:
        return "chosen"
    if not _allows(way.loss, budget):
        return "loss not measured" if way.loss is None else "above the budget"
    return "waits for the network" if way.seconds > limit else "no bottleneck either"


def _reason(
    best: SyncChoice, every_way: Iterable[SyncChoice], allowed: Iterable[SyncChoice], compute: float, limit: float
) -> str:
    """Return why a way was chosen, in sentences."""
    told = f"A mean step is predicted to take {_ms(best.seconds)}, and computes for {_ms(compute)}"
    told += ".\n" if best.seconds <= limit else ": the network is a bottleneck still.\n"
    more = [way for way in every_way if way.codec == best.codec and way.every < best.every and way.delay <= best.delay]
    more = [way for way in more if way.seconds > best.seconds]
    if more:
        shown = [more[0], *more[1:][-1:]]
        told += f"More often would take longer: {'; '.join(f'{way.when} {_ms(way.seconds)}' for way in shown)}.\n"
    if best.loss is None:
        told += "What it costs in loss was not measured: compare a short training with one that sends in each step."
    elif best.loss.source == _LOSSLESS:
        told += f"As to loss, {_LOSSLESS} of a gradient."
    else:
        seeds = f"{best.loss.seeds} seed{'s' if best.loss.seeds > 1 else ''}"
        told += f"Its final loss was {best.loss.percent:+.1f} % of that of f32 ({best.loss.source}, {seeds})."
    faster = [way for way in every_way if way.loss is None and way.seconds < best.seconds and way not in allowed]
    if faster and best.seconds > limit:
        way = min(faster, key=lambda way: _preference(way, limit))
        told += f"\nFaster, but its loss was not measured: {way.codec}, {way.when}, {_ms(way.seconds)}."
    return told


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms"
