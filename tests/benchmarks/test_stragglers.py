"""The benchmark of ranks that stall: its arithmetic, and a run of it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks import stragglers
from tests.examples.places import needs_namespaces
from tests.tiers import exhaustive


@pytest.mark.short
def test_steps_are_those_of_ranks_that_do_not_stall() -> None:
    row = {"ends": [[0.0, 1.0, 2.0, 3.0], [0.0, 1.0, 4.0, 5.0]], "stalled": [[], [1]]}
    assert sorted(stragglers.steps_of(row)) == [1.0] * 5


@exhaustive(guarded_by="tests/integrations/test_grace.py::test_the_others_go_on_and_nothing_is_lost")
@pytest.mark.medium
@pytest.mark.netns
@needs_namespaces
def test_replicas_are_equal_after_stalls(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    arguments = ["--smoke", "--rate", "200mbit", "--chance", "0.5", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["stragglers", *arguments])
    assert stragglers.main() == 0
    (path,) = tmp_path.glob("stragglers-50-percent_*.json")
    rows = json.loads(path.read_text())["rows"]
    assert [row["run"] for row in rows] == [stragglers.CALM, stragglers.ALL_WAIT, stragglers.GRACE]
    assert all(row["equal"] for row in rows)
    assert rows[0]["loss"] == rows[1]["loss"]
    assert sum(rows[1]["missed"]) == 0
