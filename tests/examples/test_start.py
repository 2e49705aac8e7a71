"""The scripts of the pages Start and of the guide to DDP, saved and started as these pages say."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from fusionlayer.cli.spawn import without_launcher
from tests.pages import blocks, lines
from tests.test_guides import check_losses
from tests.tiers import exhaustive, long

from .places import ROOT
from .slurm import MISSING

pytestmark = pytest.mark.medium

# Starts its command as two nodes' tasks, with the variables that srun of Slurm 22.05 was seen to set.
SRUN = """\
#!/bin/sh
size=$((2 * SLURM_NTASKS_PER_NODE)) rank=0
export SLURM_STEP_NUM_TASKS=$size SLURM_NTASKS=$size SLURM_STEP_ID=0 SLURM_STEP_NODELIST="$SLURM_JOB_NODELIST"
export SLURM_STEP_TASKS_PER_NODE="$SLURM_NTASKS_PER_NODE(x2)"
while [ $rank -lt $size ]; do
    export SLURM_PROCID=$rank SLURM_LOCALID=$((rank % SLURM_NTASKS_PER_NODE))
    SLURM_NODEID=$((rank / SLURM_NTASKS_PER_NODE)) "$@" & pids="$pids $!"
    rank=$((rank + 1))
done
for pid in $pids; do wait $pid || exit; done
"""


def run(command: list[str], folder: Path, **variables: str) -> str:
    """Return what a command prints."""
    path = f"{folder}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = without_launcher(os.environ) | {"PATH": path, "PYTHONPATH": str(ROOT)} | variables
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@exhaustive(guarded_by="tests/test_guides.py::test_the_two_lines_train_alike_on_all_ranks")
@pytest.mark.parametrize(
    "page, script", [("start/laptop.md", "train.py"), pytest.param("guides/ddp.md", "train_ddp.py", marks=long)]
)
def test_two_processes_of_a_page(page: str, script: str, tmp_path: Path) -> None:
    (code,) = blocks(page, "python")
    (tmp_path / script).write_text(code)
    (command,) = lines(page, "torchrun")
    assert command.endswith(script)
    check_losses(run([*shlex.split(command)[:1], "--standalone", *shlex.split(command)[1:]], tmp_path))


@pytest.mark.skipif(not MISSING, reason="Slurm is here: tests/examples/test_slurm.py runs them on it")
@exhaustive(guarded_by="tests/test_commands.py::test_every_command_is_understood")
@pytest.mark.parametrize("number", [0, 1])
def test_a_job_of_slurm(number: int, tmp_path: Path) -> None:
    """By stand-ins for srun and scontrol: nodes are this host under two names of its loopback."""
    (code,) = blocks("start/laptop.md", "python")
    job = blocks("start/slurm.md", "bash")[number]
    (tmp_path / "train.py").write_text(code)
    for name, text in ("srun", SRUN), ("scontrol", '#!/bin/sh\necho "$3" | tr , "\\n"\n'):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    tasks = re.search(r"^#SBATCH --ntasks-per-node (\d)$", job, re.MULTILINE)
    assert tasks is not None and "#SBATCH --nodes 2\n" in job
    (tmp_path / "job.sh").write_text(job.replace("source .venv/bin/activate\n", "").replace("eth0", "lo"))
    told = run(
        ["bash", "-e", "job.sh"],
        tmp_path,
        SLURM_JOB_ID=str(os.getpid()),
        SLURM_NNODES="2",
        SLURM_NTASKS_PER_NODE=tasks[1],
        SLURM_JOB_NODELIST="localhost,127.0.0.1",
    )
    check_losses(told, ranks=4)
