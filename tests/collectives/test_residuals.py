"""What error feedback is worth when values are not finite: it stays what it was there, and loses nothing elsewhere."""

import math

import torch
from torch import Tensor

from fusionlayer import collectives
from fusionlayer.base.errors import ConfigError
from fusionlayer.codecs import Codec
from fusionlayer.transport import Transport
from tests.codecs.variants import defaults
from tests.loops import looped
from tests.ranks import over_threads

from .conformance import given, same_everywhere, sum_over_ranks

WORLD, NUMEL, ODD = 4, 3000, 3
BROKEN = {17: math.nan, 1500: math.inf, NUMEL - 1: -math.inf}


def check(transport: Transport, name: str, codec: Codec) -> None:
    """Sum twice, the second time with values of one rank that are not finite, and look at all residuals."""
    rank, residual = transport.rank, torch.zeros(NUMEL)

    def inputs(step: int) -> Tensor:
        return given(rank, step, NUMEL, torch.float32).clone()

    collectives.get(name)(inputs(0), codec, transport, seed=0, residual=residual)
    before, kept = residual.clone(), sum_over_ranks(transport, residual)
    x = inputs(1)
    for place, value in BROKEN.items():
        x[place] = value if rank == ODD else x[place]
    collectives.get(name)(x, codec, transport, seed=1, residual=residual)
    assert same_everywhere(transport, x) and residual.isfinite().all()
    if rank == ODD:
        # What is sent by itself is gone with the value that it was added to, so nothing of it is left to send.
        for place in BROKEN:
            assert residual[place] == before[place] or (codec.ahead and residual[place] == 0), place
    whole = x.isfinite()
    assert not whole.all()
    whole[list(BROKEN)] = False
    exact = kept + sum_over_ranks(transport, inputs(1))
    lost = x.double() + sum_over_ranks(transport, residual) - exact
    assert not whole.any() or float(lost[whole].abs().max()) < 1e-5  # some scales are of a whole tensor


@looped("name", collectives.names())
def test_residuals_of_broken_groups_stay_what_they_were(name: str) -> None:
    checked = []

    def body(transport: Transport) -> None:
        for codec in defaults():
            try:
                collectives.get(name)(torch.zeros(1), codec.bare, transport)
            except ConfigError:
                continue
            check(transport, name, codec.bare)
            checked.append(codec)

    over_threads(WORLD, body, ranks_per_node=2)
    assert checked
