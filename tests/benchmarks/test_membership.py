"""The benchmark of membership: stalls and bits are read rightly from what workers write, and a little of it runs."""

import json
from pathlib import Path

import pytest

from benchmarks.membership.__main__ import main
from tests.tiers import long


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
