"""Open MPI across the hosts of a lab, without ssh."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from benchmarks.lab import Network, why_not

from .labs import needs_mpi, netns, run, thorough

SUM = """
import os, torch
from mpi4py import MPI
world = MPI.COMM_WORLD
total = world.allreduce(world.rank + 1)
names = sorted(set(world.allgather(MPI.Get_processor_name())))

import fusionlayer as fl
fl.init()
value = torch.full((1000,), float(world.rank + 1))
fl.all_reduce(value, op=fl.Sum)
print(world.rank, "of", world.size, total, names, value.unique().tolist(), os.environ["GLOO_SOCKET_IFNAME"], flush=True)
fl.shutdown()
"""


def said_by_workers(output: str) -> list[str]:
    """Return the workers' lines in order, without mpirun's remark on a process group of its own.

    It makes it, without harm, whenever a daemon has started its program before mpirun could give it a group.
    """
    return sorted(line for line in output.splitlines() if not re.match(r"\[\w+:\d+\] plm:rsh: Warning: setpgid", line))


@needs_mpi
class TestWorkers:
    pytestmark = [*netns, thorough]

    def test_compute_together(self, monkeypatch: pytest.MonkeyPatch) -> None:
        pytest.importorskip("mpi4py")
        monkeypatch.setenv("RANK", "5")  # of whatever runs the tests; the workers must not see it
        status, output = run([sys.executable, "-c", SUM], Network(2, "100mbit"), mpi=True)
        assert status == 0, output
        seen = "3 ['node0', 'node1'] [3.0] eth0"
        assert said_by_workers(output) == [f"0 of 2 {seen}", f"1 of 2 {seen}"]

    def test_fill_the_hosts_in_order(self) -> None:
        script = "echo $OMPI_COMM_WORLD_RANK $OMPI_COMM_WORLD_LOCAL_RANK $(hostname) $MASTER_ADDR"
        status, output = run(["sh", "-c", script], Network(2), workers=2, mpi=True)
        assert status == 0, output
        assert said_by_workers(output) == [f"{rank} {rank % 2} node{rank // 2} 10.77.0.1" for rank in range(4)]

    def test_failure_is_reported_and_leaves_no_files(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setenv("TMPDIR", str(tmp_path))
        script = "test $OMPI_COMM_WORLD_RANK = 1 && exit 7; sleep 600"
        status, output = run(["sh", "-c", script], Network(2), mpi=True)
        assert status == 7
        assert output.splitlines()[-1] == "mpirun failed first, with exit status 7"
        assert not list(tmp_path.iterdir())

    def test_workers_that_hang_are_ended_and_say_where(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setenv("TMPDIR", str(tmp_path))
        script = "import time\ndef sleepy():\n    print('asleep', flush=True)\n    time.sleep(600)\nsleepy()"
        for seconds in (6, 60):  # they count from before mpirun begins, whose start may take long
            status, output = run([sys.executable, "-Sc", script], Network(2), mpi=True, timeout=seconds)
            if output.count("asleep") == 2:
                break
        assert status == 124, output
        assert "in sleepy" in output
        assert output.splitlines()[-1] == f"the workers were ended after {seconds} s; above is where they were"
        assert not list(tmp_path.iterdir())


@pytest.mark.short
class TestObstacle:
    def test_missing_program_is_named(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setenv("PATH", str(tmp_path))
        assert (
            why_not(Network(), mpi=True) == "the program mpirun is missing (install Open MPI 4: openmpi-bin of Debian)"
        )

    def test_another_mpi_is_named(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        for name in ("mpirun", "hostname"):
            program = tmp_path / name
            program.write_text("#!/bin/sh\necho HYDRA build details:\n")
            program.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path))
        assert why_not(Network(), mpi=True) == "mpirun is 'HYDRA build details:'; expected Open MPI 4"
