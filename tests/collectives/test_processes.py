"""The same demands over real processes: one start of each number of ranks for all pairs."""

import signal
from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from fusionlayer import codecs, collectives
from fusionlayer.base.errors import TransportError
from fusionlayer.collectives import zipped
from fusionlayer.collectives._unequal import two_shot_by_shares
from fusionlayer.collectives.switching import KINDS, SAMPLES, Switcher
from fusionlayer.transport._sum import sum_in_rank_order
from fusionlayer.transport.c10d import C10dTransport
from fusionlayer.transport.links.socket_options import SocketOptions
from tests.codecs.conformance import same_bits
from tests.codecs.variants import defaults, is_kind
from tests.harness import checkpoint, outcomes_of, run_ranks
from tests.tiers import tiered

from .conformance import conform, given, pairs, same_everywhere
from .test_switching import everything
from .test_zipped import ordinary, values

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


WORLD, LOST = 4, 2


def stop_at_a_hop(rank: int, world: int, name: str, hop: int, codec: str) -> None:
    transport = C10dTransport()
    transport.barrier()
    exchange, calls = transport.exchange, [0]

    def counting(messages: Mapping[int, tuple[Tensor, Tensor]]) -> None:
        if rank == LOST and calls[0] == hop:
            checkpoint("hop")
        calls[0] += 1
        exchange(messages)

    transport.exchange = counting  # type: ignore[method-assign]
    collectives.get(name)(torch.ones(300_000), codecs.get(codec).bare, transport)


@pytest.mark.parametrize(
    ("name", "hop", "codec"),
    [("ring", 1, "int8"), ("ring", 3, "dynamiq"), ("butterfly", 0, "int8"), ("butterfly", 1, "dynamiq")],
)
def test_a_rank_that_dies_in_the_middle_is_named_on_all_others(name: str, hop: int, codec: str) -> None:
    outcomes = outcomes_of(stop_at_a_hop, WORLD, name, hop, codec, signals={(LOST, "hop"): signal.SIGKILL})
    assert outcomes[LOST].kind == "died"
    for rank, outcome in enumerate(outcomes):
        if rank != LOST:
            assert outcome.error[0] == "TransportError", outcome
            assert f"rank {LOST} is gone" in outcome.error[1]


def differ(rank: int, world: int) -> None:
    transport = C10dTransport(timeout=3)
    transport.barrier()
    name = "butterfly" if rank == 1 else "ring"
    with pytest.raises(TransportError):
        collectives.get(name)(torch.ones(5000), codecs.get("int8").bare, transport)


def test_ranks_in_different_collectives_time_out() -> None:
    outcomes = outcomes_of(differ, WORLD)
    assert [outcome.kind for outcome in outcomes] == ["returned"] * WORLD, outcomes


MANY = 1_500_000


def hold(rank: int, world: int) -> str:
    transport = C10dTransport()
    for name in ("zip", "rans"):
        codec = codecs.get(name).bare
        lengths = [(r % 3) * MANY // 2 + 7 for r in range(world)]
        parts = [values(n, r, torch.bfloat16) for r, n in enumerate(lengths)]
        for piece in (None, 400_000):
            out = torch.empty(sum(lengths), dtype=torch.bfloat16)
            zipped.all_gather(parts[rank], out, codec, transport, lengths=lengths, piece=piece)
            assert same_bits(out, torch.cat(parts))
        for design in (1, 2):
            sends = [(rank * 3 + to) % 4 * 300_000 for to in range(world)]
            recvs = [(source * 3 + rank) % 4 * 300_000 for source in range(world)]
            x = torch.cat([values(n, 10 * rank + to, torch.float32) for to, n in enumerate(sends)])
            out = torch.empty(sum(recvs))
            zipped.all_to_all(x, out, sends, recvs, codec, transport, design=design)
            expected = [values(n, 10 * source + rank, torch.float32) for source, n in enumerate(recvs)]
            assert same_bits(out, torch.cat(expected))
        x = ordinary(MANY, rank, torch.float16)
        expected_sum = torch.empty_like(x)
        sum_in_rank_order([ordinary(MANY, r, torch.float16) for r in range(world)], expected_sum)
        zipped.zipped(x, codec, transport, piece=600_000)
        assert same_bits(x, expected_sum) and same_everywhere(transport, x)
    switcher = Switcher(transport)
    for _ in range(2 * SAMPLES + 2):
        everything(switcher, transport)
    told = str(switcher)
    transport.close()
    return told


@pytest.mark.parametrize("world", tiered([2, 3], lambda world: world == 3))
def test_bits_are_those_of_uncompressed_collectives(world: int) -> None:
    for told in run_ranks(hold, world):
        assert all(f"{kind} of " in told for kind in KINDS)
