"""The commands that CONTRIBUTING.md and CI rely on."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.gpu.stages import SELECTIONS, STAGES

from .project_tree import ROOT

pytestmark = pytest.mark.short

PYTEST = "python -m pytest --dist loadgroup --no-loadscope-reorder --max-worker-restart 0"


@pytest.mark.parametrize(
    ("target", "command"),
    [
        ("demo", "python examples/demo.py --steps 3"),
        ("test", f'{PYTEST} -n 3 -m "not gpu and not exhaustive" --steps 3'),
        ("test-exhaustive", f'{PYTEST} -n 3 -m "exhaustive and not gpu" --steps 3'),
        ("test-all", f'{PYTEST} -n 3 -m "not gpu" --steps 3'),
        ("test-short", 'python -m pytest -m "short and not exhaustive" --steps 3'),
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


def test_the_demo_installs_what_runs_and_tests_get_the_library_of_all_gpus(tmp_path: Path) -> None:
    """Without .venv the demo makes one without the tools; with that of `make install` it takes it as it is."""
    makefile = (ROOT / "Makefile").read_text()
    (tmp_path / "Makefile").write_text(makefile)
    for name in ("setup.py", "pyproject.toml", "constraints.txt"):
        (tmp_path / name).touch()
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("MAKE", "FUSIONLAYER"))}

    def make(*arguments: str) -> str:
        return subprocess.run(
            ["make", *arguments], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
        ).stdout

    fresh = make("-n", "demo")
    assert "-e '.[demo]'" in fresh and "[dev]" not in fresh
    python = tmp_path / ".venv/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text('#!/bin/sh\necho "$* for ${FUSIONLAYER_CUDA_ARCHS-here}"\n')
    python.chmod(0o755)
    (tmp_path / ".venv/.installed").touch()
    build, demo = make("demo").splitlines()[:2]
    assert build == "setup.py -q build_ext --inplace for all"
    assert "examples/demo.py" in demo and "pip" not in build + demo


@pytest.mark.parametrize("failing", ["", "test", "test-exhaustive"])
def test_ci_runs_both_tiers_to_their_end_and_fails_with_either(failing: str, tmp_path: Path) -> None:
    log = tmp_path / "log"
    for name in ("make", "apt-get"):
        (tmp_path / name).write_text(f'#!/bin/sh\necho "$PWD $*" >> {log}.{name}\n[ "$1" != "{failing}" ] || exit 3\n')
        (tmp_path / name).chmod(0o755)
    environment = {**os.environ, "CI": "true", "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run([ROOT / ".ci/run"], cwd=tmp_path, env=environment, stdin=subprocess.DEVNULL, timeout=30)
    assert done.returncode == (3 if failing else 0)
    assert Path(f"{log}.make").read_text().splitlines() == [f"{ROOT} test", f"{ROOT} test-exhaustive"]
    assert os.getuid() != 0 or "slurm-wlm" in Path(f"{log}.apt-get").read_text()
