"""The commands that CONTRIBUTING.md and CI rely on."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gpu.stages import SELECTIONS, STAGES
from tests.loops import looped
from tests.tiers import FAST

from .project_tree import ROOT

pytestmark = pytest.mark.short

PYTEST = "python -m pytest --dist loadgroup --no-loadscope-reorder --max-worker-restart 0"


@looped(
    "target, command",
    [
        ("demo", "python examples/demo.py --steps 3"),
        ("test", f'{PYTEST} -n 3 --ignore tests/gpu -m "{FAST}" --steps 3'),
        ("test-exhaustive", f'{PYTEST} -n 3 -m "exhaustive and not long and not gpu" --steps 3'),
        ("test-long", f'{PYTEST} -n 3 -m "long and not engine and not gpu" --steps 3'),
        ("test-engines", f'{PYTEST} -n 3 -m "engine and not gpu" --steps 3'),
        ("test-all", f'{PYTEST} -n 3 -m "not gpu" --steps 3'),
        ("test-short", 'python -m pytest -m "short and not exhaustive and not long" --steps 3'),
        ("lint", "lint-imports"),
        ("format", "ruff format ."),
        ("bench", "python -m benchmarks.suite --out benchmarks/results --steps 3"),
        ("gpu", f"python3 -m tests.gpu.stages {' '.join(STAGES)} --out benchmarks/results --steps 3"),
        *((f"gpu-{name}", f"python3 -m tests.gpu.stages {name} --out benchmarks/results --steps 3") for name in STAGES),
        *((f"gpu-{name}", f"python3 -m tests.gpu.stages {name} --out build/gpu --steps 3") for name in SELECTIONS),
        ("docs", "python -m mkdocs build"),
        ("docs-serve", "python -m mkdocs serve"),
        ("wheel", "python -m pip wheel . --no-deps -w dist"),
        ("wheels", "python wheels/make.py --steps 3"),
        ("install", "setup.py -q build_ext --inplace"),
        ("clean", "rm -rf build dist"),
    ],
)
def test_make_target_runs(target: str, command: str) -> None:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("MAKE")}
    done = subprocess.run(
        ["make", "-n", target, "PYTHON=python3", "ARGS=--steps 3"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert command in done.stdout


@pytest.mark.parametrize("failing", ["", "test", "test-exhaustive"])
def test_ci_runs_both_tiers_to_their_end_and_fails_with_either(failing: str, tmp_path: Path) -> None:
    """In a tree of its own: the script removes the reports of an earlier run, and CI may be running this test."""
    tree, log = tmp_path / "tree", tmp_path / "log"
    (tree / ".venv/bin").mkdir(parents=True)
    (tree / ".venv/bin/python").symlink_to(sys.executable)
    (tree / ".ci").mkdir()
    for name in ("run", "tally.py"):
        shutil.copy(ROOT / ".ci" / name, tree / ".ci")
    entry = '{"$report_type": "TestReport", "nodeid": "%s", "start": 0, "stop": 1, "outcome": "%s"}'
    end = '{"$report_type": "SessionFinish", "exitstatus": 0}'
    make = f"""#!/bin/sh
echo "$PWD $*" >> {log}.make
report=${{2#*=--report-log=}}
outcome=passed
[ "$1" != "{failing}" ] || outcome=failed
[ "$1" = install ] || printf '{entry}\\n{end}\\n' $1 $outcome > $report
[ "$1" != "{failing}" ] || exit 3
"""
    for name, script in {"make": make, "apt-get": f'#!/bin/sh\necho "$*" >> {log}.apt-get\n'}.items():
        (tmp_path / name).write_text(script)
        (tmp_path / name).chmod(0o755)
    environment = {**os.environ, "CI": "true", "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(
        [tree / ".ci/run"], cwd=tmp_path, env=environment, stdin=subprocess.DEVNULL, capture_output=True
    )
    assert done.returncode == (1 if failing else 0), done
    ran = [line.split(" ARGS=")[0] for line in Path(f"{log}.make").read_text().splitlines()]
    assert ran == [f"{tree} install", f"{tree} test", f"{tree} test-exhaustive"]
    assert os.getuid() != 0 or "slurm-wlm" in Path(f"{log}.apt-get").read_text()
