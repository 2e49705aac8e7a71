"""The benchmark of faults: what is bad is judged bad, and a little of everything runs."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.faults import __main__ as command
from benchmarks.faults.attacks import ATTACKS, FRONTS, controls, kill
from benchmarks.faults.deeds import await_child
from benchmarks.faults.fronts import PLAIN
from benchmarks.faults.job import Outcome, Phase
from benchmarks.faults.ports import Scanner, listening
from benchmarks.faults.summary import picture, table_of
from benchmarks.faults.verdict import FAILURES, GOALS, Expected, blamed, judge
from tests.tiers import DRAWS, long

RIGHT = ["same"] * 3
FINISHED = Outcome("finished", 11.0, digest="same", status=0)


def raised(text: str, ranks: tuple[int, ...] | None = (1,), at: float = 11.0, status: int = 1) -> Outcome:
    return Outcome("raised", at, ("TransportError",), ranks, text, status=status)


def verdict_on(outcomes: list[Outcome], expected: Expected = Expected((1,), (1,)), **more: Any) -> tuple[str, ...]:  # noqa: B008
    return judge(outcomes, RIGHT, expected, 10.0, 4.0, **more).kinds


@pytest.mark.short
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


@pytest.mark.short
def test_who_is_blamed() -> None:
    assert blamed(raised("rank 0: rank 2 is gone", (1, 2)), 0) == (1, 2)
    assert blamed(raised("rank 0: making a transport: ranks [1, 2] did not come", None), 0) == (1, 2)
    assert blamed(raised("rank 0: the store is gone", None), 0) == ()
    assert blamed(raised("rank 0 cannot connect to rank 1", None), 0) == (1,)
    assert blamed(raised("rank 1 cannot connect to rank 1", (1,)), 1) == (1,)


@pytest.mark.short
def test_a_child_that_computes_does_not_hang_and_one_that_sleeps_does() -> None:
    def child(code: str) -> int:
        return os.posix_spawn(sys.executable, [sys.executable, "-Sc", f"import time\n{code}"], os.environ)

    computes = "while time.process_time() < 1.0: pass"
    assert await_child(child(f"{computes}\nraise SystemExit(3)"), 0.5, 60.0) == 3
    assert "hung" in str(await_child(child("time.sleep(10)"), 0.5, 60.0))
    assert "hung" in str(await_child(child(computes), 60.0, 0.2))


@pytest.mark.short
def test_a_stranger_finds_the_ports_of_a_process() -> None:
    with socket.socket() as listener, Scanner("half-open") as stranger:
        listener.bind(("127.0.0.1", 0))
        stranger.visit([os.getpid()])  # what tests before this one have left
        assert listener.getsockname()[1] not in listening(os.getpid())
        listener.listen()
        assert listener.getsockname()[1] in listening(os.getpid())
        assert stranger.visit([os.getpid()]) == 1
        assert stranger.visit([os.getpid()]) == 0
        listener.accept()[0].close()


@pytest.mark.short
def test_all_points_of_all_fronts_are_attacked() -> None:
    rounds = list(ATTACKS["kills"].make(1))
    ours = [round_ for round_ in rounds if not round_.plain]
    assert len(ours) >= 100 and {round_.job.front for round_ in ours} == {*FRONTS}
    assert {round_.job.world for round_ in ours} == {3, 4} and {round_.job.keeper for round_ in ours} == {
        "rank 0",
        "agent",
    }
    assert {phase.name for round_ in ours for _, phase in round_.job.holds} >= {"start", "connecting", "backward"}
    row = {"attack": "kill", "ours": True, "ending": "error", "seconds": 0.5, "verdict": ["ok"]}
    (line, total) = table_of([row, {**row, "ours": False, "verdict": ["no name"]}])
    assert (
        line["rounds"] == total["rounds"] == "1 / 1" and line["no name"] == "0 / 1" and line["wrong blame"] == "0 / 0"
    )
    assert not DRAWS or len(picture([row]).axes) == 2


@long(guarded_by="tests/benchmarks/test_faults.py::test_the_judge_tells_good_from_bad")
@pytest.mark.medium
def test_what_is_bad_on_purpose_is_judged_so() -> None:
    """And a rank of fusionlayer's that is killed is told rightly, in the same processes."""
    known = list(controls())
    good = kill("optimizer:int8", 3, 1, Phase("backward", 1), "at")
    rows = command.play([*(round_ for _, round_ in known), good], 2)
    for (kind, round_), row in zip(known, rows, strict=False):
        assert kind in row["verdict"], (round_.what, row["why"], row["ranks"])
    assert rows[-1]["verdict"] == ["ok"] and rows[-1]["ending"] == "error", rows[-1]
    assert all(row["ranks"] for row in rows[:-1]) and not rows[-1]["ranks"], "what ranks told, where all is well"


@long(guarded_by="tests/benchmarks/test_faults.py::test_the_judge_tells_good_from_bad")
@pytest.mark.medium
def test_a_little_of_it(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    command.main(["--smoke", "--trust", "--out", str(tmp_path), "--hardware", "test"])
    out = capfd.readouterr().out
    assert "| kill " in out and "| bit flip " in out
    (result,) = tmp_path.glob("faults_test_*.json")
    rows = json.loads(result.read_text())["rows"]
    assert len(rows) == sum(theme.few for theme in ATTACKS.values()) and PLAIN in {row["front"] for row in rows}
    assert (tmp_path / "plots" / "faults.svg").exists()
