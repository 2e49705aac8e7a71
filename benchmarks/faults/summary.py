"""The table of all rounds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from .verdict import FAILURES, GOALS

__all__ = ["table_of", "worst"]

Row = Mapping[str, Any]


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
