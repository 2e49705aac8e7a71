"""Uneven all-to-all with every codec."""

import torch
from torch import Tensor

from fusionlayer import codecs
from fusionlayer.codecs import Codec
from fusionlayer.collectives.all_to_all import all_to_all
from fusionlayer.transport import Transport
from tests.codecs.variants import defaults, is_kind
from tests.loops import looped
from tests.ranks import on_threads, over_threads
from tests.synthetic import gradient
from tests.tiers import tiered

from .conformance import coarseness

WORLDS = (1, 2, 3, 5, 8)


def count(source: int, to: int) -> int:
    """Return how many elements travel: none, few, and more than a block of any codec."""
    return (0, 1, 700, 5000)[(source + 3 * to) % 4]


def given(source: int, to: int, dtype: torch.dtype) -> Tensor:
    return gradient(count(source, to), 100 * source + to, dtype)


def travel(transport: Transport, codec: Codec, dtype: torch.dtype, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return what has arrived, and what was sent to this rank."""
    rank, peers = transport.rank, range(transport.size)
    x = torch.cat([given(rank, to, dtype) for to in peers])
    expected = torch.cat([given(source, rank, dtype) for source in peers])
    out = torch.full_like(expected, torch.nan)
    sends, recvs = [count(rank, to) for to in peers], [count(source, rank) for source in peers]
    all_to_all(x, out, sends, recvs, codec, transport, seed=seed)
    return out, expected


@looped("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@looped("codec", tiered([codec.bare for codec in defaults() if not codec.ahead], is_kind), ids=str)
def test_every_part_arrives_with_the_codec_s_loss_only(codec: Codec, dtype: torch.dtype) -> None:
    def body(transport: Transport) -> None:
        out, _ = travel(transport, codec, dtype)
        for source, piece in enumerate(out.split([count(source, transport.rank) for source in range(transport.size)])):
            expected = given(source, transport.rank, dtype)
            if codec.lossless or source == transport.rank:
                assert torch.equal(piece, expected)
            else:
                error = float((piece.double() - expected.double()).norm())
                bound = 1.5 * coarseness(codec, len(expected), dtype) + torch.finfo(dtype).eps
                assert error <= bound * float(expected.double().norm()), (source, codec)

    for world in WORLDS:
        over_threads(world, body)


@on_threads(4)
def test_only_what_leaves_is_encoded(transport: Transport) -> None:
    """The bytes are those of the messages to other ranks; the rank's own part stays out."""
    codec = codecs.get("int8").bare
    before = transport.bytes_sent
    travel(transport, codec, torch.float32)
    rank, peers = transport.rank, range(transport.size)
    expected = [codec.wire(count(rank, to), torch.float32).capacity for to in peers if to != rank]
    assert transport.bytes_sent - before == sum(expected)


@on_threads(3)
def test_any_type_travels_as_it_is(transport: Transport) -> None:
    size = transport.size
    x = torch.arange(2 * size, dtype=torch.float64) + 0.1 * transport.rank
    out = torch.empty_like(x)
    all_to_all(x, out, [2] * size, [2] * size, codecs.get("raw").bare, transport)
    expected = [2 * transport.rank + i + 0.1 * source for source in range(size) for i in range(2)]
    assert out.tolist() == [float(torch.tensor(value, dtype=torch.float64)) for value in expected]
