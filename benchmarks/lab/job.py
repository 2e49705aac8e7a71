"""What is to be run, and where: the words between the two sides of a lab."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from benchmarks.lab.flaps import Flap
from benchmarks.lab.network import Network

__all__ = ["INTERRUPTED", "TIMED_OUT", "Job"]

TIMED_OUT = 124
"""Exit status after a deadline, as of timeout(1)."""

INTERRUPTED = 130
"""Exit status after Ctrl-C, as of a shell."""


@dataclass(frozen=True)
class Job:
    """A command, its workers and their hosts.

    Attributes:
        command: program and arguments of every worker.
        network: where the workers run.
        workers: number of workers on each host.
        timeout: seconds until all of them are ended.
        mpi: Open MPI starts the workers.
        host: the only host that has workers; None: all have.
        count_bytes: say at the end what each host has sent.
        namespaces: open files that are the network namespaces of the hosts of a kept lab.
        kept: the hosts are those of a kept lab.
        flaps: interfaces that go down meanwhile.
    """

    command: tuple[str, ...]
    network: Network
    workers: int = 1
    timeout: float = 600.0
    mpi: bool = False
    host: int | None = None
    count_bytes: bool = False
    namespaces: tuple[int, ...] = ()
    kept: bool = False
    flaps: tuple[Flap, ...] = ()

    def to_json(self) -> str:
        """Return what ``from_json`` reads."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Job:
        """Return the job that ``to_json`` wrote."""
        data = json.loads(text)
        flaps = tuple(Flap(**flap) for flap in data["flaps"])
        return cls(**{**data, "network": Network(**data["network"]), "flaps": flaps})
