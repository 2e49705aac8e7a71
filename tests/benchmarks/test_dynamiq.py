from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import dynamiq
from benchmarks.hops import METHODS, Method

pytestmark = pytest.mark.short


def test_the_command_writes_all_tables(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dynamiq, "WORKERS", 2)
    monkeypatch.setattr(dynamiq, "MODELS", {"gpt-small": 0})
    monkeypatch.setattr(dynamiq, "WORLDS", (2,))
    monkeypatch.setattr("benchmarks.hops.SUMS", 4)
    options = ["--numel", "8192", "--steps", "1", "--out", str(tmp_path), "--hardware", "test"]
    assert dynamiq.main(options) == 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in (*METHODS, *dynamiq.LADDER, "gpt-small, step 1"))
    sizes = {path.name.split("_")[0]: len(json.loads(path.read_text())["rows"]) for path in tmp_path.glob("*.json")}
    assert sizes == {
        "dynamiq-methods": len(METHODS) + len(dynamiq.BUDGETS) - 1,
        "dynamiq-ladder": len(dynamiq.LADDER) + 1,
        "dynamiq-traffic": 3,
    }


def test_traffic_is_what_the_calls_of_a_ring_come_to() -> None:
    """All but w of a slope per sent byte is f32: a rank reads its values once more than it decodes sums."""
    numel = 1 << 17
    for name in ("mxfp8", "dynamiq"):
        method = METHODS[name]
        w = dynamiq.bits_of(method, numel) / 8
        stats = 4 * (name == "dynamiq")
        for world in (2, 4):
            expected = stats + (4 + w) / world + (world - 1) / world * (4 + 2 * w) + 4 + w
            assert dynamiq.traffic(method, world, numel) == pytest.approx(expected, rel=0.03)
    assert dynamiq.traffic(Method("bf16"), 2, numel) == pytest.approx(3 + 0.5 * 8 + 6, rel=0.03)
