"""Runs jobs whose ranks are processes, and attacks them: waits for points, sends signals, collects what ranks tell."""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import yaml
from torch.distributed import TCPStore

import fusionlayer as fl
from benchmarks.lab import Network, launch
from benchmarks.lab.ports import hold_port

from .connection import accept, listen
from .job import Job, Outcome, Phase

__all__ = ["Attack", "Field", "NotReached", "Run", "by_ranks", "lab_field", "local_field", "nothing"]

ROOT = Path(__file__).resolve().parents[2]
PATIENCE = 180.0
"""Seconds in which a point must be reached, and in which a host must start."""

Attack = Callable[["Run"], None]
"""What is done to a run, after which its end is awaited."""


def nothing(run: Run) -> None:
    """Leave the ranks alone: the job itself is the attack."""
    run.attacked = time.monotonic()


def by_ranks(run: Run) -> None:
    """Wait until the ranks attack themselves, and tell so. The time that they get to end by themselves begins then."""
    run.await_attack()


class NotReached(Exception):
    """A rank did not come to the point at which it was to be attacked."""


@dataclass
class Run:
    """A job while it runs, as an attack sees it.

    Attributes:
        job: what runs.
        outcomes: of its ranks.
        attacked: monotonic seconds at which the attack was made; 0: not yet.
        number: of the run on its field.
        place: the field.
        pids: of the ranks that have started, by rank.
        folder: for temporary files of the ranks.
        store: that the controller keeps, if it does.
        begun: monotonic seconds of its start.
        strayed: what the ranks have left behind there.
    """

    job: Job
    number: int
    place: Field
    folder: Path
    outcomes: list[Outcome] = field(default_factory=list)
    attacked: float = 0.0
    pids: dict[int, int] = field(default_factory=dict)
    strayed: list[str] = field(default_factory=list)
    begun: float = field(default_factory=time.monotonic)
    store: TCPStore | None = None
    reached: dict[tuple[int, Phase], float] = field(default_factory=dict)
    signalled: dict[int, float] = field(default_factory=dict)

    def await_hold(self, rank: int, phase: Phase) -> None:
        """Return when the rank is held at the point."""
        if not self.place.pump(lambda: (rank, phase) in self.reached or self._ended(rank), PATIENCE):
            raise NotReached(f"rank {rank} did not come to {phase}")
        if (rank, phase) not in self.reached:
            raise NotReached(f"rank {rank} ended before {phase}: {self.outcomes[rank].text or self.outcomes[rank].log}")

    def release(self, rank: int, answer: Any = None) -> None:
        """Let a rank that is held go on."""
        self.place.answer((self.number, rank), answer)

    def signal(self, rank: int, number: signal.Signals) -> None:
        """Send a signal; the first one is the attack."""
        self.signalled.pop(rank, None)
        self.place.signal((self.number, rank), number)
        self.place.pump(lambda: rank in self.signalled, PATIENCE)
        self.attacked = self.attacked or self.signalled[rank]

    @property
    def now(self) -> float:
        """Monotonic seconds."""
        return time.monotonic()

    @property
    def overdue(self) -> bool:
        """Whether the ranks have had all the time that they are given."""
        return self.now > self.begun + self.job.deadline

    def pause(self, seconds: float) -> None:
        """Let time pass."""
        self.place.pump(lambda: False, seconds)

    def await_attack(self) -> None:
        """Return when a rank has told of an attack, or all have ended without one."""
        ranks = range(self.job.world)
        self.place.pump(lambda: self.attacked > 0 or all(map(self._ended, ranks)), PATIENCE)

    def await_ends(self, ranks: list[int], deadline: float) -> bool:
        """Return whether these ranks have ended by themselves before the deadline, in monotonic seconds."""
        return self.place.pump(lambda: all(map(self._ended, ranks)), deadline - time.monotonic())

    def _ended(self, rank: int) -> bool:
        return self.outcomes[rank].status is not None


class Field:
    """Hosts on which runs take place, one after the other: this machine, or hosts of a lab.

    Args:
        folder: for a socket, and for what ranks write.
        hosts: number of hosts; rank r is on host r modulo this.
        address: of host 0, where ranks meet; None: this machine's loopback.
    """

    def __init__(self, folder: Path, hosts: int = 1, address: str | None = None) -> None:
        self._folder = folder
        self.path = str(folder / "controller")
        self._listener = listen(self.path)
        self._hosts: dict[int, Connection] = {}
        self._ranks: dict[tuple[int, int], Connection] = {}
        self._count, self._address, self._number = hosts, address, 0
        self._run: Run | None = None

    def await_hosts(self) -> None:
        """Return when all hosts are there."""
        if not self.pump(lambda: len(self._hosts) == self._count, PATIENCE):
            raise RuntimeError(f"only {len(self._hosts)} of {self._count} hosts have started")

    def run(self, job: Job, attack: Attack = nothing, lost: tuple[int, ...] = ()) -> Run:
        """Return the run of a job, when its ranks have ended or are overdue; none of them lives then.

        Args:
            job: what runs.
            attack: made while it runs.
            lost: ranks whose end is not awaited.
        """
        self._number += 1
        folder = Path(tempfile.mkdtemp(prefix=f"{self._number}-", dir=self._folder))
        scratch = folder / "tmp"
        scratch.mkdir()
        known = fl.config.flat(fl.config.Config())
        settings = {key: value for key, value in job.settings.items() if key in known}
        (folder / "settings.yaml").write_text(yaml.safe_dump(settings))
        self._run = run = Run(job, self._number, self, scratch, [Outcome() for _ in range(job.world)])
        keeper = _agent_store(job) if job.keeper == "agent" else None
        run.store = keeper
        held = hold_port()
        here = keeper.port if keeper else held.getsockname()[1]
        port = here if keeper or self._address is None else 29500 + self._number % 1000
        try:
            for rank in range(job.world):
                variables = environment(job, rank, folder, self._address, port)
                self._hosts[rank % self._count].send(("start", (run.number, rank), job, variables, f"{folder}/{rank}"))
            attack(run)
            awaited = [rank for rank in range(job.world) if rank not in lost]
            run.await_ends(awaited, time.monotonic() + job.deadline)
        finally:
            self._end_all(run)
            held.close()
        run.strayed = sorted(path.name for path in scratch.iterdir())
        for rank, outcome in enumerate(run.outcomes):
            log = folder / str(rank)
            outcome.log = log.read_text(errors="replace")[-2000:] if log.exists() else ""
        return run

    def pump(self, done: Callable[[], bool], seconds: float) -> bool:
        """Take in messages until ``done``; return whether it came to that in time."""
        end = time.monotonic() + seconds
        while not done():
            left = end - time.monotonic()
            if left <= 0:
                return False
            for ready in wait([self._listener, *self._hosts.values(), *self._ranks.values()], min(left, 1.0)):
                if ready is self._listener:
                    self._welcome()
                else:
                    self._take(ready)  # type: ignore[arg-type]
        return True

    def answer(self, key: tuple[int, int], answer: Any) -> None:
        """Let a rank go on."""
        self._ranks[key].send(answer)

    def signal(self, key: tuple[int, int], number: signal.Signals) -> None:
        """Have the rank's host send it a signal."""
        self._hosts[key[1] % self._count].send(("signal", key, number))

    def close(self) -> None:
        """End the hosts."""
        for connection in [*self._hosts.values(), *self._ranks.values()]:
            connection.close()
        self._listener.close()

    def _welcome(self) -> None:
        connection, (kind, *who) = accept(self._listener)
        if kind == "host":
            self._hosts[who[0]] = connection
            return
        number, rank, pid = who
        if self._run is None or number != self._run.number:
            connection.close()
            return
        self._ranks[number, rank] = connection
        self._run.pids[rank] = pid

    def _take(self, connection: Connection) -> None:
        try:
            kind, *more = connection.recv()
        except (EOFError, OSError):
            self._ranks = {key: other for key, other in self._ranks.items() if other is not connection}
            if connection in self._hosts.values():
                raise RuntimeError("a host has ended") from None
            return
        if kind in ("signalled", "ended"):
            key, at, *status = more
            if self._run is None or key[0] != self._run.number:
                return
            if kind == "signalled":
                self._run.signalled[key[1]] = at
            else:
                self._run.outcomes[key[1]].status, self._run.outcomes[key[1]].ended = status[0], at
            return
        number, rank = next(key for key, other in self._ranks.items() if other is connection)
        if self._run is None or number != self._run.number:
            return
        at, details = more
        if kind == "at":
            self._run.reached[rank, details] = at
            return
        if kind == "did":
            self._run.attacked = self._run.attacked or at
            return
        outcome = self._run.outcomes[rank]
        outcome.at = at
        for name, value in details.items():
            setattr(outcome, name, value)

    def _end_all(self, run: Run) -> None:
        left = [rank for rank, outcome in enumerate(run.outcomes) if outcome.status is None]
        statuses = {rank: run.outcomes[rank] for rank in left}
        for rank in left:
            self.signal((run.number, rank), signal.SIGKILL)
        self.pump(lambda: all(outcome.status is not None for outcome in run.outcomes), 10)
        for outcome in statuses.values():
            outcome.status = None  # it has not ended by itself
        for key in [key for key in self._ranks if key[0] == run.number]:
            self._ranks.pop(key).close()
        self._run = None


def environment(job: Job, rank: int, folder: Path, address: str | None, port: int) -> dict[str, str]:
    """Return the variables of rank ``rank``, as torchrun sets them."""
    found = {
        "RANK": str(rank),
        "WORLD_SIZE": str(job.world),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(job.world),
        "MASTER_ADDR": address or "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "eth0" if address else "lo",
        "FUSIONLAYER_TIMEOUT": str(job.timeout),
        "OMP_NUM_THREADS": "1",
        "TMPDIR": str(folder / "tmp"),
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "PYTHONFAULTHANDLER": "1",
    }
    if job.keeper == "agent":
        found |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
    if job.settings:
        found["FUSIONLAYER_CONFIG"] = str(folder / "settings.yaml")
    return {**found, **job.environment}


@contextmanager
def local_field() -> Iterator[Field]:
    """Yield a field on this machine's loopback."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fusionlayer-faults-")))
        field_ = Field(folder)
        stack.callback(field_.close)
        with (folder / "host").open("w") as log:
            host = subprocess.Popen(_host_command(field_), cwd=ROOT, stdin=subprocess.DEVNULL, stderr=log)
        stack.callback(_end, host)
        field_.await_hosts()
        yield field_


@contextmanager
def lab_field(hosts: int) -> Iterator[Field]:
    """Yield a field of hosts that are network namespaces, with a link each."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fusionlayer-faults-")))
        field_ = Field(folder, hosts, "10.77.0.1")
        stack.callback(field_.close)
        network = Network(hosts)
        log = stack.enter_context((folder / "host").open("w"))
        stack.enter_context(
            launch(_host_command(field_), network, timeout=3600, stdout=subprocess.DEVNULL, stderr=log.fileno())
        )
        field_.await_hosts()
        yield field_


def _host_command(field_: Field) -> list[str]:
    return [sys.executable, "-m", "benchmarks.faults.host", field_.path]


def _end(process: subprocess.Popen[Any]) -> None:
    try:
        process.wait(5)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _agent_store(job: Job) -> TCPStore:
    return TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=60), wait_for_workers=False)
