"""The benchmark of faults: what is bad is judged bad, and a little of everything runs."""

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from benchmarks.faults import __main__ as command
from benchmarks.faults.attacks import ATTACKS
from benchmarks.faults.fronts import PLAIN
from benchmarks.faults.job import Outcome
from benchmarks.faults.verdict import FAILURES, GOALS, Expected, judge
from tests.tiers import long

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
