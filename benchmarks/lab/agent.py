"""The inner side of ``link``: makes the hosts of a network, runs the workers in them and sees to their end.

Started by ``link.launch`` with a ``Job`` as JSON, in network and process namespaces of its own where the job asks for
them. Its standard input is the lifeline: when the other end closes, for whatever reason, all workers end.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import IO

__all__ = ["TIMED_OUT", "Job", "main"]

TIMED_OUT = 124
"""Exit status after a deadline, as of timeout(1)."""

_GRACE = 5.0
"""Seconds that workers have after the first failure, or to show where they hang after the deadline."""


@dataclass(frozen=True)
class Job:
    """What is to be run, and where.

    Attributes:
        command: program and arguments of every worker.
        workers: number of workers on each host.
        timeout: seconds until all of them are ended.
        hosts: number of hosts.
        rate: of each host's link, both ways, in the words of tc; None: as fast as this machine can.
        isolated: hosts are network namespaces; otherwise the one host is this machine as it is.
    """

    command: tuple[str, ...]
    workers: int
    timeout: float
    hosts: int
    rate: str | None
    isolated: bool


@dataclass(frozen=True)
class Host:
    """A place for workers: the command that enters it, its network, and the process that keeps its namespace."""

    enter: tuple[str, ...]
    address: str
    device: str
    keeper: subprocess.Popen[bytes] | None = None


LOOPBACK = Host((), "127.0.0.1", "lo")
"""The namespace that this process is in."""


def run(*command: str) -> None:
    """Run ``command``, or raise ``CalledProcessError`` with what it wrote to stderr."""
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def make_hosts(count: int, rate: str | None) -> list[Host]:
    """Return ``count`` hosts made in the network namespace of this process, which must be one of its own.

    One host is that namespace itself. More are namespaces of their own, joined by a bridge in this one; each link is
    shaped at both ends. They last as long as the processes in them, so nothing is ever taken down.
    """
    run("ip", "link", "set", "lo", "up")
    if count == 1:
        return [LOOPBACK]
    run("ip", "link", "add", "switch", "type", "bridge")
    run("ip", "link", "set", "switch", "up")
    return [_attach_host(f"10.77.0.{i + 1}", f"port{i}", rate) for i in range(count)]


def _attach_host(address: str, port: str, rate: str | None) -> Host:
    # `cat` keeps the namespace while its stdin is open; its echo tells that the namespace is there.
    keeper = subprocess.Popen(["unshare", "--net", "cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)
    assert keeper.stdin is not None and keeper.stdout is not None
    keeper.stdin.write(b"\n")
    keeper.stdout.read(1)
    enter = ("nsenter", f"--net=/proc/{keeper.pid}/ns/net", "--")
    # Small GSO packets and a small burst: what has been idle may send no more than 32 kB faster than the rate.
    veth = ("gso_max_size", "16384", "type", "veth")
    run("ip", "link", "add", "eth0", "netns", str(keeper.pid), *veth, "peer", "name", port, "gso_max_size", "16384")
    run("ip", "link", "set", port, "master", "switch", "up")
    run(*enter, "ip", "link", "set", "lo", "up")
    run(*enter, "ip", "address", "add", f"{address}/24", "dev", "eth0")
    run(*enter, "ip", "link", "set", "eth0", "up")
    if rate is not None:
        shape = ("root", "tbf", "rate", rate, "burst", "32kb", "latency", "50ms")
        run("tc", "qdisc", "add", "dev", port, *shape)
        run(*enter, "tc", "qdisc", "add", "dev", "eth0", *shape)
    return Host(enter, address, "eth0", keeper)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Worker:
    """One process of the job, with the environment that torchrun would give it; its stderr is kept until ``report``."""

    def __init__(self, job: Job, hosts: Sequence[Host], rank: int, port: int) -> None:
        host = hosts[rank // job.workers]
        size = len(hosts) * job.workers
        environment = {
            "OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // size)),
            "TORCH_CPP_LOG_LEVEL": "ERROR",  # addresses of such a network have no names, and torch warns of it
            **os.environ,
            "RANK": str(rank),
            "WORLD_SIZE": str(size),
            "LOCAL_RANK": str(rank % job.workers),
            "LOCAL_WORLD_SIZE": str(job.workers),
            "MASTER_ADDR": hosts[0].address,
            "MASTER_PORT": str(port),
            "GLOO_SOCKET_IFNAME": host.device,
            "PYTHONFAULTHANDLER": "1",
        }
        self.rank = rank
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed by report()
        self._process = subprocess.Popen(
            [*host.enter, *job.command],
            env=environment,
            stdin=subprocess.DEVNULL,
            stderr=self._errors,
            start_new_session=True,
        )

    @property
    def status(self) -> int | None:
        """Exit status, 128 + signal where one ended the process, None while it runs."""
        code = self._process.poll()
        return code if code is None or code >= 0 else 128 - code

    def send(self, number: signal.Signals) -> None:
        """Signal the process and its children."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def report(self) -> None:
        """Pass on to stderr what the worker has written there."""
        self._process.wait()
        self._errors.seek(0)
        sys.stderr.buffer.write(self._errors.read())
        sys.stderr.flush()
        self._errors.close()


def supervise(starting: Iterable[Worker], timeout: float) -> int:
    """Return the status of the first worker that failed, 0 if none did; afterwards none of them runs.

    The first failure ends the others, after a moment in which they can say what they saw. What the first one wrote to
    stderr comes last.
    """
    workers: list[Worker] = []
    end = time.monotonic() + timeout
    first: Worker | None = None
    timed_out = False
    try:
        workers.extend(starting)
        while any(worker.status is None for worker in workers):
            if first is None and (first := next((worker for worker in workers if worker.status), None)):
                end = min(end, time.monotonic() + _GRACE)
            if select.select([sys.stdin], [], [], 0.05)[0]:
                return TIMED_OUT
            if time.monotonic() > end:
                if first is not None or timed_out:
                    break
                timed_out = True
                end += _GRACE
                for worker in workers:
                    worker.send(signal.SIGABRT)
    finally:
        for worker in workers:
            worker.send(signal.SIGKILL)
    first = first or next((worker for worker in workers if worker.status), None)
    for worker in sorted(workers, key=lambda worker: worker is first):
        worker.report()
    if timed_out:
        print(f"the workers were ended after {timeout:g} s; above is where they were", file=sys.stderr)
        return TIMED_OUT
    if first is None:
        return 0
    print(f"worker {first.rank} failed first, with exit status {first.status}", file=sys.stderr)
    return first.status or 1


def main() -> int:
    """Run the job given as JSON in the first argument; return the exit status."""
    job = Job(**json.loads(sys.argv[1]))
    faulthandler.dump_traceback_later(job.timeout + 6 * _GRACE, exit=True)
    try:
        hosts = make_hosts(job.hosts, job.rate) if job.isolated else [LOOPBACK]
    except subprocess.CalledProcessError as error:
        print(f"{' '.join(error.cmd)}: {error.stderr.strip().splitlines()[0]}", file=sys.stderr)
        return 1
    port = 29500 if job.isolated else _free_port()
    try:
        return supervise((Worker(job, hosts, rank, port) for rank in range(len(hosts) * job.workers)), job.timeout)
    except OSError as error:
        print(f"{job.command[0]}: {error.strerror}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
