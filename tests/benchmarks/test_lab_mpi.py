"""Open MPI across the hosts of a lab, without ssh."""

import re
import sys

import pytest

from benchmarks.lab import Network

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
    """Return the workers' lines in order, without mpirun's remark on a process group of its own."""
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
