"""Reads from the variables of batch schedulers whether a job has other processes, where no launcher started this one.

Such a process would train alone, and each of its job would, without an error.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path

from ..base.errors import ConfigError


def _hosts_in_file(name: str) -> int:
    try:
        return len({*Path(name).read_text().split()})
    except (OSError, ValueError):
        return 0


def _number(text: str) -> int:
    return int(text) if text.isdecimal() else 0


def _hosts_of_slurm(text: str) -> int:
    """Return 1 for one name, 2 for several: "n[1-2]" or "a,b"; of a step on one host it is "n1"."""
    return 2 if re.search(r"[,[]", text) else 1


def _nodes_of_slurm(text: str) -> int:
    """Return the number of nodes in a form such as "4(x2),1"."""
    return sum(int(count or 1) for count in re.findall(r"\d+(?:\(x(\d+)\))?", text))


# Numbers of cores or slots say nothing: one process may have them all.
_HOSTS: Mapping[str, tuple[str, Callable[[str], int]]] = {
    "SLURM_NNODES": ("Slurm", _number),
    "SLURM_JOB_NUM_NODES": ("Slurm", _number),
    "SLURM_STEP_NUM_NODES": ("Slurm", _number),
    "SLURM_JOB_NODELIST": ("Slurm", _hosts_of_slurm),
    "SLURM_NODELIST": ("Slurm", _hosts_of_slurm),
    "SLURM_STEP_NODELIST": ("Slurm", _hosts_of_slurm),
    "SLURM_TASKS_PER_NODE": ("Slurm", _nodes_of_slurm),
    "SLURM_STEP_TASKS_PER_NODE": ("Slurm", _nodes_of_slurm),
    "SLURM_JOB_CPUS_PER_NODE": ("Slurm", _nodes_of_slurm),
    "SLURM_HET_SIZE": ("Slurm", _number),
    "PBS_NUM_NODES": ("PBS", _number),
    "PBS_NODEFILE": ("PBS", _hosts_in_file),
    "LSB_HOSTS": ("LSF", lambda text: len({*text.split()})),
    "LSB_MCPU_HOSTS": ("LSF", lambda text: len({*text.split()[::2]})),
    "LSB_DJOB_HOSTFILE": ("LSF", _hosts_in_file),
    "FLUX_JOB_NNODES": ("Flux", _number),
}
"""How each variable lists the hosts of a job: its owner, and how many hosts its value has."""

_TASKS: Mapping[str, str] = {
    "SLURM_NTASKS_PER_NODE": "Slurm",
    "FLUX_TASK_LOCAL_ID": "Flux",
    "JSM_NAMESPACE_LOCAL_RANK": "LSF",
    "JSM_NAMESPACE_LOCAL_SIZE": "LSF",
    "MPI_LOCALNRANKS": "MPI",
    "MPI_LOCALRANKID": "MPI",
    "MV2_COMM_WORLD_LOCAL_RANK": "MVAPICH",
    "MV2_COMM_WORLD_LOCAL_SIZE": "MVAPICH",
    "OMPI_COMM_WORLD_LOCAL_RANK": "Open MPI",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "Open MPI",
    "PALS_LOCAL_RANKID": "PALS",
    "PALS_LOCAL_SIZE": "PALS",
    "PBS_NODENUM": "PBS",
    "PBS_VNODENUM": "PBS",
    "SLURM_LOCALID": "Slurm",
    "SLURM_NODEID": "Slurm",
}
"""Variables that number tasks, or count those of a host: tasks from 0 on, and sizes above 1 mean several."""

_MEMBERS: Mapping[str, str] = {
    "JOB_COMPLETION_INDEX": "an indexed Job of Kubernetes",
    "PMIX_RANK": "PMIx",
}
"""Variables of jobs that may have several processes, without their number."""

VARIABLES = sorted({**_HOSTS, **_TASKS, **_MEMBERS})


def refuse_alone(environ: Mapping[str, str]) -> None:
    """Raise ``ConfigError`` if variables of a scheduler say that there are other processes, or that there should be.

    Called where none of them says which rank this process is.
    """
    for name, owner in _MEMBERS.items():
        if name in environ:
            raise ConfigError(
                f"{name}={environ[name]} and no number of processes: {owner} does not set it; set RANK and "
                f"WORLD_SIZE, MASTER_ADDR and MASTER_PORT in each process, as torchrun does{_ALONE}"
            )
    for name, (owner, count) in _HOSTS.items():
        if name in environ and count(environ[name]) > 1:
            _refuse(name, environ[name], owner, "hosts")
    for name, owner in _TASKS.items():
        sizes = name.endswith(("SIZE", "RANKS", "PER_NODE"))
        if _number(environ.get(name, "")) > sizes:
            _refuse(name, environ[name], owner, "processes")


_ALONE = "; for one process alone set RANK=0 and WORLD_SIZE=1"

_LAUNCHERS = {
    "Slurm": "srun or torchrun",
    "PBS": "mpiexec or torchrun",
    "LSF": "jsrun or torchrun",
    "Flux": "'flux run' or torchrun",
}


def _refuse(name: str, value: str, owner: str, what: str) -> None:
    launcher = _LAUNCHERS.get(owner, "its launcher, with all of its variables, or by torchrun")
    raise ConfigError(
        f"this job of {owner} has several {what} ({name}={value}), and this process is none of its ranks: start it by "
        f"{launcher}{_ALONE}"
    )
