"""The table and the picture of all rounds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fusionlayer.cli import drawing

from .verdict import FAILURES, GOALS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["picture", "table_of", "worst"]

Row = Mapping[str, Any]
OURS, THEIRS = "fusionlayer", "DDP on gloo"


def table_of(rows: Sequence[Row]) -> list[dict[str, str]]:
    """Return a row for each kind of attack: counts of what happened, with those of plain DDP behind a slash."""
    lines = []
    for attack in [*dict.fromkeys(row["attack"] for row in rows), None]:
        mine, theirs = (
            [row for row in rows if row["ours"] is ours and attack in (None, row["attack"])] for ours in (True, False)
        )
        line = {"attack": attack or "all", "rounds": _both(len(mine), len(theirs), theirs)}
        for ending in ("error", "warning", "harmless"):
            counts = [sum(row["ending"] == ending for row in side) for side in (mine, theirs)]
            line[ending] = _both(counts[0], counts[1], theirs)
        longest = [
            max((row["seconds"] for row in side if row["seconds"] is not None), default=None) for side in (mine, theirs)
        ]
        times = ["-" if each is None else f"{each:.1f}" for each in longest[: 1 + bool(theirs)]]
        line["longest, s"] = " / ".join(times) if {*times} != {"-"} else "-"  # a cell "- / -" would begin a list
        for kind in FAILURES:
            counts = [sum(kind in row["verdict"] for row in side) for side in (mine, theirs)]
            if kind in GOALS or any(kind in row["verdict"] for row in rows):
                line[kind] = _both(counts[0], counts[1], theirs)
        lines.append(line)
    return lines


def _both(mine: int, theirs: int, there: Sequence[Row]) -> str:
    return f"{mine} / {theirs}" if there else str(mine)


def worst(rows: Sequence[Row]) -> Iterator[str]:
    """Yield a line of explanation, and a line for each round of fusionlayer's in which something was wrong."""
    yield "Numbers behind a slash are of plain DDP on gloo. Columns:"
    yield from (f"- {kind}: {text}" for kind, text in FAILURES.items() if kind in GOALS)
    wrong = [row for row in rows if row["ours"] and row["verdict"] != ["ok"]]
    if wrong:
        yield f"\n{len(wrong)} rounds of fusionlayer's are not as they should be:"
    for row in wrong:
        where = f"{row['front']}, {row['world']} ranks, store of {row['keeper']}"
        yield f"- {row['attack']}, {where}, {row['what']}: {', '.join(row['verdict'])}: {row['why'][:240]}"


def picture(rows: Sequence[Row]) -> Figure:
    """Return seconds from the attack to the last rank's error, by kind of attack, beside DDP's; and what was wrong."""
    attacks = list(dict.fromkeys(row["attack"] for row in rows))
    figure = drawing.figure(9, 0.9 + 0.45 * len(attacks))
    times, faults = figure.subplots(1, 2, sharey=True, width_ratios=(3, 2))
    for shift, ours, name, colour, marker in (
        (-0.15, True, OURS, drawing.PALETTE[0], "o"),
        (0.15, False, THEIRS, drawing.PALETTE[1], "x"),
    ):
        x, y = [], []
        wrong = []
        for place, attack in enumerate(attacks):
            mine = [row for row in rows if row["attack"] == attack and row["ours"] is ours]
            seconds = [max(row["seconds"], 0.01) for row in mine if row["seconds"] is not None]
            x += seconds
            y += [place + shift + 0.12 * (number / max(1, len(seconds)) - 0.5) for number in range(len(seconds))]
            bad = sum(any(kind in GOALS for kind in row["verdict"]) for row in mine)
            wrong.append(100 * bad / len(mine) if mine else 0.0)
        times.plot(x, y, marker, label=name, color=colour, markersize=3, alpha=0.6)
        places = [place + shift for place in range(len(attacks))]
        faults.barh(places, wrong, height=0.28, color=colour, label=name)
    times.set_yticks(range(len(attacks)), attacks)
    times.invert_yaxis()
    if any(row["seconds"] is not None for row in rows):
        times.set(xscale="log")
    times.set(xlabel="from the attack to the last error, s")
    faults.set(xlabel="% of rounds that hang, abort, blame wrongly,\nare late or silently wrong", xlim=(0, 100))
    times.grid(axis="x")
    faults.legend(loc="lower right")
    return figure
