"""The command that draws results of trainings runs."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import plots
from benchmarks.training.methods import all_methods
from tests.tiers import needs

pytestmark = needs("matplotlib")


def training_row(method: str, seconds: float, rate: str | None = "100mbit") -> dict[str, Any]:
    ratio = 4.0 / seconds
    speedup = {"median": ratio, "low": 0.9 * ratio, "high": 1.2 * ratio, "min": 0.8 * ratio, "max": 1.3 * ratio}
    return {
        **{"model": "gpt", "hosts": 2, "workers": 1, "rate": rate, "method": method, "step_seconds": seconds},
        **{"speedup": speedup, "bytes_per_step": 1e7 * seconds, "compute_seconds": 0.25},
        "codec_seconds": 0.05 if method.startswith("int") else None,
    }


ROWS = [
    training_row(method, 4.0 * 0.96**place, rate)
    for rate in ("1gbit", "100mbit")
    for place, method in enumerate([*all_methods()][:6])
]


def test_the_command_writes_pictures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    result = tmp_path / "training.json"
    result.write_text(json.dumps({"title": "Training", "rows": ROWS}))
    monkeypatch.setattr(sys, "argv", ["plots", str(result), "--out", str(tmp_path / "plots")])
    assert plots.main() == 0
    assert len(capsys.readouterr().out.split()) == 2
    assert "</svg>" in (tmp_path / "plots/speedup_gpt-2x1.svg").read_text()
