"""Messages that are copied out of the memory of other ranks' devices: real processes, and threads for devices."""

from __future__ import annotations

import pytest

from tests.harness import run_ranks

from .conformance import CHECKS
from .device_on_host import OverPeers, compiled, device_on_host

pytestmark = pytest.mark.medium

TIMEOUT = 15.0


def conform(rank: int, world: int, path: str, peer_bytes: int) -> None:
    with device_on_host(path, rank):
        transport = OverPeers(timeout=TIMEOUT, peer_bytes=peer_bytes)
        for check in CHECKS:
            try:
                check(transport)
            except BaseException as error:
                raise AssertionError(f"{check.__name__}: {error}") from error
        transport.close()


@pytest.mark.parametrize("world", [2, 3, 4])
def test_conformance(world: int) -> None:
    run_ranks(conform, world, compiled(), 1 << 20, timeout=50)
