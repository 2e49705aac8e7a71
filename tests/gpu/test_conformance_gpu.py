"""What codecs, collectives and Horovod's face do with tensors on the CPU, they do on a GPU, over ranks in threads."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import fusionlayer.torch as hvd
from fusionlayer import collectives
from fusionlayer.codecs import Codec, TorchCodec
from fusionlayer.transport import Transport, local
from tests.codecs.conformance import CHECKS, DTYPES, Check
from tests.codecs.variants import defaults
from tests.collectives.conformance import conform, given, pairs
from tests.collectives.test_two_level import TWO_LEVEL
from tests.ranks import over_threads
from tests.torch import behaviours

ON_GPU = torch.device("cuda")
# What is made by matrix products, and by torch's sums over many values, may round otherwise.
EXACT = [codec for codec in defaults() if not isinstance(codec, TorchCodec) and codec.name != "powersgd"]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("codec", defaults(), ids=str)
@pytest.mark.parametrize("check", CHECKS.values(), ids=CHECKS)
def test_every_codec(check: Check, codec: Codec, dtype: torch.dtype, device: torch.device) -> None:
    check(codec, dtype, device)


@pytest.mark.parametrize("world", [1, 2, 5])
@pytest.mark.parametrize("name, codec", pairs(defaults()), ids=str)
def test_every_collective_with_every_codec(name: str, codec: Codec, world: int, device: torch.device) -> None:
    over_threads(world, lambda transport: conform(transport, name, codec, device))


@pytest.mark.parametrize("codec", TWO_LEVEL, ids=str)
def test_two_levels(codec: Codec, device: torch.device) -> None:
    over_threads(
        4,
        lambda transport: conform(transport, "two_level", codec, device, (1, 5000), [torch.float32, torch.bfloat16]),
        ranks_per_node=2,
    )


@pytest.mark.parametrize("name, codec", pairs(EXACT), ids=str)
def test_sums_have_the_bits_of_the_cpu(name: str, codec: Codec) -> None:
    def body(transport: Transport) -> bool:
        results = []
        for device in (torch.device("cpu"), ON_GPU):
            fresh = type(codec)(**codec.options, header=False)
            for step in range(2):
                x = given(transport.rank, step, 70_001, torch.float32).to(device, copy=True)
                collectives.get(name)(x, fresh, transport, seed=step)
            results.append(x.cpu())
        return torch.equal(*results)

    assert over_threads(3, body, timeout=60) == [True] * 3


@pytest.mark.parametrize("name", behaviours.CHECKS)
def test_horovods_behaviours(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    on_cpu = behaviours.of

    def of(rank: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        with torch.device("cpu"):
            values = on_cpu(rank, *shape, dtype=dtype)
        return values.to(ON_GPU)

    def rank_main(rank: int) -> None:
        hvd.init()
        try:
            with ON_GPU:
                behaviours.CHECKS[name](rank, hvd.size())
        finally:
            hvd.shutdown()

    monkeypatch.setattr(behaviours, "of", of)
    local.run(rank_main, 2, timeout=60)
