"""All benchmarks run, and what they write fits together; how fast anything was is not looked at."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.suite import commands
from tests.examples.places import NAMESPACES_WORK, ROOT
from tests.tiers import exhaustive


@pytest.mark.short
def test_parts_of_the_suite(tmp_path: Path) -> None:
    (tmp_path / "training-gpt-2x1_x_2026-01-01.json").touch()
    (tmp_path / "convergence-gpt-2x1-adamw_x_2026-01-01.json").touch()
    (tmp_path / "codec_x_2026-01-01.json").touch()
    parts = list(commands(smoke=False, busy_ok=False, out=tmp_path))
    assert [part[0] for part in parts] == [
        *["benchmarks.training"] * 3,
        *("benchmarks.ablation", "benchmarks.codec", "benchmarks.collective", "benchmarks.plots"),
    ]
    assert all("--out" in part and "--busy-ok" not in part for part in parts)
    drawn = ["convergence-gpt-2x1-adamw_x_2026-01-01.json", "training-gpt-2x1_x_2026-01-01.json"]
    assert [Path(name).name for name in parts[-1][1:3]] == drawn
    assert all(
        "--busy-ok" in part for part in commands(smoke=True, busy_ok=False, out=tmp_path) if "plots" not in part[0]
    )


@exhaustive(guarded_by="tests/test_documents.py::test_the_commands_of_the_readme_run")
@pytest.mark.medium
@pytest.mark.netns
@pytest.mark.timeout(490)
def test_smoke(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.suite", "--smoke", "--out", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=480,
    )
    assert done.returncode == 0, done.stderr
    stem = "gpt-small-2x1" if NAMESPACES_WORK else "gpt-small-1x2"
    result = json.loads(next(tmp_path.glob(f"training-{stem}_*.json")).read_text())
    rows = {row["method"]: row for row in result["rows"]}
    assert list(rows) == ["alone", "ddp", "ddp-again", "ddp-powersgd", "int4", "int4+overlap"]
    assert all(row["identical"] for row in result["rows"] if row["method"] != "alone")
    assert all(len(row["rounds"]) == 2 for row in result["rows"])
    assert (rows["ddp"]["codec_seconds"], rows["int4"]["codec_seconds"] > 0) == (None, True)
    assert "DIFFER" not in done.stdout
    if NAMESPACES_WORK:
        sent = {method: row["bytes_per_step"] for method, row in rows.items()}
        assert sent["alone"] < 2000 < sent["ddp-powersgd"] < sent["int4"] < sent["ddp"]
        assert 3.33e6 < sent["ddp"] < 3.8e6  # 834,304 parameters of 4 bytes, and headers
    pictures = {path.name for path in (tmp_path / "plots").iterdir()}
    assert {f"{kind}_{stem}.svg" for kind in ("speedup", "breakdown", "bytes")} == pictures
    assert list(tmp_path.glob("collective_*.json"))
