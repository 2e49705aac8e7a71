"""Run workers in a lab: on hosts that are network namespaces, made for this run or kept from before."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

from benchmarks.lab.flaps import Flap
from benchmarks.lab.job import Job
from benchmarks.lab.kept import Lab
from benchmarks.lab.mpi import why_no_mpi
from benchmarks.lab.namespaces import unshare, unshare_processes, why_no_namespaces, why_refused
from benchmarks.lab.network import Network

__all__ = ["launch", "why_not"]

_AGENT = str(Path(__file__).with_name("agent.py"))


@contextmanager
def launch(
    command: Sequence[str],
    network: Network | Lab,
    *,
    workers: int = 1,
    timeout: float = 600.0,
    mpi: bool = False,
    host: int | None = None,
    count_bytes: bool = False,
    flaps: Sequence[Flap] = (),
    stdout: int | None = None,
    stderr: int | None = None,
) -> Iterator[subprocess.Popen[str]]:
    """Yield the process that runs ``command`` on every host; whatever is left of it ends with the block.

    Its exit status is 0, that of the first worker that failed, or 124 after ``timeout``. Workers write to its stdout;
    what they write to stderr comes at their end, the first failure last. If this process dies, so do they.

    Workers find RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE as under torchrun, or, with ``mpi``, what Open MPI
    sets; MASTER_ADDR, MASTER_PORT and GLOO_SOCKET_IFNAME in both cases.

    Args:
        command: program and arguments.
        network: where the workers run: one that is made for them, or a lab that is kept.
        workers: number of workers on each host.
        timeout: seconds until all are ended.
        mpi: Open MPI starts the workers.
        host: the only host, from 0, that has workers; None: all have.
        count_bytes: at the end, say on stderr how many bytes each host has sent.
        flaps: interfaces that go down meanwhile; each change is told on stderr.
        stdout: as for ``subprocess.Popen``.
        stderr: as for ``subprocess.Popen``.

    Raises:
        ValueError: there is no such host or interface, or Open MPI was asked for without namespaces.
        Obstacle: a lab that was kept is gone.
    """
    wanted = network.network if isinstance(network, Lab) else network
    if host is not None and not 0 <= host < wanted.hosts:
        raise ValueError(f"host={host}; expected 0 to {wanted.hosts - 1}")
    if workers < 1:
        raise ValueError(f"workers={workers}; expected 1 or more")
    if mpi and not wanted.isolated:
        raise ValueError("mpi without namespaces; call mpirun itself")
    for flap in flaps:
        flap.check(wanted)
    job = Job(tuple(command), wanted, workers, timeout, mpi, host, count_bytes, flaps=tuple(flaps))
    files: tuple[int, ...] = ()
    with ExitStack() as stack:
        if isinstance(network, Lab):
            places = stack.enter_context(network.namespaces())
            job = replace(job, kept=True, namespaces=places.hosts)
            start = [*places.enter, *unshare_processes()]
            files = places.files
        else:
            start = unshare() if wanted.isolated else []
        process = subprocess.Popen(
            [*start, sys.executable, _AGENT, job.to_json()],
            stdin=subprocess.PIPE,
            stdout=stdout,
            stderr=stderr,
            text=True,
            pass_fds=files,
            start_new_session=True,  # Ctrl-C reaches this process alone, which then closes the lifeline
        )
        try:
            yield process
        finally:
            assert process.stdin is not None
            process.stdin.close()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def why_not(network: Network, *, mpi: bool = False) -> str | None:
    """Return why ``network`` cannot be made on this machine, or Open MPI not used, in one line; None if they can."""
    if mpi and (reason := why_no_mpi()):
        return reason
    if not network.isolated:
        return None
    if reason := why_no_namespaces():
        return reason
    with launch(["true"], network, timeout=20, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        errors = process.stderr.read()
        process.wait()
    return None if process.returncode == 0 else why_refused(errors)
