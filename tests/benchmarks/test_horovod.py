"""The benchmark beside Horovod, without Horovod."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.horovod import _resnet50_shapes
from tests.examples.places import ROOT
from tests.tiers import long


@pytest.mark.medium
@long(guarded_by="tests/benchmarks/test_horovod.py::test_the_shapes_are_those_of_resnet50")
def test_every_kind_of_call_is_measured(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.horovod", "--cases", "small,ragged", "--rounds", "1"]
    done = subprocess.run([*command, "--out", str(tmp_path)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (result,) = tmp_path.glob("horovod_*.json")
    rows = json.loads(result.read_text())["rows"]
    assert [len(row["turns"]["fusionlayer"]) for row in rows] == [1, 1]


@pytest.mark.short
def test_the_shapes_are_those_of_resnet50() -> None:
    sizes = [1 for _ in _resnet50_shapes()]
    total = 0
    for shape in _resnet50_shapes():
        count = 1
        for n in shape:
            count *= n
        total += count
    assert (len(sizes), total) == (161, 25_557_032)
