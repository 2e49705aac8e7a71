"""dynamiq around ring and butterfly: the same bits on all ranks, no bias, errors in the order of the paper."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import Tensor

import fusionlayer as fl
from fusionlayer import codecs, collectives
from fusionlayer.base.errors import ConfigError, TransportError
from fusionlayer.base.seeds import derive_seed
from fusionlayer.codecs import Codec
from fusionlayer.codecs.research.dynamiq import DynamiQ
from fusionlayer.collectives import butterfly, ring
from fusionlayer.collectives._hops import balanced
from fusionlayer.collectives.halves import ring_reduce_scatter
from fusionlayer.transport import Transport
from tests import samples
from tests.integrations.training import make_model, reference, train, weights
from tests.loops import looped
from tests.ranks import over_threads

from .conformance import given, same_everywhere, sum_over_ranks

pytestmark = pytest.mark.short

WAYS = {"ring": ring.schedule, "butterfly": butterfly.schedule}
WORLDS = range(1, 10)


@looped("world", WORLDS)
@looped("name", WAYS)
def test_every_partial_sum_is_encoded_once_in_the_order_that_was_agreed_on(name: str, world: int) -> None:
    """Made again message by message, with each rank's codec and the plain verbs."""
    numel = 30 * 256 + 77
    inputs = [given(rank, 0, numel, torch.float32) for rank in range(world)]
    ways = [WAYS[name](rank, world) for rank in range(world)]
    lengths = [part.stop - part.start for part in balanced(slice(0, numel), ways[0].chunks, 256)]
    chunks = balanced(slice(0, -(-numel // 256) * 256), ways[0].chunks, 256)

    def agreed(transport: Transport) -> Codec:
        return DynamiQ(header=False).agree(inputs[transport.rank], transport, seed=11, chunks=lengths)

    every = over_threads(world, agreed)
    arrangements = [codec.arrangement for codec in every]
    totals = [way.arrange(x) for way, x in zip(arrangements, inputs, strict=True) if way is not None]
    assert len(totals) == world

    def message(rank: int, i: int) -> Tensor:
        part = totals[rank][chunks[i]]
        payload = torch.empty(every[rank].wire(part.numel()).capacity, dtype=torch.uint8)
        every[rank].encode(part, payload, seed=derive_seed(11, rank), offset=chunks[i].start)
        return payload

    for here in zip(*(way.reduce for way in ways), strict=True):
        sent = [{i: message(rank, i) for i in hop.sends if lengths[i]} for rank, hop in enumerate(here)]
        for rank, hop in enumerate(here):
            for i in hop.recvs:
                if lengths[i]:
                    every[rank].decode_add(sent[hop.source][i], totals[rank][chunks[i]])
    total, expected = torch.zeros_like(totals[0]), torch.empty(numel)
    for rank, way in enumerate(ways):
        for i in way.own:
            if lengths[i]:
                every[rank].decode(message(rank, i), total[chunks[i]])
    assert arrangements[0] is not None
    arrangements[0].restore(total, expected)

    def body(transport: Transport) -> None:
        x = inputs[transport.rank].clone()
        collectives.get(name)(x, DynamiQ(header=False), transport, seed=11)
        assert torch.equal(x, expected)

    over_threads(world, body)


@looped("world", [1, 2, 3, 5, 8])
@looped("name", WAYS)
def test_bytes_sent_follow_from_the_number_of_elements(name: str, world: int) -> None:
    numel = 50 * 256
    way = WAYS[name](0, world)
    codec = DynamiQ(header=False)
    message = [
        codec.wire(part.stop - part.start).capacity for part in balanced(slice(0, numel), way.chunks, codec.block)
    ]
    stats = 2 * (world - 1) * 4 * 50 // world

    def body(transport: Transport) -> int:
        x = given(transport.rank, 3, numel, torch.float32) * 10.0 ** (torch.arange(numel) // 4000)
        collectives.get(name)(x, codec, transport)
        assert same_everywhere(transport, x)
        return transport.bytes_sent - transport.size * 32

    sent = over_threads(world, body)
    if name == "ring":
        whole = 2 * sum(message)
        expected = [whole - message[rank] - message[(rank + 1) % world] + stats for rank in range(world)]
        assert all(abs(a - b) <= 64 for a, b in zip(sent, expected, strict=True))


@looped("world", [1, 3, 4])
@looped("name", WAYS)
def test_pieces_and_feedback_lose_nothing(name: str, world: int) -> None:
    numel = 10_000
    reduce = {"ring": ring.ring, "butterfly": butterfly.butterfly}[name]
    exact = torch.stack([given(rank, 9, numel, torch.float32).double() for rank in range(world)]).sum(0)

    def body(transport: Transport) -> None:
        x = given(transport.rank, 9, numel, torch.float32).clone()
        for piece in (None, 700, 3000, 8000):
            out, residual = torch.empty_like(x), torch.zeros(numel)
            reduce(x, codecs.get("dynamiq").bare, transport, seed=3, residual=residual, out=out, piece=piece)
            assert torch.equal(x, given(transport.rank, 9, numel, torch.float32)), "with `out` the input stays"
            assert same_everywhere(transport, out)
            assert float((out.double() + sum_over_ranks(transport, residual) - exact).abs().max()) < 1e-5
            assert 0 < float((out.double() - exact).norm()) < 0.2 * float(exact.norm())

    over_threads(world, body)


@cache
def inputs(world: int) -> list[Tensor]:
    return samples.skewed(world, 1 << 16)


def error(name: str, world: int = 8, algorithm: str = "ring", **options: object) -> float:
    return samples.sum_error(algorithm, codecs.get(name, **options), inputs(8)[:world])


def test_errors_are_in_order_where_energy_is_uneven() -> None:
    by_bits = [error("dynamiq", bits=bits) for bits in (6, 5, 4, 3)]
    assert all(1.4 * less < more for less, more in zip(by_bits, by_bits[1:], strict=False)), by_bits
    others = [error("dynamiq"), error("mxfp8"), error("mxfp6", format="e3m2"), error("mxfp4")]
    assert all(1.5 * less < more for less, more in zip(others, others[1:], strict=False)), others
    for world in (4, 8):
        assert 1.1 * error("dynamiq", world, "butterfly") < error("dynamiq", world, "ring")


def test_each_ingredient_lowers_the_error() -> None:
    """Table 6: even levels; uneven ones; bits by energy; scales of scales; anticorrelated rounding."""
    ladder = ("nonuniform", "variable", "hierarchical", "correlated")
    errors = [error("dynamiq", bits=4, **dict.fromkeys(ladder[rung:], False)) for rung in range(5)]
    assert all(1.1 * less < more for more, less in zip(errors, errors[1:], strict=False)), errors


def test_it_is_worse_than_mx_where_energy_is_even() -> None:
    even = samples.gaussian(4, 1 << 15)
    dynamiq, mxfp8 = (samples.sum_error("ring", codecs.get(name), even) for name in ("dynamiq", "mxfp8"))
    assert dynamiq > 3 * mxfp8


@looped("algorithm", WAYS)
def test_the_mean_of_many_sums_is_the_sum(algorithm: str) -> None:
    """Exactly so where ranks round independently.

    Where they do not, a partial sum depends on how the ranks before rounded, and so does where the next one rounds:
    sums of the same values again and again keep a small part of the error of one.
    """
    assert mean_error(algorithm, correlated=False) < 1.3
    assert mean_error(algorithm, correlated=True) < 20


def mean_error(algorithm: str, *, correlated: bool, world: int = 4, draws: int = 200) -> float:
    """Return the squared error of the mean of many sums, relative to what independent errors would leave of it."""
    parts = [x[: 1 << 12] for x in inputs(8)[:world]]
    exact = torch.stack(parts).double().sum(0)
    codec = codecs.get("dynamiq", correlated=correlated).bare

    def body(transport: Transport) -> tuple[Tensor, float]:
        total, single = torch.zeros_like(exact), 0.0
        for draw in range(draws):
            x = parts[transport.rank].clone()
            collectives.get(algorithm)(x, codec, transport, seed=derive_seed(draw))
            total += x
            single += float((x - exact).square().sum()) / draws
        return total / draws, single

    mean, single = over_threads(world, body)[0]
    return float((mean - exact).square().sum()) / (single / draws)


# ---- its first phase alone ------------------------------------------------------------------------------------------


@looped("world", [1, 2, 3, 5])
@looped("codec", ["dynamiq", "int8", "mxfp8", "raw"])
def test_the_first_phase_leaves_each_rank_its_row(codec: str, world: int) -> None:
    numel = 1000
    rows = [given(rank, 5, world * numel, torch.float32).view(world, numel) + 0.25 for rank in range(world)]
    exact = torch.stack(rows).double().sum(0)

    def body(transport: Transport) -> int:
        out = torch.empty(numel)
        ring_reduce_scatter(rows[transport.rank], out, codecs.get(codec).bare, transport, seed=2)
        lost = (out - exact[transport.rank]).norm() / exact[transport.rank].norm()
        assert lost < (1e-6 if codec == "raw" or world == 1 else 0.1)
        return transport.bytes_sent

    message = codecs.get(codec).bare.wire(-(-numel // 256) * 256).capacity
    if codec == "mxfp8":
        message = codecs.get(codec).bare.wire(1024).capacity
    sent = over_threads(world, body)
    assert codec in ("raw", "int8", "mxfp8") or max(sent) <= (world - 1) * (message + 8 * 4 * world)


def test_reduce_scatter_takes_the_ring() -> None:
    def body(transport: Transport) -> None:
        x = given(transport.rank, 6, 4 * 700, torch.float32).view(4 * 7, 100)
        exact = sum(given(rank, 6, 4 * 700, torch.float32).double() for rank in range(4)) / 4
        out = fl.reduce_scatter(x, "dynamiq", group=transport, algorithm="ring", bits=6)
        mine = exact.view(4, 7, 100)[transport.rank]
        assert out.shape == (7, 100) and (out - mine).norm() < 0.15 * mine.norm()
        with pytest.raises(ConfigError, match="expected None or 'ring'"):
            fl.reduce_scatter(x, "dynamiq", group=transport, algorithm="butterfly")
        with pytest.raises(ConfigError, match="encodes partial sums anew"):
            fl.reduce_scatter(x, "topk", group=transport, algorithm="ring")

    over_threads(4, body)


# ---- in training ----------------------------------------------------------------------------------------------------


@looped("algorithm", WAYS)
def test_an_optimizer_takes_it_by_name(algorithm: str) -> None:
    def body(transport: Transport) -> Tensor:
        model = make_model()
        sgd = torch.optim.SGD(model.parameters(), lr=0.05)
        optimizer = fl.DistributedOptimizer(
            sgd, model.named_parameters(), codec="dynamiq", bits=5, algorithm=algorithm, group=transport
        )
        train(model, optimizer, transport.rank, range(4))
        optimizer.close()  # type: ignore[attr-defined]
        return weights(model)

    first, *others = over_threads(4, body)
    exact = reference(4, 4, lambda parameters: torch.optim.SGD(parameters, lr=0.05))
    assert all(torch.equal(first, other) for other in others)
    moved = exact - weights(make_model())
    assert 0 < float((first - exact).norm()) < 0.15 * float(moved.norm())


def test_a_tensor_takes_it_by_name() -> None:
    def body(transport: Transport) -> None:
        x = given(transport.rank, 8, 3000, torch.float32).view(3, 1000).clone()
        exact = sum(given(rank, 8, 3000, torch.float32).double() for rank in range(3)) / 3
        fl.all_reduce(x, codec="dynamiq", algorithm="butterfly", group=transport, bits=6)
        assert float((x.view(-1) - exact).norm()) < 0.15 * float(exact.norm())
        assert same_everywhere(transport, x)

    over_threads(3, body)


# ---- who is lost ----------------------------------------------------------------------------------------------------


@looped("exchange", [0, 2])
@looped("name", WAYS)
def test_a_rank_that_is_lost_on_the_way_is_named_on_all_others(name: str, exchange: int) -> None:
    def body(transport: Transport) -> None:
        calls, real = [0], transport.exchange

        def leaving(sends: list[Tensor], recvs: list[Tensor]) -> None:
            if transport.rank == 2 and calls[0] == exchange:
                transport.close()
            calls[0] += 1
            real(sends, recvs)

        transport.exchange = leaving  # type: ignore[method-assign, assignment]
        with pytest.raises(TransportError) as raised:
            collectives.get(name)(torch.ones(5000), codecs.get("dynamiq").bare, transport)
            transport.barrier()
        assert transport.rank == 2 or 2 in raised.value.ranks

    over_threads(4, body)
