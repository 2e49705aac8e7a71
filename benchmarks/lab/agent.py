"""The inner side of a lab: makes the hosts, runs the workers in them and sees to their end.

Started by ``launch`` with a ``Job`` as JSON, as process 1 of namespaces of its own where the job asks for them. Its
standard input is the lifeline: when the other end closes, for whatever reason, all workers end.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import IO

sys.path[0] = str(Path(__file__).resolve().parents[2])  # this file runs as a script, wherever the workers are to run

from benchmarks.lab.flaps import EVENTS, Flapping  # noqa: E402
from benchmarks.lab.hosts import Host, existing_hosts, make_hosts  # noqa: E402
from benchmarks.lab.job import TIMED_OUT, Job  # noqa: E402
from benchmarks.lab.mpi import mpirun  # noqa: E402
from benchmarks.lab.network import Obstacle  # noqa: E402
from benchmarks.lab.ports import hold_port  # noqa: E402

__all__ = ["main"]

_GRACE = 5.0
"""Seconds that workers have after the first failure, or to show where they hang after the deadline."""


class Worker:
    """A process of the job; its stderr is kept until ``report``."""

    def __init__(self, name: str, command: Sequence[str], environment: dict[str, str]) -> None:
        self.name = name
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed by report()
        self._process = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stderr=self._errors, start_new_session=True
        )

    @property
    def status(self) -> int | None:
        """Exit status, 128 + signal where one ended the process, None while it runs."""
        code = self._process.poll()
        return code if code is None or code >= 0 else 128 - code

    def kill(self) -> None:
        """End the process and its children."""
        self._send(signal.SIGKILL)

    def abort(self) -> None:
        """Have the process say where it is, and end."""
        self._send(signal.SIGABRT)

    def _send(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def report(self) -> None:
        """Pass on to stderr what the worker has written there."""
        self._process.wait()
        self._errors.seek(0)
        sys.stderr.buffer.write(self._errors.read())
        sys.stderr.flush()
        self._errors.close()


class Mpirun(Worker):
    """The process that has started all workers, and passes on what they write."""

    def abort(self) -> None:
        """Have the workers say where they are, and end; this process follows them."""
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if b"OMPI_COMM_WORLD_RANK=" in (process / "environ").read_bytes():
                    os.kill(int(process.name), signal.SIGABRT)


def supervise(
    starting: Iterable[Worker], timeout: float, broken: Callable[[], bool], flap: Callable[[], object]
) -> int:
    """Return the status of the first worker that failed, 0 if none did; afterwards none of them runs.

    The first failure ends the others, after a moment in which they can say what they saw. What the first one wrote to
    stderr comes last. So does a network that is ``broken``. ``flap`` is called all the time.
    """
    workers: list[Worker] = []
    end = time.monotonic() + timeout
    first: Worker | None = None
    timed_out = network_lost = False
    try:
        workers.extend(starting)
        while any(worker.status is None for worker in workers):
            if first is None and (first := next((worker for worker in workers if worker.status), None)):
                end = min(end, time.monotonic() + _GRACE)
            if select.select([sys.stdin], [], [], 0.05)[0]:
                return TIMED_OUT
            if network_lost := broken():
                break
            flap()
            if time.monotonic() > end:
                if first is not None or timed_out:
                    break
                timed_out = True
                end += _GRACE
                for worker in workers:
                    worker.abort()
    finally:
        for worker in workers:
            worker.kill()
    first = first or next((worker for worker in workers if worker.status), None)
    for worker in sorted(workers, key=lambda worker: worker is first):
        worker.report()
    if network_lost:
        print("the switch between the hosts has ended; the workers were ended too", file=sys.stderr)
        return 1
    if timed_out:
        print(f"the workers were ended after {timeout:g} s; above is where they were", file=sys.stderr)
        return TIMED_OUT
    if first is None:
        return 0
    print(f"{first.name} failed first, with exit status {first.status}", file=sys.stderr)
    return first.status or 1


def starting(job: Job, hosts: Sequence[Host], scratch: Path | None, events: Path | None, port: int) -> Iterable[Worker]:
    """Yield the workers of ``job`` as they start, with the environment that torchrun, or Open MPI, would give them."""
    size = len(hosts) * job.workers
    common = {
        "OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // size)),
        "TORCH_CPP_LOG_LEVEL": "ERROR",  # addresses of such a network have no names, and torch warns of it
        **os.environ,
        "MASTER_ADDR": hosts[0].address,
        "MASTER_PORT": str(port),
        "PYTHONFAULTHANDLER": "1",
        **({EVENTS: str(events)} if events else {}),
    }
    if scratch is not None:
        command, more = mpirun(job.command, hosts, job.workers, scratch)
        yield Mpirun("mpirun", command, {**common, **more, "GLOO_SOCKET_IFNAME": hosts[0].device})
        return
    for rank in range(size):
        host = hosts[rank // job.workers]
        place = {
            "RANK": str(rank),
            "WORLD_SIZE": str(size),
            "LOCAL_RANK": str(rank % job.workers),
            "LOCAL_WORLD_SIZE": str(job.workers),
            "GLOO_SOCKET_IFNAME": host.device,
        }
        yield Worker(f"worker {rank}", [*host.enter, *job.command], {**common, **place})


def _sent(host: Host) -> int:
    command = [*host.enter, "ip", "-json", "-statistics", "link", "show"]
    links = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    return sum(link["stats64"]["tx"]["bytes"] for link in links if link["ifname"] in host.devices)


def _run(job: Job) -> int:
    switch = None
    if job.kept or not job.network.isolated:
        hosts = existing_hosts(list(job.namespaces), job.network)
    else:
        hosts, switch = make_hosts(job.network)
    used = hosts if job.host is None else [hosts[job.host]]
    with ExitStack() as stack:
        held = stack.enter_context(hold_port())
        before = [_sent(host) for host in used] if job.count_bytes else []
        scratch = events = None
        if job.flaps:
            events = _folder(stack)
        if job.mpi:
            scratch = _folder(stack)
            stack.callback(_end_all)  # before the folder goes: what Open MPI has started elsewhere may write there
        flapping = Flapping(job.flaps, hosts, events)
        status = supervise(
            starting(job, used, scratch, events, 29500 if job.network.isolated else held.getsockname()[1]),
            job.timeout,
            broken=lambda: switch is not None and switch.poll() is not None,
            flap=lambda: [print(told, file=sys.stderr, flush=True) for told in flapping.step()],
        )
        for host, count in zip(used, before, strict=False):
            print(f"{host.name} ({host.address}) sent {_sent(host) - count} bytes", file=sys.stderr)
    return status


def _folder(stack: ExitStack) -> Path:
    folder = tempfile.TemporaryDirectory(prefix="fusionlayer-lab-", ignore_cleanup_errors=True)
    return Path(stack.enter_context(folder))


def _end_all() -> None:
    """End all processes of this namespace but this one, which is its first."""
    if os.getpid() != 1:
        raise RuntimeError("not in a process namespace of its own")
    with contextlib.suppress(ProcessLookupError):
        os.kill(-1, signal.SIGKILL)


def main() -> int:
    """Run the job given as JSON in the first argument; return the exit status."""
    job = Job.from_json(sys.argv[1])
    faulthandler.dump_traceback_later(job.timeout + 6 * _GRACE, exit=True)
    try:
        return _run(job)
    except Obstacle as obstacle:
        print(obstacle, file=sys.stderr)
    except OSError as error:
        print(f"{job.command[0]}: {error.strerror}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
