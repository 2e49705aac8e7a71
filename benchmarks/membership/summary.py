"""What a job's workers have written, as a row of the table."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from benchmarks.report import table

__all__ = ["row_of", "scaled", "stalls_of"]

Lines = Mapping[int, Sequence[Mapping[str, Any]]]


def row_of(name: str, lines: Lines, events: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the row of a job.

    Args:
        name: of the job.
        lines: what each worker has written, by its process.
        events: when workers were killed and others were started.
    """
    steps = [line for written in lines.values() for line in written if "step" in line]
    ends = [line for written in lines.values() for line in written if "end" in line]
    first = {}
    for line in steps:
        first[line["step"]] = min(line["at"], first.get(line["step"], line["at"]))
    begun = events[0]["begun"] if events else first[min(first)]
    counted = sorted(step for step, at in first.items() if at >= begun)
    seconds = first[counted[-1]] - first[counted[0]]
    stalls = stalls_of(lines)
    row: dict[str, Any] = {
        "job": name,
        "steps": counted[-1] - counted[0],
        "steps/s": round((counted[-1] - counted[0]) / seconds, 2),
        "changes": len(stalls["kill"]) + len(stalls["join"]),
    }
    for kind, found in stalls.items():
        row[f"stall of a {kind}, s"] = f"{statistics.median(found):.2f}, at most {max(found):.2f}" if found else "-"
    digests: dict[tuple[int, int], list[int]] = {}
    for line in steps:
        if "digest" in line:
            digests.setdefault((line["generation"], line["step"]), []).append(line["digest"])
    digests[-1, -1] = [line["digest"] for line in ends]
    # The step in which the members changed is made by those alone that lacked its results.
    compared = {generation for (generation, _), found in digests.items() if len(found) > 1}
    row["changes not compared"] = len({generation for generation, _ in digests} - compared)
    row["changes with other bits"] = len({of for (of, _), found in digests.items() if len(set(found)) > 1})
    row["validation loss"] = round(statistics.mean(line["validation"] for line in ends), 4)
    row["events"] = {
        "stalls": stalls,
        "events": list(events),
        "workers": len(lines),
        "ended": len(ends),
        "members at the end": sorted({line["size"] for line in steps if line["step"] == counted[-1]}),
        "kills without a change": _unanswered(steps, events),
    }
    return row


def _unanswered(steps: Sequence[Mapping[str, Any]], events: Sequence[Mapping[str, Any]]) -> int:
    """Return how many kills no generation followed before the next one. It may have taken in a newcomer as well."""
    kills = [event["begun"] + event["at"] for event in events if event["what"] == "kill"]
    found = 0
    for kill, following in pairwise([*kills, math.inf]):
        before = max((line["generation"] for line in steps if line["at"] < kill), default=0)
        found += not any(line["generation"] > before for line in steps if kill <= line["at"] < following)
    return found


def stalls_of(lines: Lines) -> dict[str, list[float]]:
    """Return, of each change, the seconds that its slowest worker stood still: where one was lost, and where one came.

    A worker's first step, in which it only takes the state over, does not count.
    """
    found: dict[str, dict[int, float]] = {"kill": {}, "join": {}}
    for written in lines.values():
        steps = [line for line in written if "step" in line]
        usual = statistics.median(line["seconds"] for line in steps) if steps else 0.0
        for before, line in zip(steps, steps[1:], strict=False):
            if line["generation"] != before["generation"]:
                kind = "kill" if line["size"] <= before["size"] and line["size"] < _largest(lines) else "join"
                stall = line["seconds"] - usual
                found[kind][line["generation"]] = max(stall, found[kind].get(line["generation"], 0.0))
    return {kind: list(of.values()) for kind, of in found.items()}


def _largest(lines: Lines) -> int:
    return max((line["size"] for written in lines.values() for line in written if "size" in line), default=0)


def scaled(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return a table of the share of undisturbed steps per second: measured, and by stalls with a kill a minute."""
    named = {row["job"]: row for row in rows}
    rough, same, other = named["kills"], named["undisturbed"], named["undisturbed, another seed"]
    calm, plain = (
        statistics.mean(named[f"{job}, {when}"]["steps/s"] for when in ("before", "after"))
        for job in ("undisturbed", "not elastic")
    )
    stalls = rough["events"]["stalls"]
    lost = sum(statistics.mean(found) for found in stalls.values() if found)
    line = {
        "steps/s, share of undisturbed": f"{rough['steps/s'] / calm:.1%}",
        "undisturbed, share of not elastic": f"{calm / plain:.1%}",
        "stalls of one loss and one arrival, s": f"{lost:.2f}",
        "share with one of each a minute": f"{1 - lost / 60:.1%}",
        "loss above undisturbed": f"{rough['validation loss'] - same['validation loss']:+.4f}",
        "loss of another seed above it": f"{other['validation loss'] - same['validation loss']:+.4f}",
    }
    return table("In short", [line])
