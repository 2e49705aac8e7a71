"""Ring and butterfly: who sends what to whom, and what comes of it."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from fusionlayer import codecs, collectives
from fusionlayer.base.errors import TransportError, WireError
from fusionlayer.base.seeds import derive_seed
from fusionlayer.codecs import AgreeingCodec, Codec, HomomorphicCodec
from fusionlayer.codecs.research.dynamiq import DynamiQ
from fusionlayer.collectives import _hops, butterfly, ring
from fusionlayer.collectives._hops import balanced
from fusionlayer.transport import Transport
from tests.codecs.variants import defaults, is_kind
from tests.loops import looped
from tests.ranks import on_threads, over_threads

from .conformance import DTYPES, conform, given, same_everywhere, sum_over_ranks

SCHEDULES = {"ring": ring.schedule, "butterfly": butterfly.schedule}
REDUCE = {"ring": ring.ring, "butterfly": butterfly.butterfly}
NAMES = tuple(SCHEDULES)
WORLDS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 16)
QUANTIZERS = [codec.bare for codec in defaults() if not codec.ahead]


# ---- schedules ------------------------------------------------------------------------------------------------------


@looped("name", NAMES)
def test_schedules_sum_every_chunk_of_every_rank_once(name: str) -> None:
    for size in (*range(1, 18), 31, 64):
        sums_every_chunk_of_every_rank_once(name, size)


def sums_every_chunk_of_every_rank_once(name: str, size: int) -> None:
    ways = [SCHEDULES[name](rank, size) for rank in range(size)]
    chunks = ways[0].chunks
    assert {(way.chunks, len(way.reduce), len(way.gather)) for way in ways} == {
        (chunks, len(ways[0].reduce), len(ways[0].gather))
    }
    summands = [[Counter({rank: 1}) for _ in range(chunks)] for rank in range(size)]
    for hops in zip(*(way.reduce for way in ways), strict=True):
        sent = [{chunk: summands[rank][chunk].copy() for chunk in hop.sends} for rank, hop in enumerate(hops)]
        for rank, hop in enumerate(hops):
            assert (hops[hop.to].source, hops[hop.to].recvs) == (rank, hop.sends) or not hop.sends
            assert (hops[hop.source].to, hops[hop.source].sends) == (rank, hop.recvs) or not hop.recvs
            for chunk in hop.recvs:
                summands[rank][chunk] += sent[hop.source][chunk]
    owners = {chunk: rank for rank, way in enumerate(ways) for chunk in way.own}
    assert sum(len(way.own) for way in ways) == chunks == len(owners)
    assert all(summands[rank][chunk] == Counter(range(size)) for chunk, rank in owners.items())

    known = [set(way.own) for way in ways]
    for hops in zip(*(way.gather for way in ways), strict=True):
        assert all(set(hop.sends) <= known[rank] for rank, hop in enumerate(hops))
        for rank, hop in enumerate(hops):
            assert (hops[hop.source].to, hops[hop.source].sends) == (rank, hop.recvs) or not hop.recvs
            assert not known[rank] & set(hop.recvs), "nothing is received twice"
            known[rank] |= set(hop.recvs)
    assert all(chunks_here == set(range(chunks)) for chunks_here in known)


@looped("name", NAMES)
def test_no_rank_encodes_a_chunk_twice_or_adds_to_what_it_has_sent(name: str) -> None:
    for size, rank in [(n, rank) for n in (*range(1, 18), 64) for rank in range(n)]:
        gone: set[int] = set()
        for hop in SCHEDULES[name](rank, size).reduce:
            assert not gone & set(hop.sends)
            gone |= set(hop.sends)
            assert not gone & set(hop.recvs)


def test_hops_and_messages() -> None:
    assert [len(ring.schedule(0, size).reduce) for size in (1, 2, 5, 8)] == [0, 1, 4, 7]
    assert [len(butterfly.schedule(0, size).reduce) for size in (1, 2, 4, 5, 7, 8, 9)] == [0, 1, 2, 3, 3, 3, 4]
    assert [ring.schedule(0, size).depth for size in (1, 2, 8)] == [0, 1, 1]
    assert [butterfly.schedule(0, size).depth for size in (1, 2, 8, 9)] == [0, 1, 3, 4]
    assert ring.schedule(3, 8).own == [3]
    first = butterfly.schedule(0, 8).reduce[0]
    assert (first.to, len(first.sends)) == (1, 4), "the longest message goes to the nearest rank"


def test_chunks_are_whole_blocks_and_balanced() -> None:
    assert balanced(slice(0, 10), 3, 1) == [slice(0, 3), slice(3, 6), slice(6, 10)]
    assert balanced(slice(100, 100), 2, 8) == [slice(100, 100)] * 2
    for numel in (1, 31, 32, 33, 1000):
        for chunks in (1, 2, 3, 8):
            parts = balanced(slice(64, 64 + numel), chunks, 32)
            assert [part.start for part in parts[1:]] == [part.stop for part in parts[:-1]]
            assert (parts[0].start, parts[-1].stop) == (64, 64 + numel)
            assert all(part.start % 32 == 0 or part.start == part.stop for part in parts)
            lengths = [-(-(part.stop - part.start) // 32) for part in parts]
            assert max(lengths) - min(lengths) <= 1


# ---- sums -----------------------------------------------------------------------------------------------------------


@looped("name", NAMES)
@looped("world", [6, 7, 9])
def test_more_worlds(name: str, world: int) -> None:
    """Lengths and types by turns; test_conformance.py has all of both in other worlds."""
    lengths, dtypes = ((1, 129), (0, 4097))[world % 2], [DTYPES[(world + len(name)) // 2 % 2]]
    codec, device = codecs.get("int4").bare, torch.device("cpu")
    over_threads(world, lambda transport: conform(transport, name, codec, device, lengths, dtypes))


@looped("name", NAMES)
def test_where_the_order_does_not_matter_a_lossless_sum_is_the_dense_one(name: str) -> None:
    def body(transport: Transport) -> None:
        for dtype in DTYPES:
            x = (torch.arange(1000) % 7 + transport.rank - 4).to(dtype)
            expected = x.clone()
            collectives.get("dense")(expected, codecs.get("raw").bare, transport)
            collectives.get(name)(x, codecs.get("raw").bare, transport)
            assert torch.equal(x, expected)

    for world in (1, 2, 3, 4, 7, 16):
        over_threads(world, body)


def expected_sum(name: str, every: Sequence[Codec], inputs: list[Tensor], seed: int) -> Tensor:
    """Return the sum by a schedule, made message by message with each rank's codec and its plain verbs."""
    size, numel, block = len(inputs), inputs[0].numel(), every[0].block
    ways = [SCHEDULES[name](rank, size) for rank in range(size)]
    arranged = [codec.arrangement if isinstance(codec, DynamiQ) else None for codec in every]
    totals = [x.clone() if way is None else way.arrange(x) for way, x in zip(arranged, inputs, strict=True)]
    chunks = balanced(slice(0, len(totals[0])), ways[0].chunks, block)
    out, summed = torch.zeros_like(totals[0]), set[tuple[int, int]]()

    def message(rank: int, i: int) -> Tensor:
        chunk, codec = chunks[i], every[rank]
        payload = torch.empty(codec.wire(chunk.stop - chunk.start).capacity, dtype=torch.uint8)
        # What ranks agree on is for their own values; codes that add up give a sum a scale of its own.
        if (rank, i) in summed and isinstance(codec, HomomorphicCodec):
            codec = replace(codec, rms=None)
        codec.encode(totals[rank][chunk], payload, seed=derive_seed(seed, rank), offset=chunk.start)
        return payload

    for hops in zip(*(each.reduce for each in ways), strict=True):
        sent = [{i: message(rank, i) for i in hop.sends} for rank, hop in enumerate(hops)]
        for rank, hop in enumerate(hops):
            for i in hop.recvs:
                every[rank].decode_add(sent[hop.source][i], totals[rank][chunks[i]])
                summed.add((rank, i))
    for rank, each in enumerate(ways):
        for i in each.own:
            every[rank].decode(message(rank, i), out[chunks[i]])
    if arranged[0] is None:
        return out
    arranged[0].restore(out, restored := torch.empty(numel))
    return restored


@looped(
    "name, codec",
    [(name, codec) for name in NAMES for codec in (*QUANTIZERS, codecs.get("int", bits=4, rounding="stochastic").bare)],
)
def test_every_partial_sum_is_encoded_once_and_the_sums_bytes_reach_all(name: str, codec: Codec) -> None:
    """Dynamiq's values travel in an order that ranks agree on, all others as they lie."""
    for world in (1, 2, 3, 5, 8, 9) if is_kind(codec) else (3,):
        encodes_every_partial_sum_once(name, codec, world)


def encodes_every_partial_sum_once(name: str, codec: Codec, world: int) -> None:
    numel = 30 * 256 + 77
    inputs = [given(rank, 0, numel, torch.float32) for rank in range(world)]
    lengths = [part.stop - part.start for part in balanced(slice(0, numel), SCHEDULES[name](0, world).chunks, 256)]

    def body(transport: Transport) -> tuple[Tensor, Codec]:
        x, agreed = inputs[transport.rank].clone(), codec
        if isinstance(codec, AgreeingCodec):
            chunks = {"chunks": lengths} if isinstance(codec, DynamiQ) else {}
            agreed = codec.agree(x, transport, seed=11, **chunks)
        collectives.get(name)(x, codec, transport, seed=11)
        return x, agreed

    results = over_threads(world, body)
    expected = expected_sum(name, [agreed for _, agreed in results], inputs, 11)
    assert all(torch.equal(x, expected) for x, _ in results)


@looped("name", NAMES)
def test_bytes_sent_are_as_documented(name: str) -> None:
    for world in WORLDS:
        sends_bytes_as_documented(name, world)


def sends_bytes_as_documented(name: str, world: int) -> None:
    codec, numel = codecs.get("int4").bare, 50_000
    way = SCHEDULES[name](0, world)
    parts = balanced(slice(0, numel), way.chunks, codec.block)
    message = [codec.wire(part.stop - part.start).capacity for part in parts]

    def body(transport: Transport) -> int:
        collectives.get(name)(given(transport.rank, 0, numel, torch.float32).clone(), codec, transport)
        return transport.bytes_sent

    sent = over_threads(world, body)
    if name == "ring":
        whole = 2 * sum(message)
        assert sent == [whole - message[rank] - message[(rank + 1) % world] for rank in range(world)]
    else:
        inner = way.chunks
        pairs = world - inner
        assert sum(sent) == 2 * (inner - 1) * sum(message) + 2 * pairs * sum(message)
        assert sent[inner:] == [sum(message)] * pairs


# ---- pieces ---------------------------------------------------------------------------------------------------------


def in_pieces(transport: Transport, name: str, codec: Codec, numel: int, piece: int | None) -> None:
    x = given(transport.rank, 0, numel, torch.float32).clone()
    out, residual = torch.empty_like(x), torch.zeros(numel)
    REDUCE[name](x, codec, transport, seed=3, residual=residual, out=out, piece=piece)
    assert torch.equal(x, given(transport.rank, 0, numel, torch.float32)), "with `out` the input stays"
    assert same_everywhere(transport, out)
    exact = sum(given(rank, 0, numel, torch.float32).double() for rank in range(transport.size))
    assert float((out.double() + sum_over_ranks(transport, residual) - exact).abs().max()) < 1e-5
    assert float((out.double() - exact).norm()) < 0.5 * float(exact.norm())
    assert codec.lossless or residual.count_nonzero() > numel // 4


@looped("codec", [codecs.get(name).bare for name in ("raw", "int4", "fp8", "dynamiq")], ids=str)
@looped("name", NAMES)
def test_pieces_lose_nothing(name: str, codec: Codec) -> None:
    def body(transport: Transport) -> None:
        for piece in (700, 3000, 8000):
            in_pieces(transport, name, codec, 10_000, piece)

    for world in (1, 3, 4):
        over_threads(world, body)


@pytest.mark.parametrize("name", NAMES)
def test_long_tensors_go_in_halves(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_hops, "_SEGMENT_MESSAGE", 1000)
    assert [_hops.segments(numel, 4) for numel in (0, 7999, 8000, 1 << 30)] == [1, 1, 2, 2]
    calls: list[int] = []
    monkeypatch.setattr(_hops, "cut", lambda *args: calls.append(len(parts := _real_cut(*args))) or parts)

    def body(transport: Transport) -> None:
        in_pieces(transport, name, codecs.get("int8").bare, 9001, None)

    over_threads(4, body)
    assert calls == [2] * 4


_real_cut = _hops.cut


# ---- what goes wrong ------------------------------------------------------------------------------------------------


@looped("world", [2, 5])
@looped("name", NAMES)
@on_threads()
def test_messages_with_headers_carry_the_same(transport: Transport, name: str, world: int) -> None:
    results = []
    for codec in (codecs.get("int8").bare, codecs.get("int8").checked):
        x = given(transport.rank, 0, 3000, torch.float32).clone()
        collectives.get(name)(x, codec, transport, seed=1)
        results.append(x)
    assert torch.equal(*results)


@looped("hop", [0, 2])
@looped("name", NAMES)
@on_threads(4)
def test_a_damaged_message_is_noticed(transport: Transport, name: str, hop: int) -> None:
    exchange, calls = transport.exchange, [0]

    def damaging(messages: Mapping[int, tuple[Tensor, Tensor]]) -> None:
        exchange(messages)
        if calls[0] == hop and transport.rank == 1:
            next(recv for _, recv in messages.values() if recv.numel())[200] ^= 1
        calls[0] += 1

    transport.exchange = damaging  # type: ignore[method-assign]
    error: type[Exception] = WireError if transport.rank == 1 else TransportError
    with pytest.raises(error, match="checksum" if transport.rank == 1 else "rank 1"):
        collectives.get(name)(torch.ones(5000), codecs.get("int8").checked, transport)
        transport.barrier()
    transport.close()


@looped("name", NAMES)
@on_threads(4)
def test_ranks_that_differ_are_named(transport: Transport, name: str) -> None:
    with pytest.raises(TransportError) as raised:
        numel = 2000 if transport.rank == 1 else 1000
        collectives.get(name)(torch.ones(numel), codecs.get("int8").bare, transport)
    assert 1 in raised.value.ranks
