"""The commands that CONTRIBUTING.md and CI rely on."""

import os
import subprocess

from tests.gpu.stages import SELECTIONS, STAGES
from tests.loops import looped
from tests.tiers import FAST

from .project_tree import ROOT

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
        ("test-short", 'python -m pytest -m "not medium and not exhaustive and not long and not gpu" --steps 3'),
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
