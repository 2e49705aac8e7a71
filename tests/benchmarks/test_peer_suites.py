"""A peer's suite is counted test by test, whatever its ranks do: shown with a suite of our own, on our side."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import peer_suites
from tests.tiers import long

pytestmark = pytest.mark.medium

ON = "fusionlayer, 2"
SUITE = """
import os, time, unittest
import mock, pytest, torch
import horovod.torch as hvd
from horovod.runner.util.threads import in_thread

class Tests(unittest.TestCase):
    def setUp(self):
        hvd.init()

    def tearDown(self):
        if os.getenv("HOROVOD_RANK"):
            hvd.barrier()
            hvd.shutdown()

    def test_sums(self):
        assert hvd.allreduce(torch.ones(2), op=hvd.Sum).tolist() == [2.0, 2.0]

    def test_fails_on_one_rank(self):
        assert hvd.rank() == 0, "so it is"
        hvd.allreduce(torch.ones(2))

    def test_dies(self):
        os._exit(0) if hvd.rank() else hvd.barrier()

    def test_waits(self):
        time.sleep(600 * hvd.rank())

    @pytest.mark.skip(reason="for pytest")
    def test_skipped_by_a_mark(self):
        raise AssertionError

    def test_skips(self):
        self.skipTest("by itself")

    def helper(self):
        raise AssertionError

class Helper:
    pass
"""


@long(guarded_by="tests/benchmarks/test_peer_suites.py::test_a_part_that_no_test_has_is_an_error")
def test_each_end_of_a_test_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    suite, kept = tmp_path / "test_suite.py", tmp_path / "kept.json"
    suite.write_text(SUITE)
    command = [str(suite), "--ranks", "2", "--kept", str(kept)]
    assert peer_suites.main([*command, "--tests", "waits,none", "--seconds", "1"]) == 0
    assert "| fusionlayer, 2 | 0       | 0      | 1      | 0      |" in capsys.readouterr().out
    assert peer_suites.main([*command, "--lanes", "2", "--out", str(tmp_path)]) == 0
    assert "| fusionlayer, 2 | 2       | 1      | 1      | 2      |" in capsys.readouterr().out
    (result,) = tmp_path.glob("peer-suites_*.json")
    rows = json.loads(result.read_text())["rows"]
    ends = {row["test"].removeprefix("Tests.test_"): (row[ON], row["said"][ON]) for row in rows}
    assert (ends.pop("dies")[0], ends.pop("waits")[0]) == ("failed", "waited")
    assert ends == {
        "sums": ("passed", ""),
        "fails_on_one_rank": ("failed", "rank 1: AssertionError: so it is"),
        "skipped_by_a_mark": ("skipped", "marked for pytest"),
        "skips": ("skipped", "by itself"),
    }


def test_a_part_that_no_test_has_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    suite = tmp_path / "test_suite.py"
    suite.write_text(SUITE)
    with pytest.raises(SystemExit):
        peer_suites.main([str(suite), "--tests", "nothing"])
    assert "has one of these in its name: nothing" in capsys.readouterr().err
