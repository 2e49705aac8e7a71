"""From losses by steps, and seconds by step, to minutes until a loss.

**Levels.** Three losses: those of f32 after a fourth, a half and all of its steps, each the mean over seeds. The last
one is where f32 ends.

**Reached.** Of a method's losses the mean over seeds is taken at each look; there is no other smoothing. It reaches a
level at the step from which on it stays at or below it, which is interpolated linearly between two looks. A method
that ends above the last level, but by no more than the standard deviation of f32's final losses over seeds, reaches it
with its last step: other seeds of f32 do so, too.

**Minutes.** Each step until the one that reaches a level takes the median step on that link. A method whose first
steps are of another kind, such as PowerSGD's ten uncompressed ones, has two such medians. A density that warms up is
counted as if it were warm. Minutes of a method with fewer seeds than others say so.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from .links import LINKS, Link
from .methods import family, losses_of, over_connections, phases, steps_of, version
from .records import Found

__all__ = ["BASELINE", "SHARES", "checks", "columns", "levels", "mean_curve", "overview", "reached", "scores"]

BASELINE = "ddp"
SHARES = (0.25, 0.5, 1.0)
"""Of f32's steps, after which its losses are the levels."""

Row = Mapping[str, Any]
Curve = list[tuple[float, float]]


def mean_curve(runs: Sequence[Row]) -> Curve:
    """Return (step, mean loss over runs) at each step at which all runs have looked."""
    points: dict[float, list[float]] = {}
    for run in runs:
        for step, loss in run["losses"]:
            points.setdefault(step, []).append(loss)
    return [(step, statistics.fmean(at)) for step, at in sorted(points.items()) if len(at) == len(runs)]


def levels(curve: Curve) -> tuple[float, ...]:
    """Return the losses of f32's mean curve after ``SHARES`` of its steps, interpolated between two looks."""
    return tuple(_at(curve, share * curve[-1][0]) for share in SHARES)


def _at(curve: Curve, step: float) -> float:
    for (before, high), (after, low) in zip(curve, curve[1:], strict=False):
        if step <= before:
            return high
        if step < after:
            return high + (low - high) * (step - before) / (after - before)
    return curve[-1][1]


def reached(curve: Curve, level: float) -> float | None:
    """Return the step from which on a mean curve stays at or below ``level``; None if it ends above, or is NaN."""
    last = curve[-1]
    if not last[1] <= level:
        return None
    for (before, loss_before), (after, loss_after) in zip(curve[-2::-1], curve[:0:-1], strict=True):
        if not loss_before <= level:
            if loss_before == float("inf") or loss_before != loss_before:
                return after
            return after - (after - before) * (level - loss_after) / (loss_before - loss_after)
    return curve[0][0]


def scores(found: Found, seeds: Sequence[int]) -> list[dict[str, Any]]:
    """Return a row for each method and link, and for each method that no link has steps of, with its losses alone.

    Args:
        found: what was measured; DDP's losses are among it, or there are no levels.
        seeds: whose losses count.
    """
    links = sorted({link for link, _ in found.steps}, key=_order)
    names = dict.fromkeys([*(method for method, _ in found.losses), *(method for _, method in found.steps)])
    timed_methods = {method for _, method in found.steps}
    for method, _ in found.losses:
        more = over_connections(method, timed_methods)
        names.update((name, None) for name in more if {part for _, part in phases(name)} <= timed_methods)
    wanted = [name for name in names if name not in ("alone", "ddp-again")]
    base = _runs(found, BASELINE, seeds)
    curve = mean_curve(base) if base else []
    goals = levels(curve) if curve else ()
    finals = [run["final"] for run in base]
    spread = statistics.stdev(finals) if len(finals) > 1 else 0.0
    rows = []
    for name in _with_timed(wanted, found):
        row = _losses(found, name, seeds, goals, spread, curve)
        timed = [_steps(row, found, link) for link in _timed(found, name, links)]
        rows += timed or [row]
    return rows


def _order(text: str) -> int:
    known = [str(link) for link in LINKS]
    return known.index(text) if text in known else len(known)


def _timed(found: Found, name: str, links: Sequence[str]) -> list[Link]:
    parts = [timed for _, timed in phases(name)]
    return [Link(*link.split("/")) for link in links if all((link, timed) in found.steps for timed in parts)]


def _with_timed(names: Sequence[str], found: Found) -> list[str]:
    """Return the names without those that are only timed in place of another one."""
    have = {method for method, _ in found.losses}
    stand_ins = {steps_of(name) for name in {*have, *names} if steps_of(name) != name}
    return [name for name in names if name in have or losses_of(name) in have or name not in stand_ins]


def _runs(found: Found, name: str, seeds: Sequence[int]) -> list[Row]:
    return [found.losses[losses_of(name), seed] for seed in seeds if (losses_of(name), seed) in found.losses]


def _losses(
    found: Found, name: str, seeds: Sequence[int], goals: Sequence[float], spread: float, base: Curve
) -> dict[str, Any]:
    runs = _runs(found, name, seeds)
    finals = [run["final"] for run in runs]
    row: dict[str, Any] = {
        **{"kind": "score", "method": name, "family": family(name), "version": version(name)},
        **{"link": None, "rate": None, "rtt": None, "seeds": len(runs), "of_seeds": len(seeds)},
        "final": statistics.fmean(finals) if finals else None,
        "spread": statistics.stdev(finals) if len(finals) > 1 else None,
        **{"above": None, "differences": []},
        "best": None,
        "levels": list(goals),
        "steps": [None] * len(SHARES),
        "within_spread": False,
    }
    if not runs:
        return row
    curve = mean_curve(runs)
    row["best"] = min(loss for _, loss in curve)
    if base:
        same = [run["final"] for run in _runs(found, BASELINE, [run["seed"] for run in runs])]
        if len(same) == len(finals):
            row["above"] = statistics.fmean(finals) / statistics.fmean(same) - 1
            row["differences"] = [mine / theirs - 1 for mine, theirs in zip(finals, same, strict=True)]
    if base:
        row["steps"] = [reached(curve, goal) for goal in goals]
        if row["steps"][-1] is None and curve[-1][1] <= goals[-1] + spread:
            row["steps"][-1], row["within_spread"] = curve[-1][0], True
    return row


def _steps(row: Mapping[str, Any], found: Found, link: Link) -> dict[str, Any]:
    name = row["method"]
    timed = found.steps[str(link), steps_of(name)]
    return {
        **row,
        **{"link": str(link), "rate": link.rate, "rtt": link.rtt},
        **{key: timed[key] for key in ("step_seconds", "bytes_per_step", "bound_seconds", "compute_seconds")},
        "over_ddp": timed["speedup"]["median"],
        "minutes": [None if step is None else _minutes_until(step, name, found, link) for step in row["steps"]],
    }


def _minutes_until(step: float, name: str, found: Found, link: Link) -> float:
    """Return the minutes of so many steps on a link, where all parts of the method have been timed."""
    parts = phases(name)
    ends = [*(first for first, _ in parts[1:]), step]
    return sum(
        max(0.0, min(end, step) - first) * found.steps[str(link), timed]["step_seconds"] / 60
        for (first, timed), end in zip(parts, ends, strict=True)
    )


def columns(row: Row) -> dict[str, str]:
    """Return the cells of one link's table, which fits 80 columns but for long names."""
    minutes = row.get("minutes") or [None] * len(SHARES)
    return {
        "method": row["method"],
        "step, ms": f"{row['step_seconds'] * 1e3:.0f}",
        "bound": f"{row['bound_seconds'] * 1e3:.0f}",
        "MB sent": f"{row['bytes_per_step'] / 1e6:.3g}",
        "loss": _number(row["final"], ".3f"),
        **{
            f"to {goal:.3f}": _minutes(each, row, place)
            for place, (goal, each) in enumerate(zip(row["levels"], minutes, strict=False))  # none without DDP's losses
        },
    }


def _minutes(minutes: float | None, row: Row, place: int) -> str:
    if minutes is not None:
        about = "~" if row["within_spread"] and place == len(SHARES) - 1 else ""
        few = f" ({row['seeds']} of {row['of_seeds']} seeds)" if row["seeds"] < row["of_seeds"] else ""
        return f"{about}{minutes:.3g}{few}"
    if not row["levels"]:
        return ""
    if row["final"] is None:
        return "no loss"
    return f"— ({row['best']:.3f})"  # a dash of ASCII would begin a list


def overview(rows: Sequence[Row]) -> list[dict[str, str]]:
    """Return the one table: a line for each method, with its loss and the minutes to f32's final loss on each link."""
    links = list(dict.fromkeys(row["link"] for row in rows if row["link"]))
    lines = []
    for name in dict.fromkeys(row["method"] for row in rows):
        mine = [row for row in rows if row["method"] == name]
        row, timed = mine[0], {each["link"]: each for each in mine if each["link"]}
        spread = f" ± {row['spread']:.3f}" if row["spread"] is not None else ""
        line = {
            "method": name,
            "seeds": str(row["seeds"]),
            "final loss": _number(row["final"], ".3f") + spread,
            "above f32": _number(row["above"], "+.2%"),
            "by seed": " to ".join(f"{end(row['differences']):+.2%}" for end in (min, max) if row["differences"]),
            "MB a step": _range([each["bytes_per_step"] / 1e6 for each in timed.values()]),
        }
        for link in links:
            each = timed.get(link)
            line[Link(*link.split("/")).words] = _minutes(each["minutes"][-1], each, len(SHARES) - 1) if each else ""
        lines.append({**line, "version": row["version"]})
    return lines


def _range(values: Sequence[float]) -> str:
    return " to ".join(dict.fromkeys(f"{end(values):.3g}" for end in (min, max))) if values else ""


def checks(found: Found) -> list[dict[str, str]]:
    """Return a line for each run that was timed as a whole: its minutes and loss beside those that were computed."""
    lines = []
    for (method, link, seed), run in found.measured.items():
        steps, seconds = run["seconds"][-1]
        place = Link(*link.split("/"))
        apart = found.losses.get((losses_of(method), seed))
        computed = _minutes_until(steps, method, found, place) if _timed(found, method, [link]) else None
        lines.append(
            {
                **{"method": method, "network": place.words, "seed": str(seed)},
                "computed, min": _number(computed, "#.3g"),
                "measured, min": f"{seconds / 60:#.3g}",
                "difference": _number(computed and computed / (seconds / 60) - 1, "+.1%"),
                "loss": _number(apart and apart["final"], ".4f"),
                "loss here": f"{run['final']:.4f}",
            }
        )
    return lines


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)
