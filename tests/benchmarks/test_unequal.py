"""The benchmark of unequal links: its arithmetic, and a run of it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks import unequal
from tests.examples.places import needs_namespaces
from tests.tiers import DRAWS, long


@pytest.mark.short
def test_a_time_is_held_to_what_the_rates_allow() -> None:
    """A message of a second at 8 Mbit/s: the slow one of four hosts needs two for its own, the fast ones less."""
    row = {"operation": unequal.EQUAL, "codec": "int8", "message": 1e6 / unequal.FRAME, "equal": True, "buckets": 4}
    (line,) = unequal.table([{**row, "seconds": [3.3, 2.2, 2.0]}], [8e6, 8e6, 8e6, 4e6])
    assert (line["the rates allow"], line["seconds"], line["over that"]) == (2.0, 2.2, "10.0%")
    assert line["rounds"] == "0.0% to 65.0%"
    (line,) = unequal.table([{**row, "seconds": [1.5]}], [8e6] * 4)
    assert (line["the rates allow"], line["over that"]) == (1.5, "0.0%")


@pytest.mark.short
def test_rates_that_are_none_are_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["unequal", "--rates", "fast,slow"])
    with pytest.raises(SystemExit):
        unequal.main()
    assert "rates='fast'; expected a number with kbit, mbit or gbit" in capsys.readouterr().err


@long(guarded_by="tests/collectives/test_unequal.py::test_every_codec_sums_by_shares")
@pytest.mark.medium
@pytest.mark.netns
@needs_namespaces
def test_sums_over_unequal_links_have_equal_bits(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    arguments = [
        "--smoke",
        "--rates",
        "64mbit,64mbit,16mbit",
        "--codecs",
        "int8",
        "--buckets",
        "2,3",
        "--out",
        str(tmp_path),
    ]
    monkeypatch.setattr(sys, "argv", ["unequal", *arguments])
    assert unequal.main() == 0
    (path,) = tmp_path.glob("unequal-c10d_*.json")
    rows = json.loads(path.read_text())["rows"]
    assert [row["operation"] for row in rows] == [unequal.EQUAL, unequal.BY_SHARES] * 2 + [unequal.GLOO]
    assert [row["buckets"] for row in rows] == [2, 2, 3, 3, 1]
    assert (tmp_path / "plots" / "unequal-c10d.svg").exists() == DRAWS
    assert all(row["bits equal"] and len(row["seconds"]) == 2 for row in rows)
