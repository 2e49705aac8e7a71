"""dynamiq around ring and butterfly: the same bits on all ranks, no bias, errors in the order of the paper."""

from functools import cache

import pytest
import torch
from torch import Tensor

import fusionlayer as fl
from fusionlayer import codecs, collectives
from fusionlayer.base.errors import ConfigError
from fusionlayer.base.seeds import derive_seed
from fusionlayer.collectives import butterfly, ring
from fusionlayer.collectives.halves import ring_reduce_scatter
from fusionlayer.transport import Transport
from tests import samples
from tests.loops import looped
from tests.ranks import on_threads, over_threads

from .conformance import given, same_everywhere

WAYS = {"ring": ring.schedule, "butterfly": butterfly.schedule}


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


@looped("algorithm", WAYS)
def test_the_mean_of_many_sums_is_the_sum(algorithm: str) -> None:
    """Exactly so where ranks round independently."""
    assert mean_error(algorithm, correlated=False) < 1.3
    assert mean_error(algorithm, correlated=True) < 20


def mean_error(algorithm: str, *, correlated: bool, world: int = 4, draws: int = 60) -> float:
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


@on_threads(4)
def test_calls_take_it_by_name(transport: Transport) -> None:
    x = given(transport.rank, 6, 4 * 700, torch.float32).view(4 * 7, 100)
    exact = sum(given(rank, 6, 4 * 700, torch.float32).double() for rank in range(4)) / 4
    out = fl.reduce_scatter(x, "dynamiq", group=transport, algorithm="ring", bits=6)
    mine = exact.view(4, 7, 100)[transport.rank]
    assert out.shape == (7, 100) and (out - mine).norm() < 0.15 * mine.norm()
    with pytest.raises(ConfigError, match="expected None or 'ring'"):
        fl.reduce_scatter(x, "dynamiq", group=transport, algorithm="butterfly")
    with pytest.raises(ConfigError, match="encodes partial sums anew"):
        fl.reduce_scatter(x, "topk", group=transport, algorithm="ring")
    total = fl.all_reduce(x.clone(), codec="dynamiq", algorithm="butterfly", group=transport, bits=6)
    assert float((total.view(-1) - exact).norm()) < 0.15 * float(exact.norm()) and same_everywhere(transport, total)
