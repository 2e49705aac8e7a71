"""Examples in ranks that fork from the harness: what torchrun runs, without its agent and without new Pythons."""

import io
import os
import runpy
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

from tests.harness import Outcome, outcomes_of
from tests.ports import free_port

from .places import EXAMPLES

__all__ = ["ended", "torchrun"]


def torchrun(
    workers: int, script: str, *options: str, folder: Path | None = None, variables: dict[str, str] | None = None
) -> str:
    """Return what an example prints on all ranks, which must end well."""
    outcomes = ended(workers, script, *options, folder=folder, variables=variables)
    bad = {rank: outcome.trace or outcome for rank, outcome in enumerate(outcomes) if outcome.kind != "returned"}
    assert not bad, "\n".join(f"rank {rank}: {why}" for rank, why in bad.items())
    return "".join(outcome.value for outcome in outcomes)


def ended(
    workers: int, script: str, *options: str, folder: Path | None = None, variables: dict[str, str] | None = None
) -> list[Outcome]:
    """Return how an example ends on each rank; the arguments are those of ``torchrun``."""
    set_by_launcher = {"WORLD_SIZE": str(workers), "LOCAL_WORLD_SIZE": str(workers)}
    set_by_launcher |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
    return outcomes_of(_run, workers, script, options, folder, set_by_launcher | (variables or {}), backend=None)


def _run(
    rank: int, world: int, script: str, options: tuple[str, ...], folder: Path | None, variables: dict[str, str]
) -> str:
    os.environ.update(variables, RANK=str(rank), LOCAL_RANK=str(rank))
    if folder is not None:
        os.chdir(folder)
    sys.argv = [script, *options]
    sys.path.insert(0, str(EXAMPLES))
    with redirect_stdout(io.StringIO()) as told, redirect_stderr(told):
        runpy.run_path(str(EXAMPLES / script), run_name="__main__")
    return told.getvalue()
