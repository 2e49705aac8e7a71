"""What ``.ci/tally.py`` reruns, and what it counts as a failure."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from .project_tree import ROOT

pytestmark = pytest.mark.medium

TALLY = ROOT / ".ci" / "tally.py"
CONFIG = "[pytest]\nmarkers =\n    medium: starts processes\n"
# A test fails as often as its file counts; each run takes one off.
TESTS = """
import pytest
from pathlib import Path

def fails(name):
    left = Path(name)
    count = int(left.read_text()) if left.exists() else 0
    left.write_text(str(max(0, count - 1)))
    assert not count, f"{name} fails"

@pytest.mark.medium
@pytest.mark.xdist_group("a.file")
@pytest.mark.parametrize("n", ["x@y"])
def test_processes(n):
    fails("processes")

def test_one_process():
    fails("one_process")

def test_skipped():
    pytest.skip("no device")

@pytest.fixture
def broken():
    fails("fixture")

def test_fixture(broken):
    pass
"""


def tally(folder: Path, *more: str, **failures: int) -> tuple[int, str]:
    """Run the tests above, and then the tally; return its exit status and output."""
    (folder / "pytest.ini").write_text(CONFIG)
    (folder / "test_it.py").write_text(TESTS)
    for name, count in failures.items():
        (folder / name).write_text(str(count))
    command = [sys.executable, "-m", "pytest", "-q", "-n", "1", "--dist", "loadgroup", "--report-log=log.jsonl", *more]
    subprocess.run(command, cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, check=False)
    command = [sys.executable, TALLY, "log.jsonl"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout


def summary(output: str) -> str:
    return output.splitlines()[-1].split(" in ")[0]


def test_tests_count_once_and_a_second_failure_counts(tmp_path: Path) -> None:
    assert summary(tally(tmp_path)[1]) == "==== 3 passed, 1 skipped"
    status, output = tally(tmp_path, processes=1)
    assert status == 0 and summary(output) == "==== 3 passed, 1 skipped, 1 rerun"
    assert "FLAKY" in output
    kept = (tmp_path / "build/flaky.txt").read_text()
    assert "==== test_it.py::test_processes[x@y]" in kept and "processes fails" in kept
    status, output = tally(tmp_path, processes=2)
    assert status == 1 and summary(output) == "==== 1 failed, 2 passed, 1 skipped"
    assert "FLAKY" not in output and not (tmp_path / "build/flaky.txt").read_text()


@pytest.mark.parametrize("name", ["one_process", "fixture"])
def test_a_test_in_one_process_never_runs_again(name: str, tmp_path: Path) -> None:
    status, output = tally(tmp_path, **{name: 1})
    assert status == 1 and summary(output) == "==== 1 failed, 2 passed, 1 skipped"
    assert f"FAILED test_it.py::test_{name}" in output


def test_a_run_that_did_not_end_is_a_failure(tmp_path: Path) -> None:
    status, output = tally(tmp_path, "-x", one_process=1)
    assert status == 1 and "ERROR log.jsonl: pytest ended with 2" in output
    (tmp_path / "log.jsonl").unlink()
    (tmp_path / "test_it.py").write_text("import nothing_of_this_name")
    done = subprocess.run([sys.executable, TALLY, "log.jsonl"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1 and "log.jsonl: not written" in done.stdout
