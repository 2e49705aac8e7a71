"""Zipped collectives give the bits of uncompressed ones, and send fewer bytes."""

from collections.abc import Callable, Mapping, Sequence

import pytest
import torch
from torch import Tensor

import fusionlayer as fl
from fusionlayer import codecs
from fusionlayer.base.errors import ConfigError, WireError
from fusionlayer.codecs import Codec
from fusionlayer.collectives import halves, zipped
from fusionlayer.transport import Transport, local
from fusionlayer.transport._sum import sum_in_rank_order
from tests.codecs.conformance import as_bits, same_bits
from tests.loops import looped
from tests.ranks import on_threads, over_threads
from tests.synthetic import bit_patterns, gradient

from .conformance import DTYPES, WORLDS, same_everywhere

RAW, ZIP = codecs.get("raw").bare, codecs.get("zip")
ZIPPED = [codec for name in codecs.names() if (codec := codecs.get(name)).zips]
each_dtype = looped("dtype", DTYPES)
each_codec_and_world = looped(
    "codec, world",
    [*((ZIP.bare, world) for world in WORLDS), *((codec, 3) for codec in (*ZIPPED, codecs.get("rans").bare))],
    ids=str,
)


def values(numel: int, stream: int, dtype: torch.dtype) -> Tensor:
    """Return values most of which get shorter; zeros of both signs, infinities and NaN of all kinds among them."""
    x = gradient(numel, stream, dtype)
    odd = bit_patterns(dtype)
    x[stream % 7 :: 97] = odd[torch.arange(len(x[stream % 7 :: 97])) * 131 % len(odd)]
    x[1::50] = -0.0
    return x


def ordinary(numel: int, stream: int, dtype: torch.dtype) -> Tensor:
    """Return values without NaN, whose bits a sum does not keep."""
    return values(numel, stream, dtype).nan_to_num_(0.5, 1e3, -1e3)


def uneven(world: int, scale: int = 1) -> list[int]:
    """Return a number of elements for each rank, zero among them."""
    return [(0, 1500, 7, 3000, 64, 1, 2000, 900)[rank] * scale for rank in range(world)]


@each_codec_and_world
@each_dtype
def test_all_gather(codec: Codec, dtype: torch.dtype, world: int) -> None:
    for lengths in ([0] * world, [1] * world, [3000] * world, uneven(world)):
        expected = torch.cat([values(n, rank, dtype) for rank, n in enumerate(lengths)])

        def body(transport: Transport, lengths: list[int] = lengths, expected: Tensor = expected) -> None:
            x = values(lengths[transport.rank], transport.rank, dtype)
            for piece in (None, 1000):
                out = torch.full_like(expected, 3.0)
                zipped.all_gather(x, out, codec, transport, lengths=lengths, piece=piece)
                assert same_bits(out, expected)
            part = out.split(lengths)[transport.rank]
            zipped.all_gather(part, out, codec, transport, lengths=lengths)
            assert same_bits(out, expected), "the input may be a part of the output"

        over_threads(world, body)


@each_dtype
@on_threads(3)
def test_what_changed_reaches_all_and_a_rank_s_own_row(transport: Transport, dtype: torch.dtype) -> None:
    """Of three versions, in pieces; each is sent as what makes it of the one before."""
    n, out, delta = 40_000, torch.zeros(3 * 40_000, dtype=dtype), codecs.get("delta").bare
    for version in range(3):
        rows = [values(n, 7 * rank + version // 2, dtype) for rank in range(3)]
        zipped.all_gather(rows[transport.rank], out, delta, transport, piece=16_384, changes=True)
        assert same_bits(out, torch.cat(rows))


@each_codec_and_world
@each_dtype
@pytest.mark.parametrize("design", [1, 2])
def test_all_to_all(design: int, codec: Codec, dtype: torch.dtype, world: int) -> None:
    def count(source: int, to: int) -> int:
        return uneven(8)[(3 * source + to) % 8]

    def piece(source: int, to: int) -> Tensor:
        return values(count(source, to), 10 * source + to, dtype)

    def body(transport: Transport) -> None:
        rank = transport.rank
        sends, recvs = [count(rank, to) for to in range(world)], [count(source, rank) for source in range(world)]
        x = torch.cat([piece(rank, to) for to in range(world)])
        out = torch.full((sum(recvs),), 3.0, dtype=dtype)
        zipped.all_to_all(x, out, sends, recvs, codec, transport, design=design)
        assert same_bits(out, torch.cat([piece(source, rank) for source in range(world)]))
        nothing = torch.empty(0, dtype=dtype)
        zipped.all_to_all(nothing, nothing.clone(), [0] * world, [0] * world, codec, transport, design=design)

    over_threads(world, body)


@each_codec_and_world
@each_dtype
@on_threads()
def test_reduce_scatter(transport: Transport, codec: Codec, dtype: torch.dtype, world: int) -> None:
    for n in (0, 1, 3000):
        x = torch.cat([ordinary(n, 10 * transport.rank + to, dtype) for to in range(world)])
        expected = torch.empty(n, dtype=dtype)
        parts = [ordinary(n, 10 * source + transport.rank, dtype) for source in range(world)]
        sum_in_rank_order(parts, expected)
        for piece in (None, 1000):
            out = torch.full((n,), 3.0, dtype=dtype)
            zipped.reduce_scatter(x, out, codec, transport, piece=piece)
            assert same_bits(out, expected)


@each_codec_and_world
@each_dtype
@on_threads()
def test_all_reduce_is_both_halves(transport: Transport, codec: Codec, dtype: torch.dtype, world: int) -> None:
    for n in (0, 1, world * 1000, 3001):
        x = ordinary(n, transport.rank, dtype)
        expected = torch.empty_like(x)
        sum_in_rank_order([ordinary(n, rank, dtype) for rank in range(world)], expected)
        for piece in (None, 1000):
            out, kept = torch.full_like(x, 3.0), x.clone()
            zipped.zipped(x, codec, transport, out=out, piece=piece)
            assert same_bits(out, expected) and same_bits(x, kept)
        zipped.zipped(x, codec, transport)
        assert same_bits(x, expected)


@on_threads(3)
def test_a_nan_reaches_all_as_the_canonical_one(transport: Transport) -> None:
    x = gradient(2000, transport.rank)
    x[700] = bit_patterns(torch.float32)[6] if transport.rank == 1 else 1.0
    zipped.zipped(x, ZIP.bare, transport)
    assert int(as_bits(x)[700]) == 0x7FC00000 and x.isnan().sum() == 1
    assert same_everywhere(transport, x)


@looped("codec", ZIPPED, ids=str)
def test_halves_and_functions_give_the_bits_of_raw(codec: Codec) -> None:
    world = 3

    def body(rank: int) -> None:
        transport = local.current()
        assert transport is not None
        for dtype in (*DTYPES, torch.float64):
            x = ordinary(4 * 1000, rank, torch.float32).to(dtype)
            gathered = [torch.empty(world, x.numel(), dtype=dtype) for _ in range(2)]
            rows = ordinary(world * 500, rank, torch.float32).to(dtype).view(world, -1)
            scattered = [torch.empty(500, dtype=dtype) for _ in range(2)]
            for used, every, mine in zip((RAW, codec.bare), gathered, scattered, strict=True):
                halves.all_gather(x, every, used, transport)
                halves.reduce_scatter(rows, mine, used, transport)
            assert torch.equal(*(every.view(torch.uint8) for every in gathered))
            assert torch.equal(*(mine.view(torch.uint8) for mine in scattered))
        for dtype in DTYPES:
            part = values((rank + 1) * 60, rank, dtype).view(-1, 20) if rank else torch.zeros(0, 20, dtype=dtype)
            assert same_bits(fl.all_gather(part, codec), fl.all_gather(part))
            splits = [(rank + to) % 3 for to in range(world)]
            x = values(20 * sum(splits), rank, dtype).view(-1, 20)
            assert same_bits(fl.all_to_all(x, splits, codec), fl.all_to_all(x, splits))
            rows = ordinary(world * 40, rank, dtype).view(-1, 10)
            assert same_bits(fl.reduce_scatter(rows, codec), fl.reduce_scatter(rows))
            x = ordinary(501, rank, dtype)
            total = sum(ordinary(501, r, dtype).float() * torch.tensor(1 / world, dtype=dtype) for r in range(world))
            torch.testing.assert_close(fl.all_reduce(x, codec).float(), total, rtol=0.02, atol=0.01)

    local.run(body, world)


def sent_by(call: Callable[[Transport], None], world: int = 3) -> list[int]:
    def body(transport: Transport) -> int:
        before = transport.bytes_sent
        call(transport)
        return transport.bytes_sent - before

    return over_threads(world, body)


def test_fewer_bytes_travel() -> None:
    """A Gaussian of bf16 takes 11.2 bits an element in each collective, and heads beside."""
    n, world = 1 << 18, 3
    x = torch.randn(n, generator=torch.Generator().manual_seed(1)).bfloat16()
    out, part = x.new_empty(world * n), x.new_empty(n // world)
    codec = ZIP.bare
    even: Sequence[int] = [n // 4, n // 4, n // 2]

    def exchange(transport: Transport) -> None:
        recvs = [even[transport.rank]] * world
        zipped.all_to_all(x, x.new_empty(sum(recvs)), even, recvs, codec, transport)

    assert sent_by(lambda t: zipped.all_gather(x, out, codec, t)) == pytest.approx([1.4 * 2 * n] * 3, rel=0.01)
    assert sent_by(exchange) == pytest.approx([1.4 * n * share for share in (0.75, 0.75, 0.5)], rel=0.01)
    scattered = sent_by(lambda t: zipped.reduce_scatter(x[: n // world * world], part.clone(), codec, t))
    assert scattered == pytest.approx([1.4 * n * 2 / 3] * 3, rel=0.01)
    assert sent_by(lambda t: zipped.zipped(x.clone(), codec, t)) == pytest.approx([1.4 * n * 4 / 3] * 3, rel=0.01)


def test_what_does_not_get_shorter_costs_its_heads_alone() -> None:
    n = 1 << 16
    x = (
        torch.randint(-(1 << 15), 1 << 15, (n,), generator=torch.Generator().manual_seed(2))
        .short()
        .view(torch.bfloat16)
    )
    sent = sent_by(lambda t: zipped.all_gather(x, x.new_empty(3 * n), ZIP.bare, t))
    assert sent == [2 * (2 * n + 128)] * 3


def test_the_static_part_does_not_wait_for_a_late_rank() -> None:
    """Over real links what is early travels early: the first exchange depends on no other rank's data."""
    order: dict[int, list[list[int]]] = {1: [], 2: []}

    def body(transport: Transport) -> None:
        exchange = transport.exchange

        def recorded(messages: Mapping[int, tuple[Tensor, Tensor]]) -> None:
            if transport.rank == 0:
                order[design].append([messages[to][0].numel() if to in messages else 0 for to in range(3)])
            exchange(messages)

        transport.exchange = recorded  # type: ignore[method-assign]
        x = torch.randn(3 * 4096, generator=torch.Generator().manual_seed(3)).bfloat16()
        for design in (1, 2):
            zipped.all_to_all(x, torch.empty_like(x), [4096] * 3, [4096] * 3, ZIP.bare, transport, design=design)

    over_threads(3, body)
    static = ZIP.bare.static_extent(4096, torch.bfloat16)
    assert order[2][0] == [0, static, static]
    assert all(0 < n < 400 for n in order[2][1][1:])
    assert order[1][0] == [8, 8, 8]
    assert all(static < n < static + 400 for n in order[1][1][1:])


@looped("design", [1, 2])
@on_threads(2)
def test_damage_is_noticed(transport: Transport, design: int) -> None:
    exchange = transport.exchange

    def damaged(messages: Mapping[int, tuple[Tensor, Tensor]]) -> None:
        exchange(messages)
        if messages[1 - transport.rank][1].numel() > 100:
            messages[1 - transport.rank][1][-1] ^= 1

    transport.exchange = damaged  # type: ignore[method-assign]
    x = gradient(4000, transport.rank).bfloat16()
    with pytest.raises(WireError, match="checksum"):
        zipped.all_to_all(x, torch.empty_like(x), [2000] * 2, [2000] * 2, ZIP, transport, design=design)


@on_threads(2)
def test_sizes_that_cannot_be_are_refused(transport: Transport) -> None:
    all_to_all = transport.all_to_all

    def lying(x: Tensor, out: Tensor) -> None:
        all_to_all(x, out)
        out[1 - transport.rank, 7] = 0x7F

    transport.all_to_all = lying  # type: ignore[method-assign]
    x = gradient(4000, transport.rank)
    with pytest.raises(WireError, match=f"rank {1 - transport.rank} announces"):
        zipped.all_to_all(x, torch.empty_like(x), [2000] * 2, [2000] * 2, ZIP.bare, transport, design=1)


@on_threads(4)
def test_a_sum_of_16_bits_is_rounded_once(transport: Transport) -> None:
    """1 + 2^-9 + 2^-9 in bf16: rounding after each sum would lose both small ones."""
    parts = [1.0, 2.0**-9, 2.0**-9, 2.0**-8]
    x = torch.full((4 * 2000,), parts[transport.rank], dtype=torch.bfloat16)
    out = torch.empty(2000, dtype=torch.bfloat16)
    zipped.reduce_scatter(x, out, ZIP.bare, transport)
    assert (out == 1 + 2.0**-7).all()
    zipped.zipped(x, ZIP.bare, transport)
    assert (x == 1 + 2.0**-7).all()


@on_threads(2)
def test_wrong_arguments_are_refused_before_anything_is_sent(transport: Transport) -> None:
    x, codec = torch.zeros(6), ZIP.bare
    for call, message in (
        (lambda: zipped.all_gather(x, torch.zeros(11), codec, transport), "which add up"),
        (lambda: zipped.all_gather(x, torch.zeros(12), codec, transport, lengths=[5, 7]), "which add up"),
        (lambda: zipped.all_gather(x, torch.zeros(12), RAW, transport), "cannot use raw"),
        (lambda: zipped.all_gather(x.double(), torch.zeros(12), codec, transport), "float64"),
        (lambda: zipped.all_to_all(x, x, [6], [6], codec, transport), "2 counts"),
        (lambda: zipped.all_to_all(x, x, [2, 4], [4, 2], codec, transport), "the same for this rank"),
        (lambda: zipped.all_to_all(x, x, [3, 2], [3, 2], codec, transport), "add up"),
        (lambda: zipped.all_to_all(x, x, [3, 3], [3, 3], codec, transport, design=3), "design=3"),
        (lambda: zipped.reduce_scatter(x, torch.zeros(4), codec, transport), "2 times as many"),
        (lambda: zipped.reduce_scatter(x, torch.zeros(3), codecs.get("topk"), transport), "cannot use topk"),
        (lambda: zipped.zipped(torch.zeros(6, 2).t(), codec, transport), "contiguous"),
    ):
        with pytest.raises(ConfigError, match=message):
            call()
    assert transport.bytes_sent == 0


def test_it_is_what_lossless_codecs_of_variable_size_travel_by() -> None:
    for codec in ZIPPED:
        assert fl.collectives.choose(codec, (4,), ahead=None) == "zipped"
    assert fl.collectives.choose(codecs.get("raw"), (4,), ahead=None) == "dense"
