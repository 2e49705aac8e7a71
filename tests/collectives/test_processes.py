"""The same demands over real processes: one start of each number of ranks for all pairs."""

from __future__ import annotations

import pytest
import torch

from fusionlayer.transport.c10d import C10dTransport
from tests.codecs.variants import defaults
from tests.harness import run_ranks

from .conformance import conform, pairs

pytestmark = pytest.mark.medium

LENGTHS = (0, 129, 4097)
DTYPES = (torch.float32, torch.bfloat16)


def hold_every_pair(rank: int, world: int) -> int:
    transport = C10dTransport(None, timeout=20, stall_warning=10)
    assert (transport.rank, transport.size) == (rank, world)
    usable = pairs(defaults())
    for name, codec in usable:
        conform(transport, name, codec, torch.device("cpu"), LENGTHS, DTYPES)
    transport.close()
    return len(usable)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("world", [2, 3, 4])
def test_every_collective_with_every_codec(world: int) -> None:
    assert run_ranks(hold_every_pair, world, timeout=110) == [len(pairs(defaults()))] * world
