"""Help, versions and refusals need no torch, and what is refused ends with status 2."""

import subprocess
import sys

import pytest

from fusionlayer.cli import bench, main
from fusionlayer.cli.parsers import simulate
from fusionlayer.cli.parsers.bench import DTYPES
from fusionlayer.planning.collective_phases import ALGORITHMS

COMMANDS = ("bench collectives", "doctor", "profile", "plan", "explain", "simulate", "trace", "status")
REFUSED = {
    "plan --profile x --workers 2": "nothing to do; give -o PLAN.yaml for the plan, or --compare for a table of",
    "plan --profile x --workers 2 --rates 1gbit -o y": "--rates is for --compare",
    "plan --profile x --workers 2 --columns palnner -o y": "unknown column 'palnner'; did you mean 'planner'? known: ",
    "explain x --profile y --columns buckte": "unknown column 'buckte'; did you mean 'bucket'? known: ",
    "simulate x --columns stpe": "unknown column 'stpe'; did you mean 'step'? known: workers, ",
    "simulate x --rate 1gbit --rates 1gbit": "--rate and --rates; give one of them",
    "doctor --columns stat": "unknown column 'stat'; did you mean 'state'? known: section, name, state, detail, all",
    "bench collectives -np 2 --columns bussbw,time": "unknown column 'bussbw'; did you mean 'busbw'? known: ",
    "bench collectives -np 2 --collectives allreduce": "unknown collective 'allreduce'; did you mean 'all_reduce'?",
    "bench collectives -np 2 --min 2K --max 1K": "--min 2048 is above --max 1024 bytes; give a range",
}
WITHOUT_TORCH = f"""
import sys
from fusionlayer.cli import fusionrun, main

def status(run, line):
    try:
        return run(line.split())
    except SystemExit as ended:
        return ended.code or 0

for command in {("", *COMMANDS)}:
    assert status(main, command + " --help") == 0, command
assert status(main, "--version") == status(fusionrun.main, "--help") == status(fusionrun.main, "--version") == 0
for line in {[*REFUSED]}:
    assert status(main, line) == 2, line
fusionrun.plan(fusionrun.make_parser().parse_args("-np 2 -H localhost:1,node2:1 python train.py".split()))
loaded = sorted({{"torch", "numpy", "scipy"}} & sys.modules.keys())
assert not loaded, loaded
import fusionlayer
assert "DistributedOptimizer" in dir(fusionlayer) and "torch" not in sys.modules
"""


@pytest.mark.medium
def test_help_and_refusals_come_without_torch() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT_TORCH], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr


def refusal(line: str, capsys: pytest.CaptureFixture[str]) -> str:
    """Return what a command says that must end with status 2."""
    try:
        status = main(line.split())
    except SystemExit as ended:
        status = int(ended.code or 0)
    assert status == 2, line
    told = capsys.readouterr()
    assert not told.out and told.err.count("\n") == 1, line
    return told.err


def test_what_makes_no_sense_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for line, words in REFUSED.items():
        assert words in refusal(line, capsys), line


def test_names_that_parsers_repeat_are_those_of_torch_and_the_planner() -> None:
    assert list(ALGORITHMS) == list(simulate.ALGORITHMS)
    assert all(hasattr(bench.torch, name) for name in DTYPES.values())
