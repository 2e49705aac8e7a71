"""What codecs, collectives and Horovod's face do with tensors on the CPU, they do on a GPU, over ranks in threads."""

from itertools import product

import pytest
import torch

import fusionlayer.torch as hvd
from fusionlayer import collectives
from fusionlayer.codecs import Codec, TorchCodec
from fusionlayer.transport import Transport, local
from tests.codecs.conformance import CHECKS, DTYPES, Check
from tests.codecs.variants import defaults, is_kind
from tests.collectives.conformance import conform, given, pairs
from tests.collectives.test_two_level import TWO_LEVEL
from tests.gpu.place import GPU, TensorsOn
from tests.ranks import over_threads
from tests.tiers import tiered
from tests.torch import behaviours

# What is made by matrix products, and by torch's sums over many values, may round otherwise.
EXACT = [codec for codec in defaults() if not isinstance(codec, TorchCodec) and codec.name != "powersgd"]


def is_first(check: Check, codec: Codec, dtype: torch.dtype) -> bool:
    """Tell whether a case is one of a codec of each kind; the kernels of the others have their bytes compared."""
    return is_kind(codec) and dtype is torch.float32


@pytest.mark.parametrize(
    "check, codec, dtype",
    tiered(product(CHECKS.values(), defaults(), DTYPES), is_first),
    ids=lambda value: getattr(value, "__name__", None) or str(value),
)
def test_every_codec(check: Check, codec: Codec, dtype: torch.dtype, device: torch.device) -> None:
    check(codec, dtype, device)


@pytest.mark.parametrize(
    "world, name, codec",
    tiered(
        ((world, *pair) for pair in pairs(defaults()) for world in (1, 2, 5)),
        lambda world, name, codec: world == 2 and is_kind(codec),
    ),
    ids=str,
)
def test_every_collective_with_every_codec(world: int, name: str, codec: Codec, device: torch.device) -> None:
    over_threads(world, lambda transport: conform(transport, name, codec, device))


@pytest.mark.parametrize("codec", TWO_LEVEL, ids=str)
def test_two_levels(codec: Codec, device: torch.device) -> None:
    over_threads(
        4,
        lambda transport: conform(transport, "two_level", codec, device, (1, 5000), [torch.float32, torch.bfloat16]),
        ranks_per_node=2,
    )


@pytest.mark.parametrize("name, codec", tiered(pairs(EXACT), lambda name, codec: is_kind(codec)), ids=str)
def test_sums_have_the_bits_of_the_cpu(name: str, codec: Codec) -> None:
    def body(transport: Transport) -> bool:
        results = []
        for device in (torch.device("cpu"), GPU):
            fresh = type(codec)(**codec.options, header=False)
            for step in range(2):
                x = given(transport.rank, step, 70_001, torch.float32).to(device, copy=True)
                collectives.get(name)(x, fresh, transport, seed=step)
            results.append(x.cpu())
        return torch.equal(*results)

    assert over_threads(3, body, timeout=60) == [True] * 3


@pytest.mark.parametrize("name", behaviours.CHECKS)
def test_horovods_behaviours(name: str) -> None:
    def rank_main(rank: int) -> None:
        hvd.init()
        try:
            with TensorsOn(GPU):
                behaviours.CHECKS[name](rank, hvd.size())
        finally:
            hvd.shutdown()

    local.run(rank_main, 2, timeout=60)
