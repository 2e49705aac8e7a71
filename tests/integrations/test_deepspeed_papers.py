"""SDP4Bit and 1-bit Adam in DeepSpeed where ``test_deepspeed.py`` has no case: 16-bit models, stages, accumulation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fusionlayer as fl
from fusionlayer import ConfigError
from tests.harness import run_ranks
from tests.ports import free_port
from tests.tiers import engine, long, needs

from . import deepspeed_oracles as oracles
from . import deepspeed_training as training

pytestmark = [pytest.mark.medium, engine, needs("deepspeed")]

BF16: dict[str, Any] = {"bf16": {"enabled": True}}
WIDE_SUMS = {**BF16, "data_types": {"grad_accum_dtype": "fp32"}}
ACCUMULATED = {"gradient_accumulation_steps": 2, "gradient_clipping": 0.5}


def held(engine: Any) -> tuple[bytes, float, float]:
    """Train; return the model's bits, and the first and the last loss."""
    losses = []
    for batch in 4 * oracles.batches(dist.get_rank()):
        loss = engine(*batch)
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    weights = torch.nn.utils.parameters_to_vector(engine.module.parameters()).detach()
    return weights.float().numpy().tobytes(), losses[0], losses[-1]


def differences(rank: int, world: int, port: int, folder: Path) -> list[Any]:
    training.join(rank, world, port)
    found: list[Any] = []
    for kind, more in (("zero1", {}), ("zero2", BF16), ("zero1", WIDE_SUMS), ("zero2", ACCUMULATED)):
        engine = oracles.engine_of(kind, oracles.SDP4BIT, **more)
        found.append(held(engine))
        engine.destroy()
    for number, (section, more) in enumerate(((oracles.SDP4BIT, WIDE_SUMS), ({"weights": "delta"}, BF16))):
        place = folder / str(number)
        if rank == 0:
            place.mkdir()
        dist.barrier()
        expected, went_on = oracles.resumed("zero1", place, section, **more)
        assert expected == went_on, (section, more)
    lossless = {"gradients": "raw", "weights": {"codec": "delta", "min_bytes": 0}}
    both = [oracles.engine_of("zero2", section, **BF16) for section in ({"gradients": "raw"}, lossless)]
    plain, delta = (held(engine)[0] for engine in both)
    assert plain == delta, "delta loses no bit"
    return found


@long(
    guarded_by="tests/integrations/test_deepspeed.py::test_weights_travel_as_differences_from_the_copies_of_all_ranks"
)
def test_differences_in_every_stage_and_type(tmp_path: Path) -> None:
    for cases in zip(*run_ranks(differences, 2, free_port(), tmp_path, backend=None, timeout=250), strict=True):
        (mine, first, last), (theirs, _, _) = cases
        assert mine == theirs, "copies differ"
        assert last < first - 0.3


def one_bit(rank: int, world: int, port: int, folder: Path) -> list[Any]:
    training.join(rank, world, port)
    found: list[Any] = []
    for more in (BF16, ACCUMULATED):
        engine = oracles.engine_of("zero0", optimizer=oracles.ONE_BIT, **more)
        before = oracles.sent()[0]
        found.append((*held(engine), oracles.sent()[0] - before, engine.basic_optimizer.frozen))
        engine.destroy()
    expected, went_on = oracles.resumed("zero0", folder, None, optimizer=oracles.ONE_BIT, **BF16)  # type: ignore[arg-type]
    assert expected == went_on
    with pytest.raises(ConfigError, match='"OneBitAdam" with experts'):
        model = training.build("moe")
        config = {**training.settings("moe"), "optimizer": oracles.ONE_BIT}
        fl.deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config)
    return found


@long(guarded_by="tests/integrations/test_deepspeed.py::test_one_bit_adam_by_the_configuration_that_deepspeed_dropped")
def test_one_bit_adam_of_16_bit_models_and_over_several_batches(tmp_path: Path) -> None:
    for cases in zip(*run_ranks(one_bit, 2, free_port(), tmp_path, backend=None, timeout=250), strict=True):
        (mine, first, last, calls, frozen), (theirs, *_) = cases
        assert mine == theirs, "replicas differ"
        assert frozen and calls > 0 and last < first - 0.3
