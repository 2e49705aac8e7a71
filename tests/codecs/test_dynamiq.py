"""What is particular to dynamiq: bits by energy, messages of one size, rounding that is anticorrelated over ranks."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from fusionlayer import collectives
from fusionlayer.base.seeds import derive_seed
from fusionlayer.codecs.arrangement import Arrangement
from fusionlayer.codecs.research._widths import allocate, deal, pack_widths
from fusionlayer.codecs.research.dynamiq import DynamiQ
from fusionlayer.native import dynamiq_stats, dynamiq_widths
from fusionlayer.transport import Transport
from tests.loops import looped
from tests.ranks import on_threads, over_threads
from tests.synthetic import gradient

OCTAVES = 2.0 ** -torch.arange(32)


def counts(bits: Tensor) -> tuple[int, int, int]:
    return tuple(int((bits == width).sum()) for width in (8, 4, 2))  # type: ignore[return-value]


# ---- bits by energy -------------------------------------------------------------------------------------------------


@looped("mean, known", [(2.5, (1, 5, 26)), (3, (4, 4, 24)), (4, (9, 5, 18)), (5, (14, 5, 13))])
def test_energies_of_32_octaves_get_the_known_bits(mean: float, known: tuple[int, int, int]) -> None:
    """Derived from T(2, 4) = 17 / 512 T(4, 8) and the budget alone; the band of 4 bits spans 4.91 octaves."""
    bits = allocate(OCTAVES, [32], [int(32 * mean / 2)])
    assert counts(bits) == known
    assert (bits.diff().to(torch.int8) <= 0).all(), "more energy, no fewer bits"
    order = torch.randperm(32, generator=torch.Generator().manual_seed(1))
    assert torch.equal(allocate(OCTAVES[order], [32], [int(32 * mean / 2)]), bits[order])


@looped("chunks", [[100], [25] * 4, [13] * 7 + [9], [34, 33, 33, 0], [60, 20, 20]])
@looped("kind", ["spread", "equal", "few"])
def test_every_message_has_room_and_little_is_left(kind: str, chunks: Sequence[int]) -> None:
    energy = (gradient(100, 1).abs() * 40).exp()
    energy = {"spread": energy, "equal": torch.ones(100), "few": torch.where(energy > 10, energy, 1.0)}[kind]
    rooms = [n * 141 // 64 + 1 for n in chunks]
    bits = allocate(energy, chunks, rooms)
    taken = [int(part.sum(dtype=torch.int64)) // 2 for part in bits[deal(bits, chunks)].split(list(chunks))]
    assert all(used <= room for used, room in zip(taken, rooms, strict=True))
    assert any(room - used <= 2 for used, room in zip(taken, rooms, strict=True) if room), "one more step does not fit"
    assert sum(rooms) - sum(taken) <= 3 * len(chunks)


def test_bits_of_energies_that_say_nothing() -> None:
    assert counts(allocate(torch.zeros(10), [10], [40])) == (0, 0, 10), "what is zero needs no bits"
    bits = allocate(torch.tensor([1.0, float("nan"), float("inf"), 1.0]), [4], [10])
    assert bits.tolist() == [2, 8, 8, 2]
    assert allocate(torch.ones(4), [4], [4]).tolist() == [2] * 4
    assert allocate(torch.ones(4), [4], [7]).tolist() == [4, 4, 4, 2], "of equal ones the first get more"


def test_super_groups_are_dealt_by_bits_and_stay_in_order() -> None:
    bits = torch.tensor([2, 8, 4, 8, 2, 4, 2, 8], dtype=torch.uint8)
    order = deal(bits, [4, 4])
    assert sorted(order.tolist()) == list(range(8))
    assert order.tolist() == [1, 7, 5, 4, 3, 2, 0, 6]
    assert deal(bits, [8]).tolist() == [1, 3, 7, 2, 5, 0, 4, 6]
    assert deal(bits[:0], [0, 0]).tolist() == []


def test_widths_are_packed_alike_on_every_device() -> None:
    for n in (0, 1, 63, 64, 65, 200):
        bits = 2 ** (1 + torch.randint(3, (n,), generator=torch.Generator().manual_seed(n)))
        plane = torch.zeros(24 * -(-n // 64), dtype=torch.uint8)
        dynamiq_widths(bits.to(torch.uint8), plane)
        assert torch.equal(pack_widths(bits.to(torch.uint8)), plane)


# ---- messages -------------------------------------------------------------------------------------------------------


def test_values_have_their_expectation_at_every_width() -> None:
    """The bits of groups' scales, of signs and of levels, each of them drawn."""
    x = gradient(3 * 256, 5)
    bits = torch.tensor([8, 4, 2], dtype=torch.uint8)
    codec = DynamiQ(5, given=bits, header=False)
    draws = torch.stack([codec.decompress(codec.compress(x, seed), x.shape) for seed in range(400)]).double()
    for part in range(3):
        where = slice(256 * part, 256 * part + 256)
        single = (draws[:, where] - x[where]).square().sum(1).mean()
        assert (draws[:, where].mean(0) - x[where]).square().sum() < 1.3 * single / 400
        assert single > 0


@looped(
    "options", [{}, {"nonuniform": False}, {"epsilon4": 0.33, "epsilon8": 0.05}, {"epsilon4": 0.05, "epsilon8": 0.02}]
)
def test_values_become_neighbouring_levels_of_the_paper_without_bias(options: dict[str, float]) -> None:
    """f(r) = ((1 + 2 e^2)^r - 1) / ((1 + 2 e^2)^top - 1) in units of the scale, which is 1."""
    rows = torch.cat([torch.ones(8, 1), torch.linspace(0, 1, 8 * 31).view(8, 31)], 1)
    x = (rows * (-1.0) ** torch.arange(32)).view(-1)
    for bits in (2, 4, 8):
        given = torch.tensor([bits], dtype=torch.uint8)
        codec = DynamiQ(8, hierarchical=False, given=given, header=False, **options)  # type: ignore[arg-type]
        epsilon = {4: codec.epsilon4, 8: codec.epsilon8}.get(bits, 0.0) if codec.nonuniform else 0.0
        numbers, top, ratio = torch.arange(2 ** (bits - 1)).double(), 2 ** (bits - 1) - 1, 1 + 2 * epsilon**2
        levels = (ratio**numbers - 1) / (ratio**top - 1) if epsilon else numbers / top
        draws = torch.stack([codec.decompress(codec.compress(x, seed), 256) for seed in range(400)]).double()
        above = torch.searchsorted(levels, x.abs().double()).clamp(min=1)
        low, step = levels[above - 1], levels.diff()[above - 1]
        part = (draws.abs() - low) / step
        assert (torch.minimum(part.abs(), (part - 1).abs()) < 1e-3).all(), "values are off the levels beside them"
        off = (draws.mean(0) - x) * x.sign() / step
        assert off.abs().max() < 5 / 2 / 20 and off.mean().abs() < 5 / 2 / (400 * 256) ** 0.5


# ---- what ranks agree on --------------------------------------------------------------------------------------------


@on_threads(4)
def test_constants_and_equal_values_need_no_bits(transport: Transport) -> None:
    """What is common to all values of a super-group travels as its mean."""
    x = (2.0 ** -torch.arange(40).remainder(9)).repeat_interleave(256)
    given = x.clone()
    collectives.get("ring")(x, DynamiQ(header=False), transport, seed=1)
    assert torch.equal(x, 4 * given)


def test_the_same_bits_order_and_means_everywhere_and_messages_that_are_full() -> None:
    def body(transport: Transport) -> tuple[list[int], list[int], list[float]]:
        x = gradient(40 * 256 + 31, transport.rank) * torch.linspace(1, 30, 40 * 256 + 31)
        chunks = [14 * 256, 14 * 256, 12 * 256 + 31]
        agreed = DynamiQ().agree(x, transport, seed=7, chunks=chunks)
        assert isinstance(agreed, DynamiQ) and agreed == DynamiQ() and agreed.given is not None
        way = agreed.arrangement
        assert way is not None and way.order is not None and way.means is not None
        for n, part in zip((14, 14, 13), agreed.given.split([14, 14, 13]), strict=True):
            room = agreed._lines(n)
            assert room - 3 <= int(part.sum(dtype=torch.int64)) // 2 <= room
            assert (part.diff().to(torch.int8) <= 0).all(), "8 bits, then 4, then 2"
        assert DynamiQ().agree(x, transport, seed=7) == DynamiQ()
        assert DynamiQ().agree(x[:0], transport, chunks=[0, 0, 0]).arrangement is None
        return agreed.given.tolist(), way.order.tolist(), way.means.tolist()

    first, *others = over_threads(3, body)
    assert all(other == first for other in others)


@on_threads(2)
def test_each_chunk_may_keep_its_own(transport: Transport) -> None:
    x = torch.cat([gradient(20 * 256, 1), 1000 * gradient(20 * 256, 2)])
    agreed = DynamiQ().agree(x, transport, chunks=[20 * 256] * 2, movable=False)
    assert isinstance(agreed, DynamiQ) and agreed.given is not None
    assert agreed.arrangement is not None and agreed.arrangement.order is None
    assert agreed.given[:20].sum() == agreed.given[20:].sum(), "small ones get their budget too"


def test_arrangements_come_back() -> None:
    x = gradient(5 * 256 + 9, 1)
    order, means = torch.tensor([3, 5, 0, 1, 4, 2]), dynamiq_stats(x)[0]
    for way in (Arrangement(x.numel(), 256, order, means, 3), Arrangement(x.numel(), 256, None, means, 3)):
        arranged = way.arrange(x)
        assert arranged.numel() == 6 * 256 and float(arranged.view(6, 256).mean(1).abs().max()) < 1e-6
        padding = arranged.view(6, 256)[1 if way.order is not None else 5, 9:]
        assert not padding.any()
        out = torch.empty_like(x)
        way.restore(3 * arranged, out)
        assert float((out - 3 * x).abs().max()) < 1e-6
        way.restore(way.arrange(x, centred=False), out, centred=False)
        assert torch.equal(out, x)


@looped("ranks", [2, 4, 8])
def test_the_variance_of_a_sum_of_equal_values_falls_with_the_number_of_ranks(ranks: int) -> None:
    """One rank in each of as many intervals: 1 / ranks of what independent rounding has (section 3.3)."""
    x = gradient(64 * 256, 9)
    bits = torch.full((64,), 4, dtype=torch.uint8)

    def variance(correlated: bool) -> float:
        # Flat scales: the rounding of levels alone.
        total = torch.zeros_like(x)
        for rank in range(ranks):
            place = (rank, ranks) if correlated else (0, 1)
            codec = DynamiQ(hierarchical=False, given=bits, shared=5, place=place, header=False)
            total += codec.decompress(codec.compress(x, derive_seed(3, rank)), x.shape)
        return float((total - ranks * x).square().sum())

    assert variance(True) == pytest.approx(variance(False) / ranks, rel=0.25)
