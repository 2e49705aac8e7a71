from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import missing
from tests.tiers import exhaustive

pytestmark = pytest.mark.short


def test_behind_fusion_the_small_tensors_are_missing() -> None:
    gradient = torch.cat([torch.full((100,), 1.0), torch.full((100,), 0.01), torch.full((50,), 5.0)])
    assert missing.Behind([100, 100, 50], 0.0, 0.01, True).step(gradient) == 0, (
        "a buffer for each: one element at least"
    )
    assert missing.Behind([100, 100, 50], 1.0, 0.01, True).step(gradient) == 2, "two elements of 250, both in the last"
    assert missing.Behind([100, 100, 50], 0.67, 0.01, True).step(gradient) == 1, "two tensors in the first buffer"


def test_what_is_not_sent_comes_back() -> None:
    behind = missing.Behind([4, 4], 1.0, 0.25, True)
    gradient = torch.tensor([9.0, 8.0, 0.0, 0.0, 5.0, 4.0, 0.0, 0.0])
    assert [behind.step(gradient), behind.step(torch.zeros(8))] == [1, 1]
    assert behind._residual.count_nonzero() == 0, "all four have been sent by now"
    forgetful = missing.Behind([4, 4], 1.0, 0.25, False)
    forgetful.step(gradient)
    assert forgetful.step(gradient) == 1 and gradient[0] == 9, "the same again; the gradient is left as it is"


@exhaustive(guarded_by="tests/benchmarks/test_missing.py::test_what_is_not_sent_comes_back")
def test_the_command_writes_rates_and_a_picture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["missing", "--models", "resnet", "--steps", "1", "--out", str(tmp_path)])
    monkeypatch.setattr(missing, "WARM_UP", 0)
    assert missing.main() == 0
    assert "resnet" in capsys.readouterr().out
    (result,) = tmp_path.glob("missing_*.json")
    rows = json.loads(result.read_text())["rows"]
    assert [row["degree"] for row in rows] == 2 * list(missing.DEGREES) and rows[0]["missing"] == 0
    assert [row["feedback"] for row in rows] == [False] * len(missing.DEGREES) + [True] * len(missing.DEGREES)
    assert rows[-1]["missing"] > 0
    assert "</svg>" in (tmp_path / "plots" / "missing.svg").read_text()
