"""What the ranks of tests/transport/test_mpi.py do: ``python -m mpi4py -m tests.transport.mpi_worker NAME``."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time

import pytest
import torch
from mpi4py import MPI

import fusionlayer as fl
from fusionlayer.errors import TransportError
from fusionlayer.transport.mpi import MpiTransport
from tests.transport.conformance import CHECKS

WORLD = MPI.COMM_WORLD


def conform(transport: MpiTransport) -> None:
    for check in CHECKS:
        try:
            check(transport)
        except BaseException as error:
            raise AssertionError(f"{check.__name__} on rank {transport.rank} of {transport.size}: {error}") from error
    transport.close()


def conformance() -> None:
    """All sizes up to that of the world: the world itself, and its halves at the same time."""
    torch.set_num_threads(1)
    conform(MpiTransport(timeout=20))
    for first in range((WORLD.size + 1) // 2):
        part = WORLD.Split(WORLD.rank <= first)
        conform(MpiTransport(part, timeout=20))
        part.Free()
    print(f"rank {WORLD.rank} conforms", flush=True)


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
