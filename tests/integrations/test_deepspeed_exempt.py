"""ZeRO-3's buffers of gradients in which one parameter is exempt and its neighbours are not."""

from __future__ import annotations

from typing import Any

import pytest

import fusionlayer as fl
from fusionlayer.backend import hint
from tests.harness import run_ranks
from tests.ports import free_port
from tests.tiers import engine, needs

from . import deepspeed_training as training
from .test_deepspeed import INT4

pytestmark = [pytest.mark.medium, engine, needs("deepspeed")]

EXEMPT = "blocks.0.*.bias"


def averages(section: dict[str, Any], scatters: bool) -> tuple[dict[str, bytes], tuple[str, ...]]:
    """Return the bits of the averaged gradients by name, and which are exempt."""
    from deepspeed.utils import safe_get_full_grad

    model = training.build("zero3")
    config = training.settings("zero3", section)
    config["zero_optimization"]["reduce_scatter"] = scatters
    engine = fl.deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config)[0]
    engine.backward(engine(*next(training.batches(1))))
    with hint(plain=True):
        bits = {name: safe_get_full_grad(p).numpy().tobytes() for name, p in engine.module.named_parameters()}
    exempt = engine.fusionlayer.exempt
    engine.destroy()
    return bits, exempt


def both(rank: int, world: int, port: int) -> list[tuple[Any, Any]]:
    training.join(rank, world, port)
    fl.deepspeed.init_distributed(training.settings("zero3", {"gradients": "raw"}))
    coded = {"gradients": INT4, "exempt": [EXEMPT]}
    return [(averages({"gradients": "raw"}, scatters), averages(coded, scatters)) for scatters in (True, False)]


def test_exempt_gradients_in_mixed_buffers_travel_as_they_are() -> None:
    for found in run_ranks(both, 2, free_port(), backend=None, timeout=200):
        for (raw, _), (coded, exempt) in found:
            assert len(exempt) > 1
            assert {name for name in raw if raw[name] == coded[name]} >= set(exempt)
            assert any(raw[name] != coded[name] for name in raw), "nothing was compressed"
        (_, (scattered, exempt)), _ = found
        raw = found[0][0][0]
        assert all(raw[name] != scattered[name] for name in raw if name not in exempt and name.endswith("weight"))
