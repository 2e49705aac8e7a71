"""What each step of DeepSpeed must make with weights as differences, and with 1-bit Adam: the same in plain torch."""

import copy
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector

import fusionlayer as fl
from fusionlayer.training.weights import Weights

from . import deepspeed_training as training
from .test_onebit_adam import signs_of

RATE, STEPS, FREEZE = 2e-3, 5, 3
EPS = 1e-8
STATES = ("exp_avg", "exp_avg_sq")
SDP4BIT = {"weights": {"codec": "sdp4bit", "min_bytes": 0}, "gradients": {"min_bytes": 0}}
QWD = {"weights": {"codec": "qwd", "min_bytes": 0}, "gradients": "raw"}
ONE_BIT = {
    "type": "OneBitAdam",
    "params": {"lr": RATE, "freeze_step": FREEZE, "weight_decay": 0.01, "betas": [0.8, 0.95], "eps": EPS}
    | {"cuda_aware": False, "comm_backend_name": "nccl", "bias_correction": True},
}


def engine_of(kind: str, section: Any = None, **more: Any) -> Any:
    """Return an engine; ``more`` are keys of the configuration."""
    model = training.build(kind)
    # DeepSpeed clips to 1 unless it is told otherwise.
    config = {**training.settings(kind, section, RATE), "gradient_clipping": 0.0, **more}
    return fl.deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config)[0]


@cache
def batches(rank: int) -> list[tuple[Tensor, Tensor]]:
    """Return all batches of a rank."""
    corpus, data = training.Corpus(), torch.Generator().manual_seed(rank + 1)
    return [corpus.sample(training.BATCH, training.CONTEXT, data) for _ in range(STEPS)]


def sent() -> tuple[int, int]:
    """Return how many all-reduces have travelled compressed, in all groups, and the bytes of all that has."""
    each = [fl.backend.traffic(group) for group in dist.distributed_c10d._world.pg_map]
    return sum(one.calls["all_reduce"] for one in each), sum(one.bytes_sent for one in each)


def take(engine: Any, steps: int, first: int = 0) -> Tensor:
    """Make steps, of which ``first`` have been made; return the model's weights, flat."""
    for batch in batches(dist.get_rank())[first : first + steps]:
        engine.backward(engine(*batch))
        engine.step()
    return parameters_to_vector(engine.module.parameters()).detach().clone()


def trained(kind: str, section: dict[str, Any], **more: Any) -> bytes:
    """Return the bits of the weights of a training."""
    engine = engine_of(kind, section, **more)
    found = take(engine, STEPS).view(torch.uint8).numpy().tobytes()
    engine.destroy()
    return found


def gathered(mine: Tensor) -> list[Tensor]:
    """Return the tensors of all ranks, as they are."""
    every = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    with fl.backend.hint(plain=True):
        dist.all_gather(every, mine)
    return every


def in_4_bits(x: Tensor) -> Tensor:
    """Return ``x`` (n,) as int4 in groups of 2048 has it."""
    rows = nn.functional.pad(x, (0, -len(x) % 2048)).view(-1, 2048)
    width = rows.abs().amax(1, keepdim=True) / 7
    width = ((width.view(torch.int32) + 255) & -256).view(torch.float32)  # scales have 16 bits, and are rounded up
    return ((rows / width).round() * width).nan_to_num().flatten()[: len(x)]


def differences(kind: str) -> dict[str, Any]:
    """Return what is to be known of weights that travel as differences."""
    engine = engine_of(kind, QWD)
    (held,) = engine.optimizer.bit16_groups_flat
    (main,) = engine.optimizer.single_partition_of_fp32_groups
    nbytes, wrong, apart = 0, 0, 0.0
    for step in range(STEPS):
        before, sent_before = held.clone(), sent()[1]
        take(engine, 1, first=step)
        nbytes += sent()[1] - sent_before
        owned = torch.cat(gathered(main.detach().clone()))
        changes = (owned - before).split(len(main))
        expected = before + torch.cat([in_4_bits(change) for change in changes])
        # A value half way between two codes may go either way.
        wrong += int(((held - expected).abs() > 1e-6).sum())
        apart = max(apart, float((owned - held).abs().max() / (owned - before).abs().max()))
    found = held.numpy().tobytes()
    engine.destroy()
    counted = STEPS * Weights.of("qwd").codec.wire(len(main)).capacity
    return {"digest": found, "wrong": wrong, "apart": apart, "sent": nbytes, "counted": counted}


def resumed(kind: str, folder: Path, section: dict[str, Any], **more: Any) -> tuple[bytes, bytes]:
    """Return the weights of a training, and of one that goes on from its checkpoint with other weights before."""
    through = engine_of(kind, section, **more)
    take(through, 2)
    through.save_checkpoint(str(folder), tag="two")
    torch.save(through.fusionlayer.state_dict(), folder / f"feedback {dist.get_rank()}")
    expected = take(through, STEPS - 2, first=2)
    through.destroy()
    again = engine_of(kind, section, **more)
    take(again, 1)
    again.load_checkpoint(str(folder), tag="two")
    again.fusionlayer.load_state_dict(torch.load(folder / f"feedback {dist.get_rank()}"))
    found = take(again, STEPS - 2, first=2)
    again.destroy()
    return expected.view(torch.uint8).numpy().tobytes(), found.view(torch.uint8).numpy().tobytes()


def one_bit(section: Any = None) -> dict[str, Any]:
    """Return what is to be known of DeepSpeed's configuration of 1-bit Adam, as it was written for older versions."""
    engine = engine_of("zero0", section, optimizer=copy.deepcopy(ONE_BIT))
    adam, parameters = engine.optimizer, list(engine.module.parameters())
    beta1, decay = ONE_BIT["params"]["betas"][0], ONE_BIT["params"]["weight_decay"]  # type: ignore[index]
    calls, wrong, lost = [], [], torch.zeros(())
    for step, batch in enumerate(batches(dist.get_rank())):
        calls_before = sent()[0]
        engine.backward(engine(*batch))
        weights, gradient = (flat(each).clone() for each in (parameters, [p.grad for p in parameters]))
        moments = [flat([adam.state[p][key] for p in parameters]).clone() for key in STATES] if step else None
        engine.step()
        calls.append(sent()[0] - calls_before)
        momentum, variance = (flat([adam.state[p][key] for p in parameters]) for key in STATES)
        if step >= FREEZE and moments is not None:
            own = (beta1 * moments[0] + (1 - beta1) * gradient) / 2 + lost
            signs = own if section else signs_of(own, 1024)
            lost = own - signs
            expected = sum(gathered(signs))
            wrong.append(float((momentum - expected).norm() / momentum.norm()))  # type: ignore[operator]
            assert torch.equal(variance, moments[1]), "the variance is frozen"
        stepped = weights * (1 - RATE * decay) - RATE * momentum / (variance.sqrt() + EPS)
        assert torch.allclose(flat(parameters), stepped, rtol=1e-5, atol=1e-6), "no bias correction"
    found = flat(parameters).numpy().tobytes()
    engine.destroy()
    return {"digest": found, "calls": calls, "wrong": max(wrong)}


def flat(tensors: Any) -> Tensor:
    return torch.cat([each.detach().reshape(-1) for each in tensors])
