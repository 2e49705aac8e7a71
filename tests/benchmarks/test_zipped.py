"""The benchmark of zipped collectives: its arithmetic, its pictures, and what its workers measure."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.zipped import __main__ as command
from benchmarks.zipped.worker import CALLS
from tests.examples.places import needs_namespaces
from tests.tiers import long, needs

MB = 1 << 20


def row(native: list[float], zipped: list[float], switched: list[float], **more: Any) -> dict[str, Any]:
    seconds = {"native": native, "zipped": zipped, "switched": switched}
    return {"rate": "1gbit", "call": "all_gather", "size": MB, "zips": True, "seconds": seconds, **more}


def late(seconds: list[float]) -> dict[str, Any]:
    forms = {"native": [0.4], "design 1": seconds, "design 2": [0.2] * len(seconds)}
    return {"rate": "100mbit", "split": "uneven", "delay": 0.1, "seconds": forms}


@pytest.mark.short
def test_a_line_compares_within_rounds() -> None:
    found = command.line(row([1.0, 2.0, 4.0], [0.5, 1.6, 2.0], [0.5, 1.0, 2.06]))
    assert found["native / zipped"] == "2.00 [1.25..2.00]"
    assert (found["native, ms"], found["zipped, ms"], found["sent"]) == ("2000.00", "1600.00", "1 MB")
    assert (found["switcher"], found["choice / best"]) == ("zipped", "0.625")
    assert command.line(row([1.0], [2.0], [1.03], zips=False))["choice / best"] == "1.030"


@pytest.mark.short
def test_designs_are_compared_after_the_late_rank_has_come() -> None:
    found = command.late_line(late([0.3, 0.2]))
    assert found["design 1 / design 2"] == "1.25 [1.00..1.50]"
    assert (found["late by, ms"], found["design 1, ms"], found["design 2, ms"]) == ("100", "250.0", "200.0")


@pytest.mark.short
@needs("matplotlib")
def test_pictures_have_a_panel_for_each_rate_and_split() -> None:
    rows = [row([1.0], [0.7], [0.7], rate=rate, call=call) for rate in ("100mbit", "1gbit") for call in CALLS]
    figure = command.ratios(rows)
    assert [axes.get_title() for axes in figure.axes] == ["100mbit", "1gbit"]
    assert all(len(axes.lines) == 2 * len(CALLS) + 1 for axes in figure.axes)
    (panel,) = command.designs([late([0.3])]).axes
    assert panel.get_title() == "uneven splits" and len(panel.lines) == 3


@long(guarded_by="tests/collectives/test_zipped_processes.py::test_bits_are_those_of_uncompressed_collectives")
@pytest.mark.medium
@pytest.mark.netns
@needs_namespaces
def test_a_little_of_everything(tmp_path: Path) -> None:
    assert command.main(["--smoke", "--out", str(tmp_path), "--hardware", "test"]) == 0
    (result,) = tmp_path.glob("zipped_test_*.json")
    rows = json.loads(result.read_text())["rows"]
    assert {(r["rate"], r["call"]) for r in rows if "call" in r} == {
        (rate, call) for rate in command.RATES for call in CALLS
    }
    assert {r["split"] for r in rows if "split" in r} == {"even", "uneven"}
    assert all(len(seconds) == 2 for r in rows for seconds in r["seconds"].values())
    assert (tmp_path / "plots" / "zipped.svg").exists() and (tmp_path / "plots" / "zipped-late.svg").exists()
