"""Sums by codecs that round at random are unbiased; ``tests/test_seeds.py`` shows that no two roundings are alike."""

from functools import partial

import torch
from torch import Tensor

from fusionlayer import collectives
from fusionlayer.codecs import Codec
from fusionlayer.transport import Transport
from tests.codecs.variants import defaults, is_kind
from tests.loops import looped
from tests.ranks import over_threads
from tests.synthetic import gradient

from .conformance import takes

WORLD, PER_NODE = 4, 2
UNBIASED = [codec.bare for codec in defaults() if is_kind(codec) and codec.unbiased and not codec.lossless]


def squared(x: Tensor) -> float:
    return float(x.double().square().sum())


@looped("codec", UNBIASED, ids=str)
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

    # Where ranks round by each other's numbers, partial sums and what rounds them are not independent.
    hops = [] if codec.options.get("correlated") else ["ring", "butterfly"]
    for name in filter(lambda name: takes(name, codec), ("one_shot", "two_shot", "two_level", "integer_sum", *hops)):
        for mean, single in over_threads(WORLD, partial(body, name=name), ranks_per_node=PER_NODE):
            assert 0 < mean < 1.3 * single / draws, name
