"""One picture of the scoreboard: minutes to f32's final loss against bandwidth."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from benchmarks import drawing

from .links import Link
from .summary import BASELINE

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["picture", "shown"]

Row = Mapping[str, Any]

MOST_PEERS, MOST_OURS = 2, 4
"""Lines: more of them could not be told apart at a glance. The table has all methods."""


_WARM_UP = re.compile(r"\+(freeze_step|warmup_codec|warmup_steps)=[^+]*")
"""Words of a method's name that are about its first steps; a picture has no room for them."""


def shown(rows: Sequence[Row]) -> list[str]:
    """Return the methods that are drawn: DDP, the peers, and those of ours, that are first on some link."""
    reached = [row for row in rows if row["link"] and row["minutes"][-1] is not None]
    winners: dict[str, list[str]] = {"peer": [], "ours": []}
    for link in dict.fromkeys(row["link"] for row in reached):
        for side, methods in winners.items():
            there = [row for row in reached if row["link"] == link and _side(row) == side]
            if there:
                methods.append(min(there, key=lambda row: float(row["minutes"][-1]))["method"])
    peers = list(dict.fromkeys(winners["peer"]))[:MOST_PEERS]
    ours = list(dict.fromkeys([*winners["ours"], *_steady(reached)]))[:MOST_OURS]
    return [*([BASELINE] if any(row["method"] == BASELINE for row in reached) else []), *peers, *ours]


def _side(row: Row) -> str:
    return {"local": "ours"}.get(row["family"], row["family"])


def _steady(rows: Sequence[Row]) -> list[str]:
    """Return the methods of ours that exchange in each step, the fastest first over all links."""
    minutes: dict[str, float] = {}
    for row in rows:
        if row["family"] == "ours":
            minutes[row["method"]] = minutes.get(row["method"], 0.0) + row["minutes"][-1]
    return sorted(minutes, key=minutes.__getitem__)[:1]


def picture(rows: Sequence[Row]) -> Figure:
    """Return a panel for each round trip: minutes to f32's final loss, from fast links to slow ones, a line a method.

    Methods that never get to that loss are not drawn. The dotted line is what computing alone takes.
    """
    from matplotlib.ticker import LogLocator, NullLocator, StrMethodFormatter

    timed = [row for row in rows if row["link"]]
    names = shown(timed)
    trips = list(dict.fromkeys(row["rtt"] for row in timed))
    figure = drawing.figure(max(6.5, 3.9 * len(trips)), 3.4)
    ours = [name for name in names if any(row["method"] == name and _side(row) == "ours" for row in timed)]
    colours = dict(zip(ours, itertools.cycle(drawing.PALETTE), strict=False))
    panels = figure.subplots(1, len(trips), squeeze=False, sharey=True)[0]
    for axes, trip in zip(panels, trips, strict=True):
        here = [row for row in timed if row["rtt"] == trip]
        links = sorted({Link(row["rate"], trip) for row in here}, key=lambda link: -link.megabits)
        for name in names:
            mine = [row for row in here if row["method"] == name]
            found = {row["rate"]: row["minutes"][-1] for row in mine}
            points = [(x, found[link.rate]) for x, link in enumerate(links) if found.get(link.rate) is not None]
            if points:
                form = "o-" if name in colours else "o--"
                few = [f", {row['seeds']} of {row['of_seeds']} seeds" for row in mine if row["seeds"] < row["of_seeds"]]
                label = _WARM_UP.sub("", name) + (few[0] if few else "")
                axes.plot(*zip(*points, strict=True), form, label=label, color=colours.get(name, drawing.GREY))
        axes.plot(
            range(len(links)), _computing(here, links), ":", color="black", linewidth=1.0, label="computing alone"
        )
        axes.set(
            title=f"round trip {links[0].trip}",
            yscale="log",
            xlim=(-0.15, len(links) - 0.85),
            xlabel="rate of the link",
        )
        axes.set_xticks(range(len(links)), [link.words.split(", ")[0] for link in links])
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.grid(axis="y")
    for axes in panels:
        drawing.name_lines(axes)
    panels[0].set_ylabel(f"minutes to loss {timed[0]['levels'][-1]:.3f}")
    figure.suptitle(_statement(timed), x=0.01, ha="left")
    return figure


def _computing(rows: Sequence[Row], links: Sequence[Link]) -> list[float]:
    """Return the minutes that computing f32's steps takes, from link to link."""
    steps = max((row["steps"][-1] for row in rows if row["method"] == BASELINE and row["steps"][-1]), default=0.0)
    by_rate = {row["rate"]: row["compute_seconds"] * steps / 60 for row in rows}
    return [by_rate[link.rate] for link in links]


def _statement(rows: Sequence[Row]) -> str:
    """Return who is first on the slowest link of the shortest round trip, in words."""
    first = rows[0]["rtt"]
    slow = min((Link(row["rate"], first) for row in rows if row["rtt"] == first), key=lambda link: link.megabits)
    there = {
        row["method"]: row["minutes"][-1] for row in rows if row["link"] == str(slow) and row["minutes"][-1] is not None
    }
    if not there:
        return "no method reaches f32's loss"
    best = min(there, key=lambda name: float(there[name]))
    beside = f", DDP after {there[BASELINE]:.3g}" if BASELINE in there and best != BASELINE else ""
    name, place = _WARM_UP.sub("", best), slow.words.split(", ")[0]
    return f"f32's final loss at {place}: {name} after {there[best]:.3g} minutes{beside}"
