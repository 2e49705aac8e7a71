from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import overhead
from tests.tiers import exhaustive

MOST_FILES = 25
MOST_CALLS = {"submit": 39, "lane": 114, "step": 11}
"""Of one tensor of int8 among four ranks; a call more is a decision, not an accident. The thread that submits also ends
the step, and with it finds out which parameters no rank has used."""


@pytest.mark.short
def test_one_gradient_takes_no_more_calls_than_it_did() -> None:
    found, again = (overhead._on_threads(4, "int8", 1, 1) for _ in range(2))
    assert found["calls"] == again["calls"]
    assert all(0 < found["calls"][phase] <= most for phase, most in MOST_CALLS.items()), found
    assert "collectives/two_shot.py" in found["files"] and len(found["files"]) <= MOST_FILES, found["files"]


@pytest.mark.short
def test_each_tensor_of_a_bucket_adds_calls_to_its_submission_alone() -> None:
    one, many = (overhead._on_threads(2, "raw", tensors, 1)["calls"] for tensors in (1, 20))
    assert many["submit"] - one["submit"] <= 19 * 5
    assert many["lane"] - one["lane"] <= 5
    assert many["step"] == one["step"]


@pytest.mark.medium
@exhaustive(guarded_by="tests/benchmarks/test_overhead.py::test_one_gradient_takes_no_more_calls_than_it_did")
def test_the_command_writes_a_row_for_each_case(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert overhead.main(["--steps", "2", "--worlds", "2", "--out", str(tmp_path), "--hardware", "test"]) == 0
    (result,) = tmp_path.glob("overhead_test_*.json")
    rows = json.loads(result.read_text())["rows"]
    assert len(rows) == 2 * len(overhead.CODECS) * len(overhead.TENSORS)
    for row in rows:
        linked = "transport/_linked.py" in row["files"]
        assert linked == (row["ranks"] == "gloo") and "transport/local.py" not in row["files"]
    assert "gloo" in capsys.readouterr().out
