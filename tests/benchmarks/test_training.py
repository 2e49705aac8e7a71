"""The training benchmark: its arithmetic, its names, what it trains, and its command line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.training.cell import Cell, Measured, Round
from benchmarks.training.summary import interval, readings, rows
from tests.examples.places import ROOT
from tests.tiers import exhaustive

CELL = Cell("gpt", 2, 1, "100mbit", ("alone", "ddp", "ddp-again", "int8"), 5)
QUIET = {"before": {"load": 0.1}, "after": {"load": 2.0}}


def did(
    seconds: list[float], sent: float, losses: int = 8, codec: float | None = None, identical: bool = True
) -> Measured:
    turns = tuple(Round(s, sent, 0.5, None, codec, codec) for s in seconds)
    return Measured(1, turns, tuple(float(10 - step) for step in range(losses)), identical)


def cell_rows(**others: Measured) -> dict[str, dict[str, Any]]:
    """Return the rows of ``CELL`` by method, ``others`` in place of its own."""
    measured = {
        "alone": did([0.25] * 5, 100),
        "ddp": did([4.0, 4.4, 4.2, 4.2, 4.2], 45e6),
        "ddp-again": did([4.0, 4.0, 4.2, 4.2, 4.2], 45e6),
        "int8": did([1.0, 1.1, 1.4, 1.05, 1.2], 10e6, losses=12, codec=0.03),
    }
    return {row["method"]: row for row in rows(CELL, {**measured, **others}, QUIET)}


@pytest.mark.short
class TestArithmetic:
    def test_interval_leaves_out_what_is_rare(self) -> None:
        low, high = interval([1.0] * 9 + [5.0])
        assert (low, high) == (1.0, 1.0)
        low, high = interval([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0])
        assert 1.0 < low < 5.0 < high < 9.0
        assert (low, high) == interval([9.0, 8.0, 7.0, 6.0, 5.0, 4.0, 3.0, 2.0, 1.0][::-1])

    def test_claim_needs_an_interval_above_one_and_above_the_null_row(self) -> None:
        assert cell_rows()["int8"]["faster"] is True
        assert cell_rows()["ddp-again"]["faster"] is False
        assert cell_rows()["alone"]["faster"] is False
        few = {
            name: did([one] * 4, 1e6) for name, one in {"alone": 0.2, "ddp": 4.0, "ddp-again": 4.0, "int8": 1.0}.items()
        }
        assert cell_rows(**few)["int8"]["faster"] is False
        assert cell_rows(int8=did([3.9, 4.5, 4.1, 4.3, 4.2], 10e6))["int8"]["faster"] is False
        shaky = did([2.0, 2.2, 2.1, 2.1, 2.1], 45e6)
        assert cell_rows(int8=did([3.0, 3.3, 3.0, 3.1, 3.0], 10e6), **{"ddp-again": shaky})["int8"]["faster"] is False

    def test_workers_that_parted_are_named(self) -> None:
        found = cell_rows(int8=did([1.0] * 5, 10e6, identical=False), alone=did([0.2] * 5, 0, identical=False))
        assert [line for line in readings(list(found.values())) if "DIFFER" in line] == [
            "int8: PARAMETERS DIFFER between workers, so its figures mean nothing"
        ]


@pytest.mark.medium
@exhaustive(guarded_by="tests/test_documents.py::test_the_commands_of_the_readme_run")
def test_without_namespaces_it_runs_on_loopback_and_says_so(tmp_path: Path) -> None:
    arguments = ["--model", "gpt-small", "--methods", "int8", "--rounds", "1", "--busy-ok", "--out", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.training", *arguments],
        env={**os.environ, "PATH": str(tmp_path)},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "no network namespaces here (the program unshare is missing (install util-linux))" in done.stderr
    result = json.loads(next(tmp_path.glob("training-gpt-small-1x2_*.json")).read_text())
    assert [row["method"] for row in result["rows"]] == ["alone", "ddp", "ddp-again", "int8"]
    assert {(row["hosts"], row["workers"], row["rate"]) for row in result["rows"]} == {(1, 2, None)}
    assert [row["identical"] for row in result["rows"]] == [False, True, True, True]
    losses = {row["method"]: row["training_losses"] for row in result["rows"]}
    common = min(len(losses["ddp"]), len(losses["ddp-again"]))
    assert losses["ddp"][:common] == losses["ddp-again"][:common]
