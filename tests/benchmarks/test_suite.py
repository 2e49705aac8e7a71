"""Which commands the suite has; ``make bench-smoke`` runs them in small."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.suite import commands


@pytest.mark.short
def test_parts_of_the_suite(tmp_path: Path) -> None:
    (tmp_path / "training-gpt-2x1_x_2026-01-01.json").touch()
    (tmp_path / "codec_x_2026-01-01.json").touch()
    parts = list(commands(smoke=False, busy_ok=False, out=tmp_path))
    assert [part[0] for part in parts] == [
        *["benchmarks.training"] * 3,
        *("benchmarks.codec", "benchmarks.collective", "benchmarks.plots"),
    ]
    assert all("--out" in part and "--busy-ok" not in part for part in parts)
    assert [Path(name).name for name in parts[-1][1:-2]] == ["training-gpt-2x1_x_2026-01-01.json"]
    assert all(
        "--busy-ok" in part for part in commands(smoke=True, busy_ok=False, out=tmp_path) if "plots" not in part[0]
    )
