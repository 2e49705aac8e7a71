"""The same demands over real processes: one start of each number of ranks for all pairs."""

import pytest
import torch
from torch import Tensor

from fusionlayer import codecs
from fusionlayer.collectives._unequal import two_shot_by_shares
from fusionlayer.transport.c10d import C10dTransport
from fusionlayer.transport.links.socket_options import SocketOptions
from tests.codecs.variants import defaults, is_kind
from tests.harness import run_ranks
from tests.tiers import tiered

from .conformance import conform, given, pairs

pytestmark = pytest.mark.medium

LENGTHS = (0, 129, 4097)
DTYPES = (torch.float32, torch.bfloat16)


def hold_pairs(rank: int, world: int, kinds_alone: bool) -> int:
    transport = C10dTransport()
    assert (transport.rank, transport.size) == (rank, world)
    usable = pairs(codec for codec in defaults() if is_kind(codec) or not kinds_alone)
    for number, (name, codec) in enumerate(usable):
        # With all codecs each pair has one type on two ranks, and the other on four.
        dtype = torch.float32 if kinds_alone else DTYPES[(number + world // 4) % 2]
        conform(transport, name, codec, torch.device("cpu"), LENGTHS[:2] if kinds_alone else LENGTHS, [dtype])
    transport.close()
    return len(usable)


@pytest.mark.parametrize(
    "world, kinds_alone",
    tiered([(3, True), (2, False), (4, False)], lambda world, kinds_alone: kinds_alone, lambda world, _: world < 4),
)
def test_every_collective_with_every_codec(world: int, kinds_alone: bool) -> None:
    held = run_ranks(hold_pairs, world, kinds_alone)
    assert held == held[:1] * world and held[0] > 30


def sum_over_links(rank: int, world: int) -> list[Tensor]:
    results = []
    for sockets in (None, SocketOptions(2)):
        transport = C10dTransport(sockets=sockets)
        for shares in ((1, 2, 0), (0, 1, 0)):
            x = given(rank, 0, 5000, torch.float32).clone()
            two_shot_by_shares(x, codecs.get("int8").bare, transport, shares=shares)
            results.append(x)
        transport.finish()
    return results


def test_empty_messages_over_gloo_and_over_connections_of_our_own() -> None:
    every = [x for results in run_ranks(sum_over_links, 3) for x in results]
    assert all(torch.equal(x, every[0]) for x in every)
