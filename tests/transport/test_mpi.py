"""The transport over real processes of MPI."""

import re
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from fusionlayer.base.errors import ConfigError, TransportError
from fusionlayer.transport.links.mpi import load_mpi
from fusionlayer.transport.mpi import _finish
from tests.mpi import attempt, needs_mpi, start, version
from tests.tiers import exhaustive, long

medium = pytest.mark.medium
# Seconds on a quiet machine, minutes on one that has much else to do.


def worker(name: str, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "mpi4py", "-m", "tests.transport.mpi_worker", name, *arguments]


@medium
@needs_mpi
@pytest.mark.parametrize("size", [3, pytest.param(5, marks=long)])
@exhaustive(guarded_by="tests/transport/test_mpi.py::test_a_job_without_a_process_group")
def test_conformance_of_every_size_up_to(size: int) -> None:
    printed = start(size, worker("conformance"))
    assert sorted(printed.splitlines()) == [f"rank {rank} conforms" for rank in range(size)]


@medium
@needs_mpi
def test_a_job_without_a_process_group() -> None:
    printed = start(2, worker("job"), FUSIONLAYER_TRANSPORT="mpi", FUSIONLAYER_TIMEOUT="40")
    assert sorted(printed.splitlines()) == ["0 2 0 2", "1 2 1 2"]


@medium
@needs_mpi
@exhaustive(guarded_by="tests/transport/test_mpi.py::test_a_job_without_a_process_group")
def test_ranks_that_differ_or_stop_are_named_and_waiting_is_no_work() -> None:
    printed = start(3, worker("failures"))
    found = sorted(re.findall(r"rank (\d) knows; waiting took (\d+)% of a core", printed))
    assert [rank for rank, _ in found] == ["0", "1", "2"], printed
    assert all(int(share) < 50 for _, share in found), printed


@medium
@needs_mpi
@pytest.mark.skipif("Open MPI) 4" not in version(), reason="needs --enable-recovery of Open MPI 4")
def test_a_killed_rank_is_named_where_the_launcher_lets_the_others_live() -> None:
    ended = attempt(2, worker("killed"), "--enable-recovery")
    assert "rank 0 blames (1,)" in ended.stdout, ended.stdout + ended.stderr


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(ConfigError, match=r"needs mpi4py.*pip install 'fusionlayer\[mpi\]'"):
        load_mpi()


def test_ranks_that_do_not_come_to_the_first_meeting() -> None:
    request: Any = SimpleNamespace(Test=lambda: False)
    comm: Any = SimpleNamespace(rank=1, size=3)
    with pytest.raises(TransportError, match="rank 1: not all 3 ranks came within 0.1 s"):
        _finish(request, comm, 0.1)
