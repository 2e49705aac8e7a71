"""Whether the benchmark of watched jobs tells who was named; long: two faults in real jobs."""

from __future__ import annotations

import pytest

from benchmarks.watching.rounds import _culprits, _row, play
from tests.loops import looped

CASES = {
    "rank 1 is late: it is at program.py:3; ranks 0, 2 wait for it 5 s in call 9": (1,),
    "ranks 0, 2 ended while rank 1 needed them at program.py:3": (0, 2),
    "ranks differ in call 9: rank 1 in barrier at program.py:1; ranks 0, 2 in broadcast": (1,),
    "ranks wait for each other in different calls: rank 1 is in recv; rank 0 is in barrier": (1,),
    "links of rank 1 are slow: from rank 1 to rank 0 1 MB/s, before 9 MB/s": (1,),
    "the job goes on, 3 s after that": None,
    "ranks 0, 1 go on, 3 s after that": None,
    "rank 1 goes on, 3 s after that": None,
}


@pytest.mark.short
@looped("line", CASES)
def test_who_is_blamed_is_read_from_the_line(line: str) -> None:
    assert _culprits(line) == CASES[line]


@pytest.mark.short
def test_a_round_is_good_only_if_rank_and_place_are_named_in_time() -> None:
    log = '{"fault": "x", "at": 100.0}\n[x] fusionlayer watch, 10:00:00: rank 1 is late: it is at program.py:3; a\n'
    assert _row(log, "x", "gloo", 105.0).is_good
    assert not _row(log, "x", "gloo", 111.0).is_good
    assert not _row(log.replace("rank 1", "rank 2"), "x", "gloo", None).is_good
    assert not _row(log.replace("program.py:3", "an unknown line"), "x", "gloo", 105.0).is_good
    assert not _row(log, "", "gloo", None).is_good, "a healthy job is not to be told of"


@pytest.mark.medium
@pytest.mark.long(guarded_by="tests/health/test_watch.py::test_the_culprit_is_named_with_its_line_while_others_wait")
@pytest.mark.parametrize("fault, backend", [("slow_loader", "fusionlayer"), ("wrong_type", "gloo")])
def test_faults_in_real_jobs_are_named(fault: str, backend: str) -> None:
    row = play(fault, backend)
    assert row.seconds is not None and row.place, row
