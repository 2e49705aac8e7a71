"""Sums in two levels: what travels between nodes, what every rank gets, and what the levels' codecs do to it."""

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import pytest
import torch
from torch import Tensor

from fusionlayer import codecs, collectives
from fusionlayer.base.seeds import derive_seed
from fusionlayer.codecs import Codec, TwoLevelCodec
from fusionlayer.collectives import halves
from fusionlayer.collectives._levels import node_grid
from fusionlayer.training.weights import PRESETS
from fusionlayer.transport import Transport
from fusionlayer.transport.c10d import C10dTransport
from tests.harness import run_ranks
from tests.loops import looped
from tests.ranks import over_threads
from tests.synthetic import gradient

from .conformance import conform, given, same_everywhere
from .counting import LoneRank, native_calls, python_calls

SHAPES = ((4, 2), (8, 4), (8, 2), (6, 3))
"""(ranks, ranks of a node)."""

Nodes = tuple[tuple[int, ...], ...]
UNEQUAL: tuple[Nodes, ...] = (
    ((0, 1, 2), (3, 4), (5, 6, 7)),
    ((0, 4, 5), (1, 6), (2, 3, 7)),
    ((0,), (1, 2, 3, 4)),
    (tuple(range(8)), tuple(range(8, 15))),
)

Result = TypeVar("Result")

TWO_LEVEL = [codecs.get(name).bare for name in ("tlq", "tlq_hs", "ulq")]


def sums(world: int, per_node: int, codec: Codec, x: list[Tensor], seed: int = 1) -> list[Tensor]:
    def body(transport: Transport) -> Tensor:
        mine = x[transport.rank].clone()
        collectives.get("two_level")(mine, codec, transport, seed=seed)
        return mine

    return over_threads(world, body, ranks_per_node=per_node)


def error(got: Tensor, exact: Tensor) -> float:
    return float((got.double() - exact).square().sum() / exact.square().sum())


def outliers(numel: int, stream: int) -> Tensor:
    """Return bell-shaped values of which every 97th is 30 times as large."""
    x = gradient(numel, stream)
    x[stream % 97 :: 97] *= 30
    return x


@looped(
    "codec, shape",
    [
        *((codec, SHAPES[number]) for number, codec in enumerate(TWO_LEVEL)),
        *((codecs.get(name).bare, SHAPES[3 - number]) for number, name in enumerate(("raw", "int4", "taco"))),
    ],
)
def test_every_rank_has_the_sum(codec: Codec, shape: tuple[int, int], device: torch.device) -> None:
    dtypes = [(torch.float32, torch.bfloat16)[(sum(shape) + codec.block) % 2]]
    over_threads(
        shape[0],
        lambda transport: conform(transport, "two_level", codec, device, (1, 129, 5000), dtypes),
        ranks_per_node=shape[1],
    )


def named(nodes: Nodes) -> str:
    """Return the name of a test on ``nodes``."""
    return "-".join(str(len(node)) for node in nodes) if len(nodes) < 9 else f"{len(nodes)} nodes"


def on_nodes(nodes: Nodes, body: Callable[[Transport], Result]) -> list[Result]:
    """Return what ``body`` returns on each of the ranks of ``nodes``."""

    def placed(transport: Transport) -> Result:
        transport._nodes = nodes
        return body(transport)

    return over_threads(sum(map(len, nodes)), placed)


def in_plain_steps(
    x: list[Tensor], codec: Codec, nodes: Nodes, seed: int, residuals: list[Tensor] | None = None
) -> Tensor:
    """Return the sum that ``two_level`` makes of ``x``: its three quantisations, one chunk at a time."""
    within = codec.within if isinstance(codec, TwoLevelCodec) else codec
    numel, world, many = x[0].numel(), len(x), len(nodes) > 32
    chunk, out = -(-numel // (world * codec.block)) * codec.block, torch.empty_like(x[0])

    def message(level: Codec, rank: int, phase: int, values: Tensor, at: slice) -> Tensor:
        if not len(values):
            return values
        payload = torch.zeros(level.wire(len(values)).capacity, dtype=torch.uint8)
        kept = None if residuals is None else residuals[rank][at]
        level.encode(values, payload, seed=derive_seed(derive_seed(seed, rank), phase), offset=at.start, residual=kept)
        return level.decompress(payload, len(values))

    def passed_on(owner: int, rows: Nodes) -> list[int]:
        """Return the rank of each row that sums for ``owner``: the owner, and in other rows the ranks in turn."""
        place = [rank for row in rows for rank in row].index(owner)
        firsts = [sum(map(len, rows[:number])) for number in range(len(rows))]
        return [
            owner if owner in row else row[(place - len(row) * (first < place)) % len(row)]
            for row, first in zip(rows, firsts, strict=True)
        ]

    for owner in range(world):
        at = slice(min(owner * chunk, numel), min(owner * chunk + chunk, numel))
        total, by = torch.zeros(at.stop - at.start), passed_on(owner, nodes)
        rows = rows_of(by) if many else tuple((rank,) for rank in by)
        for row, last in zip(rows, passed_on(owner, rows), strict=True):
            in_row = torch.zeros_like(total)
            for number in map(by.index, row):
                at_node = torch.zeros_like(total)
                for rank in nodes[number]:
                    at_node += message(within, rank, 0, x[rank][at], at)
                in_row += message(codec, by[number], 1, at_node, at)
            total += message(codec, last, 3, in_row, at) if many else in_row
        out[at] = message(codec, owner, 2, total, at)
    return out


def rows_of(ranks: Sequence[int]) -> Nodes:
    """Return ranks in rows, about as many as a row has ranks; lengths differ by one at most."""
    world, count = len(ranks), round(len(ranks) ** 0.5)
    return tuple(tuple(ranks[world * row // count : world * (row + 1) // count]) for row in range(count))


MANY = tuple((66 - first, first - 1) for first in range(1, 34))
"""Nodes of two ranks each, of which the second ranks descend."""


@pytest.mark.parametrize("nodes", [*UNEQUAL, ((0, 1), (2, 3)), ((0, 2, 4), (1, 3, 5)), MANY], ids=named)
@pytest.mark.parametrize("name", ["tlq", "int8"])
@pytest.mark.parametrize("numel", [700, 40_000])
def test_sums_are_those_of_plain_steps(nodes: Nodes, name: str, numel: int) -> None:
    """With error feedback and without, in pieces too: bits and residuals are those of one chunk after the other."""
    codec, world = codecs.get(name, rounding="stochastic").bare, sum(map(len, nodes))
    x = [gradient(numel, rank) for rank in range(world)]
    kept = [gradient(numel, 100 + rank) for rank in range(world)]

    def body(transport: Transport) -> tuple[Tensor, Tensor, Tensor]:
        assert node_grid(transport) is not None
        plain, fed, left = (x[transport.rank].clone(), x[transport.rank].clone(), kept[transport.rank].clone())
        collectives.get("two_level")(plain, codec, transport, seed=3)
        collectives.get("two_level")(fed, codec, transport, seed=3, residual=left)
        return plain, fed, left

    got = on_nodes(nodes, body)
    left = [residual.clone() for residual in kept]
    plain, fed = in_plain_steps(x, codec, nodes, 3), in_plain_steps(x, codec, nodes, 3, left)
    for rank, each in enumerate(got):
        assert all(map(torch.equal, each, (plain, fed, left[rank])))


@pytest.mark.parametrize("nodes", [*UNEQUAL, MANY], ids=named)
def test_pieces_and_halves_on_unequal_and_on_many_nodes(nodes: Nodes) -> None:
    """Pieces give the bits of the whole; a reduce-scatter gives each rank its row, an all-gather gives all the same."""
    codec, world = codecs.get("tlq", rounding="nearest").bare, sum(map(len, nodes))
    x = [gradient(world * 1536, rank) for rank in range(world)]

    def body(transport: Transport, piece: int | None) -> list[Tensor]:
        whole, rows, row = x[transport.rank].clone(), x[transport.rank].view(world, -1), torch.empty(1536)
        every = torch.empty(world, 1536)
        collectives.get("two_level")(whole, codec, transport, piece=piece)
        halves.reduce_scatter(rows, row, codec, transport, piece=piece and 512)
        halves.all_gather(row, every, codec, transport, piece=piece and 512)
        return [whole, row, every]

    whole, cut = on_nodes(nodes, lambda t: body(t, None)), on_nodes(nodes, lambda t: body(t, world * 512))
    exact = torch.stack(x).double().sum(0).view(world, -1)
    for rank in range(world):
        assert all(map(torch.equal, whole[rank], cut[rank]))
        assert torch.equal(whole[rank][0], whole[0][0]) and torch.equal(whole[rank][2], whole[0][2])
        assert error(whole[rank][1], exact[rank]) < 0.12


@pytest.mark.parametrize("nodes", UNEQUAL)
def test_ranks_of_a_node_share_what_goes_between_nodes(nodes: Nodes) -> None:
    """A node of m of n ranks sends n - m sums of chunks, and its own m to every other node."""
    codec, world = codecs.get("tlq").bare, sum(map(len, nodes))
    chunk = codec.wire(512).capacity

    def body(transport: Transport) -> int:
        crossing, exchange = [0], transport.exchange
        near = next(node for node in nodes if transport.rank in node)

        def count(messages: Mapping[int, tuple[Tensor, Tensor]]) -> None:
            crossing[0] += sum(x.numel() for to, (x, _) in messages.items() if to not in near)
            exchange(messages)

        transport.exchange = count  # type: ignore[method-assign,assignment]
        collectives.get("two_level")(gradient(world * 512, transport.rank), codec, transport)
        return crossing[0]

    sent = on_nodes(nodes, body)
    for node in nodes:
        each = [sent[rank] for rank in node]
        assert sum(each) == (world - len(node) + len(node) * (len(nodes) - 1)) * chunk
        assert max(each) - min(each) <= chunk


@pytest.mark.parametrize("world, per_node", [(1, 1), (3, 3), (3, 1)])
def test_without_two_levels_there_is_one(world: int, per_node: int) -> None:
    """One node: ``within`` alone. Nodes of one rank: the codec between nodes alone."""
    codec = codecs.get("tlq_hs").bare
    level = codec.within if world == per_node else codec
    x = [gradient(5000, rank) for rank in range(world)]

    def flat(transport: Transport) -> Tensor:
        assert node_grid(transport) is None
        mine = x[transport.rank].clone()
        collectives.get("two_shot")(mine, level, transport, seed=1)
        return mine

    for got, expected in zip(sums(world, per_node, codec, x), over_threads(world, flat), strict=True):
        assert torch.equal(got, expected)


@looped("world, per_node", SHAPES)
@looped("codec", TWO_LEVEL, ids=str)
def test_a_rank_that_scatters_gets_its_own_rows(codec: Codec, world: int, per_node: int) -> None:
    x = [gradient(world * 1000, rank).view(world, -1) for rank in range(world)]
    exact = torch.stack(x).double().sum(0)

    def body(transport: Transport) -> Tensor:
        out = torch.empty(1000)
        halves.reduce_scatter(x[transport.rank], out, codec, transport, seed=1)
        return out

    for rank, out in enumerate(over_threads(world, body, ranks_per_node=per_node)):
        assert error(out, exact[rank]) < 0.12


@pytest.mark.parametrize("world, per_node", SHAPES)
def test_between_nodes_a_message_travels_once(world: int, per_node: int) -> None:
    """Both halves together: 2 (nodes - 1) / nodes of a message leave a node, however many ranks it has."""
    codec, numel = codecs.get("tlq_hs").bare, world * 4096
    nodes = world // per_node

    def body(transport: Transport) -> tuple[int, int]:
        before, crossing = transport.bytes_sent, [0]
        exchange = transport.exchange

        def count(messages: Mapping[int, tuple[Tensor, Tensor]]) -> None:
            here = transport.rank // per_node
            crossing[0] += sum(x.numel() for to, (x, _) in messages.items() if to // per_node != here)
            exchange(messages)

        transport.exchange = count  # type: ignore[method-assign,assignment]
        collectives.get("two_level")(gradient(numel, transport.rank), codec, transport)
        return crossing[0], transport.bytes_sent - before

    found = over_threads(world, body, ranks_per_node=per_node)
    message = codec.wire(numel).capacity
    assert sum(crossing for crossing, _ in found[:per_node]) == 2 * message * (nodes - 1) // nodes
    inside = codec.within.wire(4096).capacity * (per_node - 1) * nodes  # the first hop
    gathered = codec.wire(4096).capacity * (per_node - 1) * nodes  # the last one
    assert found[0][1] == found[0][0] + inside + gathered


@pytest.mark.parametrize("world", [64, 1024])
@pytest.mark.parametrize("name", ["int8", "tlq_hs"])
def test_a_bucket_takes_few_calls(name: str, world: int) -> None:
    """Four of the core, or five over many nodes; 542 of Python at 64 ranks, where one by one there were 5351."""
    codec, transport, x = codecs.get(name).bare, LoneRank(0, world, ranks_per_node=8), torch.zeros(1 << 20)
    two_level = collectives.get("two_level")
    two_level(x, codec, transport)
    transport.sent.clear()
    with native_calls() as calls:
        two_level(x, codec, transport)
    many = world > 8 * 32
    assert calls == ["fl_encode", *["fl_recode_rows"] * (1 + many), "fl_recode", "fl_decode"]
    assert [len(sent) for sent in transport.sent] == ([7, 10, 11, 10, 10, 7] if many else [7, 7, 7, 7])
    assert python_calls(lambda: two_level(x, codec, transport)) <= 480 + 2 * world


def test_eight_bits_inside_and_the_rotation_pay() -> None:
    """SDP4Bit, section 3.2: on data with outliers TLq-HS < TLq < ULq; the rotation is worth little on a Gaussian."""
    spread = [outliers(1 << 15, rank) for rank in range(8)]
    normal = [torch.randn(1 << 15, generator=torch.Generator().manual_seed(rank)) for rank in range(8)]

    def errors(x: list[Tensor]) -> list[float]:
        exact = torch.stack(x).double().sum(0)
        return [error(sums(8, 4, codec, x)[0], exact) for codec in TWO_LEVEL]

    tlq, tlq_hs, ulq = errors(spread)
    assert 2 * tlq_hs < tlq and 1.2 * tlq < ulq
    tlq, tlq_hs, ulq = errors(normal)
    assert 0.95 < tlq_hs / tlq < 1.05 and 1.2 * tlq < ulq


def test_zero_plus_plus_rounds_to_the_nearest() -> None:
    """Its preset loses about half as much as stochastic rounding on the same two levels."""
    x = [torch.randn(1 << 15, generator=torch.Generator().manual_seed(rank)) for rank in range(8)]
    exact = torch.stack(x).double().sum(0)
    published = codecs.get(PRESETS["zero++"][1]).bare
    nearest, stochastic = (error(sums(8, 4, codec, x)[0], exact) for codec in (published, codecs.get("ulq").bare))
    assert 0.35 < nearest / stochastic < 0.6
    assert published.wire(1 << 20).capacity == codecs.get("ulq").bare.wire(1 << 20).capacity


def test_the_domain_in_which_sums_are_made_does_not_matter() -> None:
    """Messages with headers are decoded to values at every level; without, values stay rotated to the end."""
    codec, x = codecs.get("tlq_hs", rounding="nearest"), [gradient(8192, rank) for rank in range(4)]
    checked, bare = (sums(4, 2, form, x)[0] for form in (codec, codec.bare))
    assert float((checked - bare).norm() / bare.norm()) < 0.01


def sum_over_processes(rank: int, world: int) -> tuple[tuple[tuple[int, ...], ...], bool, float]:
    assert C10dTransport().nodes == (tuple(range(world)),)  # they do share a host
    transport = C10dTransport(node=f"host {rank // 2}").duplicate()
    x = given(rank, 0, 5000, torch.float32).clone()
    collectives.get("two_level")(x, codecs.get("tlq_hs").bare, transport, seed=1)
    exact = torch.stack([given(r, 0, 5000, torch.float32) for r in range(world)]).double().sum(0)
    return transport.nodes, same_everywhere(transport, x), error(x, exact)


@pytest.mark.medium
def test_over_processes() -> None:
    for nodes, same, off in run_ranks(sum_over_processes, 4):
        assert nodes == ((0, 1), (2, 3)) and same and off < 0.12


@pytest.mark.parametrize("world, per_node, count", [(4, 2, 1), (4, 2, 2), (6, 3, 7), (8, 2, 8)])
def test_hops_on_both_levels_travel_together(world: int, per_node: int, count: int) -> None:
    """Of seven pieces of a reduce-scatter all but four hops share an exchange; the sums are those of one piece."""
    codec, length = codecs.get("tlq", rounding="nearest").bare, 512
    x = [gradient(world * count * length, rank).view(world, -1) for rank in range(world)]

    def reduce(transport: Transport, piece: int | None) -> tuple[Tensor, list[set[int]]]:
        exchange, peers = transport.exchange, list[set[int]]()

        def note(messages: Mapping[int, tuple[Tensor, Tensor]]) -> None:
            peers.append({to for to, (message, _) in messages.items() if message.numel()})
            exchange(messages)

        out = torch.empty(count * length)
        transport.exchange = note  # type: ignore[method-assign,assignment]
        halves.reduce_scatter(x[transport.rank], out, codec, transport, piece=piece)
        transport.exchange = exchange  # type: ignore[method-assign]
        return out, peers

    whole = over_threads(world, lambda transport: reduce(transport, None), ranks_per_node=per_node)
    cut = over_threads(world, lambda transport: reduce(transport, length), ranks_per_node=per_node)
    for rank, ((expected, one), (got, each)) in enumerate(zip(whole, cut, strict=True)):
        assert torch.equal(got, expected) and len(one) == 2
        inside, between = one
        assert inside == set(range(rank - rank % per_node, rank - rank % per_node + per_node)) - {rank}
        streams = min(2, count)
        assert len(each) == count + streams and each.count(inside | between) == count - streams
        assert each.count(inside) == each.count(between) == streams


@pytest.mark.parametrize("name", ["two_level", "all_gather"])
def test_many_pieces_of_all_hops_give_what_one_gives(name: str) -> None:
    codec, world, numel = codecs.get("tlq_hs", rounding="nearest").bare, 6, 6 * 512 * 5 + 77
    x = [gradient(numel, rank) for rank in range(world)]

    def run(transport: Transport, piece: int | None) -> Tensor:
        mine = x[transport.rank].clone()
        if name == "two_level":
            collectives.get(name)(mine, codec, transport, piece=piece)
            return mine
        every = torch.empty(world, numel)
        halves.all_gather(mine, every, codec, transport, piece=piece)
        return every

    for piece in (512, 6 * 512):
        whole, cut = (
            over_threads(world, lambda transport, n=n: run(transport, n), ranks_per_node=3)  # type: ignore[misc]
            for n in (None, piece)
        )
        assert all(torch.equal(got, whole[0]) for got in [*whole, *cut])
