"""The benchmarks: their arithmetic and command lines, and in the long tier a little of each that runs."""

import json
import signal
import tempfile
from pathlib import Path
from typing import Any

import pytest

from benchmarks import drawing, driver, publish, publish_guard, report, strangers
from benchmarks.collective import __main__ as command
from benchmarks.collective.cell import Cell
from benchmarks.faults import __main__ as faults
from benchmarks.faults.attacks import ATTACKS
from benchmarks.faults.fronts import PLAIN
from benchmarks.faults.job import Outcome
from benchmarks.faults.verdict import FAILURES, GOALS, Expected, judge
from benchmarks.membership.__main__ import main
from benchmarks.watching.rounds import _row
from tests.examples.places import needs_namespaces
from tests.tiers import DRAWS, long

RIGHT = ["same"] * 3
FINISHED = Outcome("finished", 11.0, digest="same", status=0)


def raised(text: str, ranks: tuple[int, ...] | None = (1,), at: float = 11.0, status: int = 1) -> Outcome:
    return Outcome("raised", at, ("TransportError",), ranks, text, status=status)


def verdict_on(outcomes: list[Outcome], expected: Expected = Expected((1,), (1,)), **more: Any) -> tuple[str, ...]:  # noqa: B008
    return judge(outcomes, RIGHT, expected, 10.0, 4.0, **more).kinds


def test_the_judge_tells_good_from_bad() -> None:
    gone, lost = raised("rank 1 is gone"), Outcome(status=-signal.SIGKILL)
    assert verdict_on([gone, lost, gone]) == ()
    assert verdict_on([gone, lost, Outcome("raised", 11.0, ("E",), (1,), "rank 1", status=None)]) == ("not ended",)
    assert verdict_on([gone, lost, Outcome(status=None)]) == ("not ended",)
    assert verdict_on([gone, lost, raised("rank 1", status=-signal.SIGABRT)]) == ("aborted",)
    assert verdict_on([gone, lost, raised("rank 0 is gone", (0,))]) == ("wrong blame",)
    assert verdict_on([gone, lost, raised("ranks 0 and 1 are gone", (0, 1))]) == ("wrong blame",)
    assert verdict_on([gone, lost, raised("the store is gone", None)]) == ("no name",)
    assert verdict_on([gone, lost, raised("rank 1 is gone", None)]) == ("no type",)
    both = raised("rank 0 has float32, not float64 as rank 1", None)
    assert verdict_on([both, lost, gone], Expected((1,), (1,), compared=True)) == ("no type",)
    assert verdict_on([raised("", (0, 1)), lost, gone], Expected((1,), (1,), compared=True)) == ("wrong blame",)
    assert verdict_on([gone, lost, raised("rank 1 is gone", at=16.1)]) == ("too late",)
    assert verdict_on([gone, lost, raised("rank 1 is gone", at=15.9)]) == ()
    assert verdict_on([gone, lost, gone], strayed=["socket"]) == ("left behind",)

    wrong = Outcome("finished", 11.0, digest="other", status=0)
    any_error, harmless = Expected(None), Expected((), harmless=True)
    assert verdict_on([FINISHED] * 3, any_error) == verdict_on([FINISHED] * 3, harmless) == ()
    assert verdict_on([FINISHED, wrong, FINISHED], any_error) == ("silent wrong",)
    assert verdict_on([wrong] * 3, any_error) == ("silent wrong",)
    assert verdict_on([wrong] * 3, Expected(None, any_result=True)) == ()
    assert verdict_on([FINISHED, wrong, FINISHED], Expected(None, any_result=True)) == ("silent wrong",)
    assert verdict_on([FINISHED, wrong, gone], any_error) == ()  # the job has failed, and not in silence
    told = Outcome("finished", 11.0, digest="other", status=0, facts={"warned": ["parameters of ranks [1] differ"]})
    assert verdict_on([FINISHED, told, FINISHED], any_error) == ()
    assert verdict_on([FINISHED, gone, FINISHED], harmless) == ("false alarm",)
    assert judge([FINISHED] * 3, RIGHT, any_error, 0.0, 4.0).fails
    assert verdict_on([FINISHED] * 3, Expected((1,), own=(1,), ends=True)) == ("not attacked",)
    assert {*GOALS} < {*FAILURES}


@long(guarded_by="tests/benchmarks/test_programs.py::test_the_judge_tells_good_from_bad")
@pytest.mark.medium
def test_a_little_of_it(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    faults.main(["--smoke", "--trust", "--out", str(tmp_path), "--hardware", "test"])
    out = capfd.readouterr().out
    assert "| kill " in out and "| bit flip " in out
    (result,) = tmp_path.glob("faults_test_*.json")
    rows = json.loads(result.read_text())["rows"]
    assert len(rows) == sum(theme.few for theme in ATTACKS.values()) and PLAIN in {row["front"] for row in rows}


KB, MB = 1 << 10, 1 << 20


def cell(rate: str | None = None, codecs: tuple[str, ...] = ("raw",), mpi: bool = False, **more: Any) -> Cell:
    """Return a cell of two workers."""
    hosts = 1 if rate is None and "interfaces" not in more else 2
    return Cell(rate, hosts, 2 // hosts, (64 * KB,), 2, codecs, ("dense", "one_shot", "two_shot"), mpi, **more)


@pytest.mark.medium
def test_workers_that_fail_are_told_of(capfd: pytest.CaptureFixture[str]) -> None:
    assert command.run(cell(codecs=("no such codec",)), isolated=False, timeout=180) is None
    assert "unknown codec 'no such codec'" in capfd.readouterr().err


PICTURES = {"drawn": lambda: drawing.figure(1, 1)}


def test_results_go_elsewhere_when_their_folder_cannot_be_written_any_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    parser = driver.make_parser("something", __doc__)
    driver.add_options(parser)
    out = tmp_path / "results"
    options = parser.parse_args(["--out", str(out)])
    out.rmdir()
    out.write_text("somebody has put a file here meanwhile")
    with pytest.raises(SystemExit):
        parser.parse_args(["--out", str(out)])
    assert "cannot be written: its folder is a file; name another" in capsys.readouterr().err
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(report, "misplaced", kept := [])
    monkeypatch.setattr(driver, "misplaced", kept)
    rows = [{"a": 1}]
    driver.finish(options, "theme", "Title", driver.begin(options), rows, pictures=PICTURES)
    (data,) = tmp_path.glob("fusionlayer-results-*/theme_*.json")
    assert json.loads(data.read_text())["rows"] == rows and (data.parent / "plots" / "drawn.svg").exists() == DRAWS
    assert f"cannot be written: File exists; results are in {data}\n" in capsys.readouterr().err
    with pytest.raises(SystemExit) as ended:
        driver.leave(lambda: 0)
    assert ended.value.code == 1


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


def test_ratios_of_each_guard_and_of_the_flood() -> None:
    rows: list[dict[str, object]] = [
        {
            "link": "1gbit",
            "nbytes": 10**6,
            "guard": guard,
            "seconds": s,
            "cpu_seconds": 2 * s,
            "follower_cpu_seconds": s,
        }
        for guard, s in zip(publish_guard.GUARDS, (1.0, 1.5, 2.0, 3.0), strict=True)
    ]
    lines = publish_guard.summarize(rows)
    for key in ("times as long", "times the CPU"):
        assert [line[key] for line in lines] == ["1.00", "1.50", "2.00", "3.00"]
    among = {"job": "sockets", "seconds": 1.0, "failed": 0, "refused": 9, "digest": "d"}
    rows = [{**among, "strangers": count, "cpu_seconds": 4.0 + count / 1000} for count in (0, 2000)]
    lines = strangers.summarize(rows)
    assert [line["times the CPU"] for line in lines] == ["1.00", "1.50"]
    assert lines[-1]["failed open()"] == 0 and lines[-1]["same bits"] == "true"


@long(guarded_by="tests/benchmarks/test_programs.py::test_ratios_of_each_guard_and_of_the_flood")
@pytest.mark.medium
@pytest.mark.netns
@needs_namespaces
def test_a_little_of_it_of_publish(tmp_path: Path) -> None:
    small = ["--rates", "1gbit", "--lrs", "1e-3", "--versions", "2", "--warmup", "1", "--width", "64", "--layers", "1"]
    assert publish.main([*small, "--busy-ok", "--out", str(tmp_path), "--hardware", "test"]) == 0
    (path,) = tmp_path.glob("publish_test_*.json")
    rows = json.loads(path.read_text())["rows"]
    assert len(rows) == 2 and all(0 < row["nbytes"] < row["whole_bytes"] < row["weight_bytes"] for row in rows)


def test_a_round_is_good_only_if_rank_and_place_are_named_in_time() -> None:
    log = '{"fault": "x", "at": 100.0}\n[x] fusionlayer watch, 10:00:00: rank 1 is late: it is at program.py:3; a\n'
    assert _row(log, "x", "gloo", 105.0).is_good
    assert not _row(log, "x", "gloo", 111.0).is_good
    assert not _row(log.replace("rank 1", "rank 2"), "x", "gloo", None).is_good
    assert not _row(log.replace("program.py:3", "an unknown line"), "x", "gloo", 105.0).is_good
    assert not _row(log, "", "gloo", None).is_good, "a healthy job is not to be told of"
