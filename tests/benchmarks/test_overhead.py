import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fusionlayer as fl
from benchmarks import overhead
from tests.harness import run_ranks
from tests.loops import looped
from tests.tiers import exhaustive

MOST_FILES = 18
MOST_CALLS = {"submit": 22, "lane": 57, "step": 4}
"""Of one tensor of int8 among four ranks; a call more is a decision, not an accident. The thread that submits also ends
the step, and with it finds out which parameters no rank has used."""
MOST_OVER_GLOO = {2: (50, 17), 4: (72, 20)}
"""Calls, and files that they are in, of one tensor of int8 among so many ranks that are processes."""


def test_one_gradient_takes_no_more_calls_than_it_did() -> None:
    found, again = (overhead._on_threads(4, "int8", 1, 1) for _ in range(2))
    assert found["calls"] == again["calls"]
    assert all(0 < found["calls"][phase] <= most for phase, most in MOST_CALLS.items()), found
    assert "collectives/two_shot.py" in found["files"] and len(found["files"]) <= MOST_FILES, found["files"]


def test_each_tensor_of_a_bucket_adds_calls_to_its_submission_alone() -> None:
    one, many = (overhead._on_threads(2, "raw", tensors, 1)["calls"] for tensors in (1, 20))
    assert many["submit"] - one["submit"] <= 19 * 3
    assert many["lane"] - one["lane"] <= 5
    assert many["step"] == one["step"]


def count(rank: int, world: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    fl.init()
    found = overhead.count_calls("int8", 1, dist.barrier, overhead.Meter(), 1)
    fl.shutdown()
    return found


@pytest.mark.medium
@looped("world", list(MOST_OVER_GLOO))
def test_a_bucket_over_gloo_keeps_to_its_calls_and_files(world: int) -> None:
    calls, files = MOST_OVER_GLOO[world]
    for found in run_ranks(count, world):
        assert sum(found["calls"].values()) <= calls and len(found["files"]) <= files, found


@pytest.mark.medium
@exhaustive(guarded_by="tests/benchmarks/test_overhead.py::test_one_gradient_takes_no_more_calls_than_it_did")
def test_the_command_writes_a_row_for_each_case(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert overhead.main(["--steps", "2", "--worlds", "2", "--out", str(tmp_path), "--hardware", "test"]) == 0
    (result,) = tmp_path.glob("overhead_test_*.json")
    rows = json.loads(result.read_text())["rows"]
    assert len(rows) == 2 * len(overhead.CODECS) * len(overhead.TENSORS)
    for row in rows:
        linked = "transport/linked.py" in row["files"]
        assert linked == (row["ranks"] == "gloo") and "transport/local.py" not in row["files"]
    assert "gloo" in capsys.readouterr().out
