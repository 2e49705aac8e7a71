"""Variables of srun's tasks: ranks, sizes, and rank 0's host. Used where srun has started no other launcher."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from ..base.errors import ConfigError

# Variables that srun alone sets, and those that a batch script has as well.
_OF_A_STEP = {"SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS"}
_OF_A_JOB = {"SLURM_JOB_ID", "SLURM_JOBID", "SLURM_JOB_NUM_NODES", "SLURM_JOB_NODELIST", "SLURM_JOB_CPUS_PER_NODE"}


class Task(NamedTuple):
    """Ranks and sizes of a task of srun in its step and on its node."""

    rank: int
    size: int
    local_rank: int
    local_size: int


def find_task(environ: Mapping[str, str]) -> Task | None:
    """Return this process's place in its step of a Slurm job; None outside Slurm."""
    size = _number(environ, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS")
    rank = _number(environ, "SLURM_PROCID")
    if size is None:
        left = [f"{name}={environ[name]}" for name in ("SLURM_PROCID", "SLURM_STEP_ID") if name in environ]
        if rank or "SLURM_STEP_ID" in environ:
            raise ConfigError(
                f"{left[0]} and no SLURM_NTASKS: a container or a wrapper has dropped variables of srun; "
                "let it pass on all that begin with SLURM_"
            )
        return None
    if size == 1:
        return Task(0, 1, 0, 1)  # an interactive shell, too, which no srun need have started
    # A batch script has the number of its first task, and no step.
    if rank is None or environ.keys() & _OF_A_JOB and not environ.keys() & _OF_A_STEP:
        raise ConfigError(
            f"this job of Slurm has {size} tasks, and this process is none of them: start it by srun or torchrun; "
            "for one process alone set RANK=0 and WORLD_SIZE=1"
        )
    local_rank = _number(environ, "SLURM_LOCALID")
    tasks = environ.get("SLURM_STEP_TASKS_PER_NODE", environ.get("SLURM_TASKS_PER_NODE"))
    node = _number(environ, "SLURM_NODEID") or 0
    counts = [size] if tasks is None else _counts(tasks)
    local_size = counts[node] if node < len(counts) else size
    task = Task(rank, size, rank if local_rank is None else local_rank, local_size)
    if not 0 <= task.rank < size or not 0 <= task.local_rank < local_size <= size:
        raise ConfigError(
            f"srun variables say rank {task.rank} of {size}, local rank {task.local_rank} of {local_size}; "
            "expected 0 <= rank < size"
        )
    return task


def speaks_pmi(environ: Mapping[str, str]) -> bool:
    """Return whether srun itself has set PMI_RANK and PMI_SIZE, as ``--mpi=pmi2`` does; they know nothing of nodes."""
    same = (("PMI_RANK", "SLURM_PROCID"), ("PMI_SIZE", "SLURM_STEP_NUM_TASKS"))
    own = all(environ.get(name) == environ.get(srun) for name, srun in same)
    return own and "PMI_RANK" in environ and "MPI_LOCALRANKID" not in environ


def step_of(environ: Mapping[str, str]) -> str | None:
    """Return a name of this step that no other step has; None if Slurm has not numbered it."""
    numbers = [environ.get(name) for name in ("SLURM_JOB_ID", "SLURM_STEP_ID")]
    return None if None in numbers else "slurm-{}-{}".format(*numbers)


def meeting_point(environ: Mapping[str, str]) -> tuple[str, int]:
    """Return the host of rank 0, and the port that the step's ranks meet at: the same on all of them."""
    nodes = environ.get("SLURM_STEP_NODELIST", environ.get("SLURM_JOB_NODELIST", environ.get("SLURM_NODELIST", "")))
    job = _number(environ, "SLURM_JOB_ID", "SLURM_JOBID")
    if not nodes or job is None:
        raise ConfigError(
            "tasks of srun on several nodes, and no SLURM_STEP_NODELIST or SLURM_JOB_ID to meet by: set MASTER_ADDR "
            "and MASTER_PORT to an address of rank 0's node"
        )
    first = _first_host(nodes)
    if not re.fullmatch(r"\w[\w.-]*", first, re.ASCII):
        raise ConfigError(
            f"SLURM_STEP_NODELIST={nodes!r} begins with no name of a host; set MASTER_ADDR to that of rank 0"
        )
    # Below the ports that systems give out by themselves. Jobs and steps that share a node rarely share a port.
    return first, 12_000 + (7 * job + (_number(environ, "SLURM_STEP_ID") or 0)) % 18_000


def _number(environ: Mapping[str, str], *names: str) -> int | None:
    """Return the first of these variables that is set."""
    for name in names:
        if name in environ:
            try:
                return int(environ[name])
            except ValueError:
                raise ConfigError(f"{name}={environ[name]!r}; expected a whole number, as srun sets it") from None
    return None


def _counts(text: str) -> list[int]:
    """Return the tasks of each node from Slurm's short form: "2(x3),1" is 2, 2, 2, 1."""
    found: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match is None:
            raise ConfigError(f"SLURM_TASKS_PER_NODE={text!r}; expected numbers of tasks such as 2(x3),1")
        found += [int(match[1])] * int(match[2] or 1)
    return found


def _first_host(nodes: str) -> str:
    """Return the first host of Slurm's short form: of "gpu[07-09,12],login" it is gpu07."""
    return re.sub(r"\[(\w+)[^]]*\]", r"\1", re.match(r"(?:[^,[]|\[[^]]*\])*", nodes)[0])  # type: ignore[index]
