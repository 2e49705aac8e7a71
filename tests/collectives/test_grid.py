"""Sums in rows and columns: bits are those of plain steps, and no rank sends more than 4 sqrt(ranks) messages."""

import math

import pytest
import torch
from torch import Tensor

from fusionlayer import codecs, collectives
from fusionlayer.transport import Transport
from tests.ranks import over_threads
from tests.synthetic import gradient

from .counting import LoneRank, native_calls
from .test_two_level import in_plain_steps, rows_of

GRID = collectives.get("grid")


@pytest.mark.parametrize("world", [5, 12, 33, 64])
def test_sums_are_those_of_plain_steps(world: int) -> None:
    """With error feedback, without, and in pieces; the codec between nodes serves both levels."""
    codec, numel = codecs.get("tlq", group_size=32, inner_group_size=32).bare, 64 * 32 * 2 + 77
    plain_codec = codecs.get("int", bits=4, group_size=32, rounding="stochastic").bare
    x = [gradient(numel, rank) for rank in range(world)]
    kept = [gradient(numel, 100 + rank) for rank in range(world)]

    def body(transport: Transport) -> tuple[Tensor, Tensor, Tensor]:
        plain, fed, left = (x[transport.rank].clone(), x[transport.rank].clone(), kept[transport.rank].clone())
        GRID(plain, codec, transport, seed=3)
        GRID(fed, codec, transport, seed=3, residual=left)
        return plain, fed, left

    got, left = over_threads(world, body, ranks_per_node=1), [residual.clone() for residual in kept]
    wanted = [in_plain_steps(x, plain_codec, rows_of(range(world)), 3, each) for each in (None, left)]
    for rank, each in enumerate(got):
        assert all(map(torch.equal, each, (*wanted, left[rank])))


def test_pieces_give_the_bits_of_the_whole() -> None:
    codec, numel = codecs.get("int8").bare, 5 * 128 * 7 + 50

    def body(transport: Transport, piece: int | None) -> Tensor:
        x = gradient(numel, transport.rank)
        GRID(x, codec, transport, piece=piece)  # type: ignore[call-arg]
        return x

    whole, cut = (over_threads(5, lambda t, n=n: body(t, n)) for n in (None, 5 * 128))  # type: ignore[misc]
    assert all(torch.equal(each, whole[0]) for each in (*whole, *cut))


def test_up_to_two_ranks_there_is_one_row() -> None:
    for world in (1, 2):

        def body(transport: Transport) -> bool:
            one, other = gradient(1000, transport.rank), gradient(1000, transport.rank)
            GRID(one, codecs.get("int4").bare, transport, seed=1)
            collectives.get("two_shot")(other, codecs.get("int4").bare, transport, seed=1)
            return torch.equal(one, other)

        assert all(over_threads(world, body))


@pytest.mark.parametrize("world", [5, 64, 1000, 1024, 8192])
def test_a_rank_sends_few_messages(world: int) -> None:
    """Counted on the first, a middle and the last rank; bytes are those of ``two_shot`` but for padding of shares."""
    codec, x = codecs.get("int8").bare, torch.zeros(128 * world)
    chunk = codec.wire(128).capacity
    for rank in (0, world // 2, world - 1):
        transport = LoneRank(rank, world)
        with native_calls() as calls:
            GRID(x, codec, transport)
        assert calls == ["fl_encode", "fl_recode_rows", "fl_recode", "fl_decode"]
        assert sum(map(len, transport.sent)) <= 4 * math.sqrt(world)
        sent = sum(sum(each.values()) for each in transport.sent)
        assert abs(sent - 2 * (world - 1) * chunk) <= 2 * chunk * math.sqrt(world)
