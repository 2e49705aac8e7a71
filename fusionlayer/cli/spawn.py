"""Ranks that a command starts itself: child processes on this host."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import IO

from ..base.errors import FusionLayerError

RANKS_PREFIX = "fusionlayer-ranks-"
"""With which the name of the ranks' temporary folder begins; it goes when they have ended."""

# Variables that show that a launcher has started the process.
LAUNCHER_PREFIXES = (
    *("OMPI_", "PMI_", "PMIX_", "MPI_LOCAL", "TORCHELASTIC_", "GROUP_", "ROLE_"),
    *("FLUX_TASK_", "FLUX_JOB_", "JSM_NAMESPACE_", "MV2_COMM_", "PALS_"),
)
_LAUNCHER_NAMES = {
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    *("HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_RANK", "HOROVOD_LOCAL_SIZE", "HOROVOD_GLOO_RENDEZVOUS_ADDR"),
}


class RankError(FusionLayerError):
    """A rank failed or timed out.

    Attributes:
        rank: which one.
    """

    def __init__(self, rank: int, message: str) -> None:
        super().__init__(message)
        self.rank = rank


def without_launcher(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the environment as if no launcher had started this process."""
    return {
        name: value
        for name, value in environ.items()
        if not name.startswith(LAUNCHER_PREFIXES) and name not in _LAUNCHER_NAMES
    }


def run_on_ranks(
    arguments: Sequence[str],
    ranks: int,
    timeout: float | None = None,
    environment: Mapping[str, str] | None = None,
    output: IO[str] | None = None,
    errors_shown: bool = False,
) -> None:
    """Run ``python *arguments`` on ``ranks`` processes; when one fails, end the others.

    Args:
        arguments: for the Python interpreter of this process.
        ranks: number of processes.
        timeout: seconds until all are ended; None for no limit.
        environment: further variables for the processes.
        output: where rank 0's standard output goes; None: where this process's goes. Output of other ranks is dropped.
        errors_shown: rank 0's standard error goes where this process's goes.

    Raises:
        RankError: a rank failed or timed out. The message has its last line of standard error, unless that
            was shown.
    """
    shared = {
        **without_launcher(),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // ranks))),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "PMIX_NAMESPACE": secrets.token_hex(8),  # names the file by which the ranks meet
        **(environment or {}),
    }
    end = None if timeout is None else time.monotonic() + timeout
    with tempfile.TemporaryDirectory(prefix=RANKS_PREFIX) as folder:
        errors = [open(os.path.join(folder, f"{rank}"), "w+") for rank in range(ranks)]  # noqa: SIM115
        started: list[subprocess.Popen[str]] = []
        try:
            for rank in range(ranks):
                own = {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank), "TMPDIR": folder}
                out = output if rank == 0 else subprocess.DEVNULL
                err = None if rank == 0 and errors_shown else errors[rank]
                started.append(
                    subprocess.Popen([sys.executable, *arguments], env=own, stdout=out, stderr=err, text=True)
                )
            _wait(started, errors, end)
        finally:
            for process in started:
                if process.poll() is None:
                    process.kill()
                process.wait()
            for file in errors:
                file.close()


def _wait(started: Sequence[subprocess.Popen[str]], errors: Sequence[IO[str]], end: float | None) -> None:
    while True:
        states = [process.poll() for process in started]
        for rank, state in enumerate(states):
            if state not in (None, 0):
                raise RankError(rank, f"rank {rank} ended with status {state}: {_last_lines(errors[rank])}")
        if None not in states:
            return
        if end is not None and time.monotonic() > end:
            late = states.index(None)
            raise RankError(late, f"rank {late} timed out: {_last_lines(errors[late])}")
        time.sleep(0.02)


def _last_lines(file: IO[str]) -> str:
    file.seek(0)
    lines = [line for line in file.read().splitlines() if line.strip()]
    return lines[-1] if lines else "it wrote nothing to standard error"
