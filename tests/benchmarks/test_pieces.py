"""The benchmark of pieces runs, and its rows are those that were asked for."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.tiers import long

pytestmark = pytest.mark.medium


@long(guarded_by="tests/benchmarks/test_collective.py::test_workers_that_fail_are_told_of")
def test_rows() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    options = ["--codecs", "int8,taco", "--mib", "1", "--pieces", "2,4", "--rounds", "2"]
    done = subprocess.run([*command, "-m", "benchmarks.pieces", *options], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = re.findall(r"^\| 1 +\| (\w+) +\| (\d+) +\| (\S+) ", done.stdout, re.MULTILINE)
    assert rows == [
        (codec, pieces, each)
        for codec in ("int8", "taco")
        for pieces, each in (("1", "1.0"), ("2", "0.5"), ("4", "0.25"))
    ]
    assert "All-reduce in pieces, 2 ranks" in done.stdout
