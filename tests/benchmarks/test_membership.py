"""The benchmark of membership: stalls and bits are read rightly from what workers write, and a little of it runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.membership.__main__ import main
from benchmarks.membership.summary import row_of, scaled, stalls_of
from tests.tiers import long


def written(first: int, changes: dict[int, tuple[int, int]], slow: dict[int, float]) -> list[dict[str, Any]]:
    """Return what a worker writes that comes at step ``first``: the generation and the size from given steps on."""
    lines, generation, size = [], 0, 4
    for step in range(1, 13):
        generation, size = changes.get(step, (generation, size))
        line = {
            "step": step,
            "at": 100.0 + step,
            "seconds": slow.get(step, 0.1),
            "generation": generation,
            "size": size,
        }
        if {step, step - 1} & {*changes, first}:
            line["digest"] = 1000 + step
        lines.append(line)
    return [*lines[first - 1 :], {"end": 12, "digest": 7, "validation": 2.5}]


CHANGES = {5: (1, 3), 9: (2, 4)}


@pytest.mark.short
def test_stalls_bits_and_losses_are_read_from_what_workers_write() -> None:
    lines = {
        1: written(1, CHANGES, {5: 0.5, 9: 0.3}),
        2: written(1, CHANGES, {5: 0.6, 9: 0.2}),
        3: written(9, CHANGES, {9: 3.0}),  # it comes: its own first step does not count
    }
    stalls = stalls_of(lines)
    assert stalls == {"kill": [pytest.approx(0.5)], "join": [pytest.approx(0.2)]}
    events = [{"what": "kill", "at": 0.0, "begun": 102.0}]
    row = row_of("kills", lines, events)
    assert row["changes"] == 2 and row["changes with other bits"] == row["changes not compared"] == 0
    ahead = {**lines, 2: written(1, {6: (1, 3), 9: (2, 4)}, {})}  # it made step 5 before the members changed
    assert row_of("kills", ahead, events)["changes with other bits"] == 0
    del ahead[2][5]["digest"]
    assert row_of("kills", ahead, events)["changes not compared"] == 1
    assert row["steps"] == 10 and row["steps/s"] == 1.0 and row["validation loss"] == 2.5
    assert row["events"]["kills without a change"] == 0 and row["events"]["members at the end"] == [4]
    late = [*events, {"what": "kill", "at": 8.0, "begun": 102.0}]  # after the last change
    assert row_of("kills", lines, late)["events"]["kills without a change"] == 1
    lines[2][4]["digest"] = 1
    assert row_of("kills", lines, events)["changes with other bits"] == 1
    calm = row_of("undisturbed", {1: written(1, {}, {})}, [])
    assert calm["changes"] == 0 and calm["stall of a kill, s"] == "-"
    jobs = ["undisturbed", "undisturbed, another seed"]
    jobs += [f"{job}, {when}" for job in ("undisturbed", "not elastic") for when in ("before", "after")]
    short = scaled([row, *({**calm, "job": job} for job in jobs)])
    assert "98.8%" in short and "90.9%" not in short


@pytest.mark.medium
@long(guarded_by="tests/elastic/test_processes.py::test_any_rank_may_be_lost_and_another_comes")
def test_a_little_of_it_runs(tmp_path: Path) -> None:
    assert main(["--smoke", "--out", str(tmp_path)]) == 0
    (path,) = tmp_path.glob("membership_*.json")
    rows = json.loads(path.read_text())["rows"]
    assert [row["changes with other bits"] + row["changes not compared"] for row in rows] == [0] * 7
    (kills,) = (row for row in rows if row["job"] == "kills")
    # Where steps are slow, one change takes a loss and the next arrival in together.
    assert 2 <= kills["changes"] <= 4 and sum(row["changes"] for row in rows) == kills["changes"]
    rough = kills["events"]
    assert rough["kills without a change"] == 0 and rough["members at the end"] == [4] and rough["ended"] == 4
    assert rough["workers"] == 6 and all(row["events"]["ended"] == 4 for row in rows)
