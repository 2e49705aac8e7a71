"""The transport over real processes of MPI."""

from __future__ import annotations

import sys

import pytest

from tests.mpi import needs_mpi, start

pytestmark = [pytest.mark.medium, needs_mpi]


def worker(name: str, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "mpi4py", "-m", "tests.transport.mpi_worker", name, *arguments]


def test_conformance_of_every_size_up_to_five() -> None:
    printed = start(5, worker("conformance"))
    assert sorted(printed.splitlines()) == [f"rank {rank} conforms" for rank in range(5)]
