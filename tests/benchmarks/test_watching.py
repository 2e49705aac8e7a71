"""Whether the benchmark of watched jobs tells who was named; long: two faults in real jobs."""

import pytest

from benchmarks.watching.rounds import _row, play


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
