"""``fusionlayer autotune``: what autotuning has tried and chosen, from its log."""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict

from ..errors import ConfigError
from ..planning.autotune.log import TrialRow, read_log
from .outputs import check_picture, keep_picture
from .pictures import draw_trials
from .tables import Column, Table, print_text, show
from .units import SECONDS, in_one_unit, in_words

__all__ = ["run"]

_LOOK = "look"


def run(options: argparse.Namespace) -> None:
    """Print what ``options`` ask for."""
    if options.plot:
        check_picture(options.plot)
    rows = read_log(options.log)
    if not rows:
        raise ConfigError(f"log {options.log} has no trials yet; the first comes after some ten steps of training")
    if options.json:
        print(json.dumps([asdict(row) for row in rows], indent=1))
    else:
        print_text(_verdict(rows))
        print()
        show([_plans(rows)], options.columns)
    if options.plot:
        keep_picture(options.plot, lambda: draw_trials(rows))


def _verdict(rows: Sequence[TrialRow]) -> str:
    """Return which plan is the best, since when, and what its step takes beside that of the first one."""
    best = rows[-1].best
    since = next(row.step for i, row in enumerate(rows) if all(later.best == best for later in rows[i:]))
    words = f"After {rows[-1].step} steps and {len([row for row in rows if row.stage != _LOOK])} trials "
    if best == rows[0].best:
        return words + f"the plan that training began with is still the best: {_spell(best)}."
    before, after = ([row.seconds for row in rows if row.plan == plan == row.best] for plan in (rows[0].best, best))
    times = ""
    if before and after:
        times = f", {in_words(statistics.median(after), SECONDS)} a step instead of "
        times += in_words(statistics.median(before), SECONDS)
    return words + f"the best plan is {_spell(best)}{times}; it won in step {since} or just before."


def _spell(plan: tuple[str, int]) -> str:
    shape, buckets = plan
    return f"{buckets} bucket{'s' if buckets > 1 else ''}, {shape}"


def _plans(rows: Sequence[TrialRow]) -> Table:
    """Return a table of the plans that were tried, the fastest first."""
    trials: dict[tuple[str, int], list[TrialRow]] = {}
    for row in rows:
        trials.setdefault(row.plan, []).append(row)
    ratios = {plan: statistics.median(_ratios(mine)) for plan, mine in trials.items()}
    best = rows[-1].best
    plans = sorted(trials, key=lambda plan: (plan != best, ratios[plan]))
    unit, (seconds,) = in_one_unit(SECONDS, [statistics.median(row.seconds for row in trials[plan]) for plan in plans])
    columns = [
        Column("buckets", [str(buckets) for _, buckets in plans]),
        Column("shape", [shape for shape, _ in plans], text=True),
        Column("trials", [str(len(trials[plan])) for plan in plans]),
        Column("step", seconds, unit),
        Column("to best", [f"{ratios[plan]:.2f}" for plan in plans], "x"),
        Column("", ["best" if plan == best else "" for plan in plans], text=True),
    ]
    return Table("Plans that were tried", columns)


def _ratios(rows: Sequence[TrialRow]) -> list[float]:
    """Return the ratios of trials against the best plan of their time; 1 for a plan that was never a challenger."""
    return [row.ratio for row in rows if not row.is_best] or [1.0]
