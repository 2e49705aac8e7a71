"""Noise of stochastic rounding is drawn anew by every rank, for every chunk and in every rounding."""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import count

import torch
from torch import Tensor

from fusionlayer import codecs, collectives
from fusionlayer.codecs import Codec, TwoLevelCodec
from fusionlayer.collectives import halves
from fusionlayer.collectives.two_level import two_level
from fusionlayer.collectives.two_shot import two_shot
from fusionlayer.transport import Transport
from tests.codecs.variants import defaults, is_kind
from tests.loops import looped
from tests.ranks import over_threads
from tests.synthetic import gradient

from .conformance import takes

WORLD, PER_NODE = 4, 2
NUMEL = WORLD * 8192

NOISY = [
    codec.bare
    for codec in dict.fromkeys(
        [
            *defaults(),
            codecs.get("int4", rounding="stochastic"),
            codecs.get("qsdp", group_size=32),
            codecs.get("dynamiq", correlated=False),
        ]
    )
    # A group of qsdp has one random number, so only small groups are many.
    if codec.unbiased and not codec.lossless and codec.options.get("group_size") != 1024
]


def names_for(codec: Codec) -> list[str]:
    # Where ranks round by each other's numbers, partial sums and what rounds them are not independent.
    hops = [] if codec.options.get("correlated") else ["ring", "butterfly"]
    return [name for name in ("one_shot", "two_shot", "two_level", *hops) if takes(name, codec)]


def summed(name: str, codec: Codec, inputs: list[Tensor], seed: int = 5) -> Tensor:
    """Return the sum of the ranks' inputs, on two nodes of two ranks."""

    def body(transport: Transport) -> Tensor:
        out = inputs[transport.rank].clone()
        collectives.get(name)(out, codec, transport, seed=seed)
        return out

    return over_threads(WORLD, body, ranks_per_node=PER_NODE)[0]


def with_new_noise(name: str, codec: Codec, inputs: list[Tensor], seeds: Iterator[int]) -> Tensor:
    """Return what the collective makes of inputs where no two roundings have a seed in common."""

    def sent(values: Tensor, codec: Codec = codec) -> Tensor:
        return codec.decompress(codec.compress(values, seed=next(seeds)), values.shape)

    a, b, c, d = inputs
    if name == "one_shot":
        return sent(a) + sent(b) + sent(c) + sent(d)
    if name == "two_shot":
        return sent(sent(a) + sent(b) + sent(c) + sent(d))
    if name == "ring":
        return sent(sent(sent(sent(a) + b) + c) + d)
    if name == "butterfly":
        return sent(sent(sent(a) + b) + (sent(c) + d))
    within = codec.within if isinstance(codec, TwoLevelCodec) else codec
    nodes = [sent(sent(x, within) + sent(y, within)) for x, y in ((a, b), (c, d))]
    return sent(nodes[0] + nodes[1])


def squared(x: Tensor) -> float:
    return float(x.double().square().sum())


@looped("alike", [True, False], ids=["equal inputs", "different inputs"])
@looped("codec", NOISY, ids=str)
def test_ranks_and_roundings_draw_noise_of_their_own(codec: Codec, alike: bool) -> None:
    """Errors are as large as with independent noise; noise that two of them share makes them larger."""
    inputs = [gradient(NUMEL, 70 + (0 if alike else rank)) for rank in range(WORLD)]
    exact = torch.stack(inputs).double().sum(0)
    for name in names_for(codec):
        seeds = count(1000)
        expected = sum(squared(with_new_noise(name, codec, inputs, seeds) - exact) for _ in range(2)) / 2
        assert squared(summed(name, codec, inputs) - exact) < 1.12 * expected, name


@looped("codec", NOISY, ids=str)
def test_chunks_draw_noise_of_their_own(codec: Codec) -> None:
    """Errors of chunks with the same values have nothing to do with each other."""
    x = gradient(NUMEL // WORLD, 71).repeat(WORLD)
    nothing = torch.zeros_like(x)
    for name in names_for(codec):
        for inputs in ([x] * WORLD, [x, nothing, nothing, nothing], [nothing, nothing, nothing, x]):
            off = (summed(name, codec, inputs) - torch.stack(inputs).sum(0)).view(2 * WORLD, -1)
            alike = torch.corrcoef(off.double()) - torch.eye(2 * WORLD)
            halves = torch.arange(2 * WORLD) % 2
            assert float(alike[halves[:, None] == halves].abs().max()) < 0.4, name


@looped("reduce, world", [(two_shot, 2), (two_level, WORLD)], ids=["two_shot", "two_level"])
def test_pieces_draw_noise_of_their_own(reduce: Callable[..., None], world: int) -> None:
    """With ``piece=`` every rounding of a piece has noise of its own; some inputs make the first rounding exact."""
    codec = codecs.get("int", bits=4, rounding="stochastic", group_size=32, hadamard=False).bare
    pieces, size = 4, 4096
    for numbers in (torch.arange(size) % 15 - 7.0, gradient(size, 72)):
        x = torch.stack([numbers.roll(5 * rank) * 0.9**rank for rank in range(world)]).repeat(1, pieces)

        def body(transport: Transport, x: Tensor = x) -> Tensor:
            out = x[transport.rank].clone()
            reduce(out, codec, transport, seed=5, piece=size)
            return out

        off = (over_threads(world, body, ranks_per_node=PER_NODE)[0] - x.sum(0)).view(pieces, size).double()
        assert all(row.count_nonzero() > size / 2 for row in off)
        alike = torch.corrcoef(off) - torch.eye(pieces)
        assert float(alike.abs().max()) < 0.2


@looped("per_node", [WORLD, PER_NODE])
def test_rows_and_pieces_of_halves_draw_noise_of_their_own(per_node: int) -> None:
    """Of equal values no two messages lose the same; a sum loses what independent noise would."""
    codec = codecs.get("int", bits=4, rounding="stochastic", group_size=32, hadamard=False).bare
    x = gradient(2048, 73).repeat(3)[:-7]  # the last piece is ragged

    def body(transport: Transport) -> tuple[Tensor, Tensor]:
        every, total = x.new_empty(WORLD, x.numel()), torch.empty_like(x)
        halves.all_gather(x, every, codec, transport, seed=5, piece=2048)
        halves.reduce_scatter(x.repeat(WORLD, 1), total, codec, transport, seed=5, piece=2048)
        return every - x, total - WORLD * x

    found = over_threads(WORLD, body, ranks_per_node=per_node)
    gathered, summed_up = found[0][0], torch.stack([total for _, total in found])
    for errors in (gathered, summed_up):
        alike = torch.corrcoef(errors[:, :4096].reshape(2 * WORLD, -1).double()) - torch.eye(2 * WORLD)
        assert float(alike.abs().max()) < 0.2
    again = 0 if per_node == WORLD else 4 * WORLD // per_node  # sums of two are rounded in steps twice as long
    assert squared(summed_up) < 1.2 * (WORLD + again) * squared(gathered)


@looped("codec", [codec for codec in NOISY if is_kind(codec)], ids=str)
def test_sums_stay_unbiased(codec: Codec) -> None:
    """The mean over seeds comes closer to the sum as it must, with all roundings, those of two nodes too."""
    draws, inputs = 60, [gradient(4096, 80 + rank) for rank in range(WORLD)]
    exact = torch.stack(inputs).double().sum(0)

    def body(transport: Transport, name: str) -> tuple[float, float]:
        total, single = torch.zeros_like(exact), 0.0
        for seed in range(draws):
            x = inputs[transport.rank].clone()
            collectives.get(name)(x, codec, transport, seed=seed)
            single += squared(x - exact) / draws
            total += x
        return squared(total / draws - exact), single

    for name in {*names_for(codec), *(["integer_sum"] if takes("integer_sum", codec) else [])}:
        for mean, single in over_threads(WORLD, partial(body, name=name), ranks_per_node=PER_NODE):
            assert 0 < mean < 1.3 * single / draws, name
