"""The benchmark of publishing: its arithmetic, and that it runs."""

import json
from pathlib import Path

import pytest

from benchmarks import publish, publish_guard
from tests.examples.places import needs_namespaces
from tests.tiers import long


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
    rows += [
        {"strangers": strangers, "cpu_seconds": 4.0 + strangers / 1000, "failed": 0, "digest": "d"}
        for strangers in (0, 2000)
    ]
    lines = publish_guard.summarize(rows)
    assert [line["times as long"] for line in lines[:4]] == ["1.00", "1.50", "2.00", "3.00"]
    assert [line["times the CPU"] for line in lines] == ["1.00", "1.50", "2.00", "3.00", "1.00", "1.50"]
    assert lines[-1]["failed open()"] == 0 and lines[-1]["same bits"] == "true"


@long(guarded_by="tests/benchmarks/test_publish.py::test_ratios_of_each_guard_and_of_the_flood")
@pytest.mark.medium
@pytest.mark.netns
@needs_namespaces
def test_a_little_of_the_guards(tmp_path: Path) -> None:
    small = ["--turns", "1", "--floods", "1", "--steps", "2", "--busy-ok", "--out", str(tmp_path), "--hardware", "test"]
    assert publish_guard.main(small) == 0
    (path,) = tmp_path.glob("publish-guard_test_*.json")
    rows = json.loads(path.read_text())["rows"]
    assert len(rows) == 2 * 2 * 4 + 2 and all(row.get("follower_has_it", True) for row in rows)


@long(guarded_by="tests/benchmarks/test_publish.py::test_ratios_of_each_guard_and_of_the_flood")
@pytest.mark.medium
@pytest.mark.netns
@needs_namespaces
def test_a_little_of_it(tmp_path: Path) -> None:
    small = ["--rates", "1gbit", "--lrs", "1e-3", "--versions", "2", "--warmup", "1", "--width", "64", "--layers", "1"]
    assert publish.main([*small, "--busy-ok", "--out", str(tmp_path), "--hardware", "test"]) == 0
    (path,) = tmp_path.glob("publish_test_*.json")
    rows = json.loads(path.read_text())["rows"]
    assert len(rows) == 2 and all(0 < row["nbytes"] < row["whole_bytes"] < row["weight_bytes"] for row in rows)
