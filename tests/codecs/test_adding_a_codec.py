"""A codec is one class: what it takes to add one, and that everything else follows."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from fusionlayer import codecs, collectives
from fusionlayer.base.errors import ConfigError
from fusionlayer.base.plan import TensorInfo
from fusionlayer.codecs import Codec, TorchCodec
from fusionlayer.codecs.base import registry
from fusionlayer.native.wire import Plane
from fusionlayer.scheduler import Engine, planners
from fusionlayer.transport import Transport
from tests.collectives.conformance import conform, pairs
from tests.loops import looped
from tests.ranks import over_threads
from tests.synthetic import gradient

from .conformance import CHECKS, DTYPES, Check
from .variants import defaults, variants


@pytest.fixture(scope="module")
def toy() -> Iterator[Codec]:
    @dataclass(frozen=True)
    class Toy(TorchCodec, name="toy"):
        """Values as 8-bit floats with 5 bits of exponent, flushed to zero below a threshold if asked."""

        sparse: bool = False

        def _planes(self, numel: int, dtype: torch.dtype) -> Sequence[Plane]:
            return [Plane("values", numel, torch.float8_e5m2)]

        def _encode(self, x: Tensor, planes: Sequence[Tensor], seed: int, offset: int) -> None:
            planes[0].copy_(torch.where(x.abs() < 2.0**-12, torch.zeros_like(x), x) if self.sparse else x)

        def _decode(self, planes: Sequence[Tensor], out: Tensor, dtype: torch.dtype) -> None:
            out.copy_(planes[0])

    yield codecs.get("toy")
    registry.remove("toy")
    assert "toy" not in codecs.names()


def test_its_name_and_options_are_known(toy: Codec) -> None:
    assert "toy" in codecs.names() and toy in defaults()
    assert str(toy) == "toy(sparse=False)"
    assert variants("toy") == [toy, codecs.get("toy", sparse=True)]
    with pytest.raises(ConfigError, match="unknown codec 'tooy'; did you mean 'toy'"):
        codecs.get("tooy")


@looped("dtype", DTYPES)
@looped("check", CHECKS.values())
def test_it_is_held_to_the_same_demands(toy: Codec, check: Check, dtype: torch.dtype, device: torch.device) -> None:
    for codec in variants("toy"):
        check(codec, dtype, device)


@looped("world", (1, 3, 4))
def test_every_collective_carries_it(toy: Codec, world: int, device: torch.device) -> None:
    usable = pairs([toy])
    assert {"one_shot", "two_shot"} <= {name for name, _ in usable} < set(collectives.names())
    for name, codec in usable:
        over_threads(world, lambda transport, n=name, c=codec: conform(transport, n, c, device, [0, 1, 129, 1000]))


def test_the_engine_runs_it(toy: Codec) -> None:
    tensors = [TensorInfo(name, 300, "float32", 4) for name in "ab"]

    def body(transport: Transport) -> None:
        engine = Engine(tensors, transport, codec=toy, planner=planners.get("wfbp"), device=torch.device("cpu"))
        gradients = {tensor.name: gradient(300, transport.rank) for tensor in tensors}
        for name, value in gradients.items():
            engine.submit(name, value)
        engine.synchronize()
        exact = gradient(300, 0) + gradient(300, 1)
        assert all((value - exact).norm() < 0.2 * exact.norm() for value in gradients.values())
        assert set(engine.memory.state_dict()["residuals"]) == set("ab")

    over_threads(2, body)


def test_a_taken_name_is_refused(toy: Codec) -> None:
    with pytest.raises(ConfigError, match="codec name 'toy' is taken"):
        type("Other", (type(toy),), {}, name="toy")
    with pytest.raises(ConfigError, match="codec name 'raw' is taken"):
        registry.add_preset("raw", "toy")
