"""Pieces of a collective: the same result, in an order that all ranks share, and no rank left waiting."""

import threading
from collections.abc import Callable, Iterator
from itertools import product

import pytest
import torch
from torch import Tensor

from fusionlayer import codecs
from fusionlayer.base.errors import TransportError
from fusionlayer.codecs import Codec, HomomorphicCodec
from fusionlayer.collectives._base import encloses
from fusionlayer.collectives._pieces import IN_FLIGHT, cut, pipeline
from fusionlayer.collectives.halves import all_gather, reduce_scatter
from fusionlayer.collectives.one_shot import one_shot
from fusionlayer.collectives.two_shot import two_shot
from fusionlayer.native.wire import ALIGN
from fusionlayer.transport import Transport
from tests.codecs.variants import defaults, is_kind
from tests.loops import looped
from tests.ranks import on_threads, over_threads
from tests.synthetic import gradient
from tests.tiers import tiered

from .conformance import agreed_coarseness, coarseness, given, same_everywhere

WORLDS = (1, 2, 3, 4)
LENGTHS = (0, 1, 129, 5000)
BLOCKWISE = [codecs.get(name).bare for name in ("raw", "bf16", "int8", "int4")]


@looped("reduce", [one_shot, two_shot])
@looped("codec", [*BLOCKWISE, codecs.get("int8"), codecs.get("topk")], ids=str)
def test_a_sum_encloses_a_row_of_each_rank_and_stays_as_it_is(codec: Codec, reduce: Callable[..., None]) -> None:
    def body(transport: Transport) -> None:
        rows = torch.arange(transport.size * ALIGN).to(torch.uint8).view(transport.size, ALIGN)
        for numel, piece in product(LENGTHS, (None, 300)):
            plain, x = (given(transport.rank, 0, numel, torch.float32).clone() for _ in range(2))
            reduce(plain, codec, transport, seed=3, piece=piece)
            enclosed = torch.zeros_like(rows)
            enclosed[transport.rank] = rows[transport.rank]
            reduce(x, codec, transport, seed=3, piece=piece, enclosed=enclosed)
            assert torch.equal(x, plain)
            assert torch.equal(enclosed, rows) or not numel and piece, (numel, piece)

    for world in WORLDS:
        over_threads(world, body)
    assert encloses(reduce.__name__) and not encloses("ring")


def test_pieces_cover_everything_once() -> None:
    assert cut(10, None, 4) == [slice(0, 10)]
    assert cut(10, 3, 4) == [slice(0, 4), slice(4, 8), slice(8, 10)]
    assert cut(10, 1, 1) == [slice(i, i + 1) for i in range(10)]
    assert cut(8, 4, 4) == [slice(0, 4), slice(4, 8)]
    assert cut(8, 9, 4) == [slice(0, 8)]
    assert cut(0, 5, 4) == cut(0, None, 4) == [slice(0, 0)]


@looped("reduce", [one_shot, two_shot])
@looped("codec", BLOCKWISE, ids=str)
def test_pieces_do_not_change_a_sum(codec: Codec, reduce: Callable[..., None]) -> None:
    def body(transport: Transport) -> None:
        for numel in LENGTHS:
            whole = given(transport.rank, 0, numel, torch.float32).clone()
            x, out = whole.clone(), torch.empty_like(whole)
            reduce(whole, codec, transport, seed=3)
            for piece in (300, 2000):
                reduce(x, codec, transport, seed=3, out=out, piece=piece)
                assert torch.equal(out, whole), (numel, piece)
                assert torch.equal(x, given(transport.rank, 0, numel, torch.float32))
            reduce(x, codec, transport, seed=3, piece=700)
            assert torch.equal(x, whole)
            assert same_everywhere(transport, x)

    for world in WORLDS:
        over_threads(world, body)


@looped("codec", tiered([codec.bare for codec in defaults()], is_kind), ids=str)
def test_the_halves(codec: Codec) -> None:
    for world, piece in product(WORLDS, (None, 300)):
        the_halves_are_close(world, codec, piece)


def the_halves_are_close(world: int, codec: Codec, piece: int | None) -> None:
    def body(transport: Transport) -> None:
        for numel in LENGTHS:
            x = given(transport.rank, 0, numel, torch.float32).clone()
            every = torch.empty(world, numel)
            all_gather(x, every, codec, transport, seed=5, piece=piece)
            assert same_everywhere(transport, every.view(-1))
            rows = torch.stack([given(transport.rank, 1 + to, numel, torch.float32) for to in range(world)])
            mine = torch.empty(numel)
            reduce_scatter(rows, mine, codec, transport, seed=5, piece=piece)
            sources = [given(rank, 1 + transport.rank, numel, torch.float32) for rank in range(world)]
            exact = torch.stack(sources).double().sum(0)
            if codec.lossless:
                assert all(torch.equal(every[rank], given(rank, 0, numel, torch.float32)) for rank in range(world))
                torch.testing.assert_close(mine, exact.float())
            elif not codec.ahead and numel:
                # Pieces are shorter than what the error was estimated on.
                coarse = 1.5 * coarseness(codec, numel, torch.float32) + 1e-6
                for rank in range(world):
                    source = given(rank, 0, numel, torch.float32)
                    assert float((every[rank] - source).norm()) <= coarse * float(source.norm())
                norms = sum(float(source.norm()) for source in sources)
                if isinstance(codec, HomomorphicCodec):  # all rows have the scale of the largest
                    coarse = 1.5 * agreed_coarseness(codec, numel, torch.float32, world) + 1e-6
                    every_row = [given(r, 1 + to, numel, torch.float32) for r in range(world) for to in range(world)]
                    norms = world * max(float(row.norm()) for row in every_row)
                assert float((mine.double() - exact).norm()) <= coarse * norms

    over_threads(world, body)


@looped("codec", BLOCKWISE, ids=str)
def test_the_halves_make_a_sum(codec: Codec) -> None:
    """A reduce-scatter and an all-gather are the all-reduce, if pieces are whole blocks."""
    world, numel = 4, 4 * 1024

    def body(transport: Transport) -> None:
        x = given(transport.rank, 0, numel, torch.float32)
        whole, part, every = x.clone(), torch.empty(numel // world), torch.empty(world, numel // world)
        two_shot(whole, codec.checked, transport)
        reduce_scatter(x.view(world, -1), part, codec, transport, piece=256)
        all_gather(part, every, codec, transport, piece=256)
        assert torch.equal(every.view(-1), whole)

    over_threads(world, body)


@looped("codec", [codecs.get("int8").bare, codecs.get("bf16").bare], ids=str)
@on_threads(4)
def test_what_is_not_finite_reaches_all(transport: Transport, codec: Codec) -> None:
    x = gradient(2000, transport.rank)
    x[1700] = float("inf") if transport.rank == 2 else x[1700]
    every, part = torch.empty(4, 2000), torch.empty(500)
    all_gather(x, every, codec, transport, piece=600)
    assert not every[2, 1700].isfinite() and every[0].isfinite().all()
    reduce_scatter(x.view(4, 500), part, codec, transport, piece=200)
    assert part.isfinite().all() == (transport.rank != 3)


def test_while_a_piece_travels_another_is_computed() -> None:
    """Every call but the last is handed over before the one before it is waited for."""
    events: list[str] = []

    def piece(index: int) -> Iterator[Callable[[], None]]:
        for step in range(2):
            events.append(f"compute {index}.{step}")
            yield lambda: None
        events.append(f"compute {index}.2")

    def body(transport: Transport) -> None:
        pipeline([piece(i) for i in range(3)], transport, torch.device("cpu"))

    over_threads(1, body)
    assert IN_FLIGHT == 2
    order = ["0.0", "1.0", "0.1", "1.1", "0.2", "2.0", "1.2", "2.1", "2.2"]
    assert events == [f"compute {step}" for step in order]


def test_pieces_that_do_not_travel_are_all_computed() -> None:
    done: list[int] = []

    def piece(index: int) -> Iterator[Callable[[], None]]:
        done.append(index)
        yield from ()

    over_threads(1, lambda transport: pipeline([piece(i) for i in range(5)], transport, torch.device("cpu")))
    assert done == list(range(5))


def test_a_piece_that_fails_releases_the_other_ranks() -> None:
    def piece(rank: int, x: Tensor, transport: Transport) -> Iterator[Callable[[], None]]:
        yield lambda: transport.all_reduce(x)
        if rank == 1:
            raise ZeroDivisionError("a kernel failed")
        yield lambda: transport.all_reduce(x)

    released = threading.Event()

    def body(transport: Transport) -> None:
        tensors = torch.ones(3, 8)
        error = ZeroDivisionError if transport.rank == 1 else TransportError
        with pytest.raises(error):
            pipeline([piece(transport.rank, x, transport) for x in tensors], transport, tensors.device)
        if transport.rank == 0:
            released.set()
        assert released.wait(180), "rank 0 still waits for rank 1"

    over_threads(2, body)


@looped("world", [1, 2])
@looped("reduce", [one_shot, two_shot])
@on_threads()
def test_pieces_draw_noise_of_their_own(transport: Transport, reduce: Callable[..., None], world: int) -> None:
    """Equal halves, each a piece, are rounded differently: numbers of a seed are counted through all pieces."""
    codec = codecs.get("int", bits=4, rounding="stochastic").bare
    half = 4 * codec.block
    x = gradient(half, transport.rank).repeat(2)
    reduce(x, codec, transport, seed=1, piece=half)
    assert not torch.equal(x[:half], x[half:])
    rows, part = gradient(half, transport.rank).repeat(2).repeat(world, 1), torch.empty(2 * half)
    reduce_scatter(rows, part, codec, transport, seed=1, piece=half)
    assert not torch.equal(part[:half], part[half:])
    every = torch.empty(world, 2 * half)
    all_gather(rows[0], every, codec, transport, seed=1, piece=half)
    assert not torch.equal(every[0, :half], every[0, half:])
