"""The benchmark of calls that pass: its arithmetic, and that it runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.passthrough import __main__ as command
from benchmarks.passthrough.worker import FORMS
from tests.tiers import long


@pytest.mark.short
def test_a_cost_is_within_rounds() -> None:
    seconds = {"gloo": [0.1, 0.2, 0.4], "fusionlayer": [0.102, 0.206, 0.4]}
    found = command.line("fusionlayer", seconds)
    assert found == {"form": "fusionlayer", "step, ms": "206.0", "cost over gloo, %": "+2.00 [+0.00..+3.00]"}


@long(guarded_by="tests/benchmarks/test_passthrough.py::test_a_cost_is_within_rounds")
@pytest.mark.medium
def test_a_little_of_it(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--smoke", "--out", str(tmp_path), "--hardware", "test"]) == 0
    out = capfd.readouterr().out
    assert all(f"| {form} " in out for form in FORMS)
    assert {path.suffix for path in tmp_path.glob("passthrough_test_*")} == {".json", ".md"}
