"""The benchmark of followers in trouble: what it finds wrong, and a small run of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import publish_faults
from tests.examples.places import needs_namespaces
from tests.tiers import long


@pytest.mark.short
def test_a_version_with_another_digest_is_counted(tmp_path: Path) -> None:
    (tmp_path / "published").write_text("0 aa\n1 bb\n2 cc\n")
    (tmp_path / "late").write_text("1 bb\n2 cc\n")
    (tmp_path / "killed").write_text("0 aa\n1 cc\n7 aa\n")
    (tmp_path / "killed events").write_text("3")
    late, killed = (publish_faults._seen(tmp_path, role) for role in ("late", "killed"))
    assert (late["shown"], late["wrong"], late["last"], late["events"]) == (2, 0, 2, 0)
    assert (killed["shown"], killed["wrong"], killed["events"]) == (3, 2, 3)
    first, second = publish_faults.summarize([late, killed])
    assert first["the last one shown"] == "yes" and second["versions shown"] == "3 of 3"


@long(guarded_by="tests/benchmarks/test_publish_faults.py::test_a_version_with_another_digest_is_counted")
@pytest.mark.medium
@pytest.mark.netns
@needs_namespaces
def test_a_little_of_it(tmp_path: Path) -> None:
    small = ["--rate", "1gbit", "--versions", "20", "--numel", "100000"]
    assert publish_faults.main([*small, "--out", str(tmp_path), "--hardware", "test"]) == 0
    (path,) = tmp_path.glob("publish-faults_test_*.json")
    rows = json.loads(path.read_text())["rows"]
    assert [row["events"] for row in rows] == [0, publish_faults.KILLS, 0, len(publish_faults.DOWNS)]
    assert not any(row["wrong"] for row in rows) and all(row["last"] == 19 for row in rows)
