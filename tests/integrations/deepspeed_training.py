"""Trainings by DeepSpeed that tests start in their ranks: one for each kind of parallelism, small, from one seed."""

import hashlib
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

from gpt import GPT, Config, Corpus  # noqa: E402

CONTEXT, BATCH = 16, 4
KINDS = ("zero0", "zero1", "zero2", "zero3", "moe", "pipeline")  # a pipeline says for good who is in which group


class Mixture(nn.Module):
    """A token model with a layer of DeepSpeed's experts, two on each of two ranks."""

    def __init__(self) -> None:
        super().__init__()
        from deepspeed.moe.layer import MoE

        self.tokens = nn.Embedding(256, 32)
        expert = nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32))
        self.experts = MoE(32, expert, 4, ep_size=2, k=1, min_capacity=4)
        self.head = nn.Linear(32, 256)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(tokens)
        mixed, balance, _ = self.experts(x)
        return functional.cross_entropy(self.head(x + mixed).flatten(0, 1), targets.flatten()) + 0.01 * balance


def join(rank: int, world: int, port: int) -> None:
    """Say what a launcher would, and keep DeepSpeed from talking and from compiling what training does not use."""
    os.environ |= {
        **{"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world)},
        **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "DS_ACCELERATOR": "cpu"},
    }
    torch.set_num_threads(1)
    import deepspeed.ops

    deepspeed.ops.__compatible_ops__ = {}
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)


def settings(kind: str, section: Any = None, lr: float = 2e-3) -> dict[str, Any]:
    """Return a DeepSpeed configuration."""
    zero = {
        "stage": int(kind[4:]) if kind.startswith("zero") else 0,
        "reduce_bucket_size": 20000,  # several buckets
        "stage3_param_persistence_threshold": 0,  # small parameters are partitioned too
    }
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": BATCH,
        "optimizer": {"type": "Adam", "params": {"lr": lr, "torch_adam": True}},
        "zero_optimization": zero,
    }
    return config if section is None else {**config, "fusionlayer": section}


def batches(steps: int) -> Iterator[tuple[Tensor, Tensor]]:
    corpus = Corpus()
    data = torch.Generator().manual_seed(dist.get_rank() + 1)
    for _ in range(steps):
        yield corpus.sample(BATCH, CONTEXT, data)


def build(kind: str) -> nn.Module:
    torch.manual_seed(0)
    if kind == "moe":
        return Mixture()
    if kind == "pipeline":
        from deepspeed.pipe import PipelineModule

        layers = [nn.Embedding(256, 64), nn.Linear(64, 127), nn.GELU(), nn.Linear(127, 256)]
        return PipelineModule(layers, num_stages=2, loss_fn=_loss)
    # Biases of odd lengths: ZeRO pads.
    return GPT(Config(width=37, layers=2, heads=1, context=CONTEXT))


def engine_of(initialize: Any, kind: str, section: Any = None, lr: float = 2e-3) -> Any:
    model = build(kind)
    return initialize(model=model, model_parameters=list(model.parameters()), config=settings(kind, section, lr))[0]


def train(initialize: Any, kind: str, steps: int, section: Any = None) -> tuple[list[float], str]:
    """Return the losses of a training and a digest of this rank's part of the model."""
    engine = engine_of(initialize, kind, section)
    losses = []
    data = batches(steps)
    for _ in range(steps):
        if kind == "pipeline":
            losses.append(float(engine.train_batch(data_iter=iter([next(data)]))))
            continue
        loss = engine(*next(data))
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    found = digest(engine)
    engine.destroy()
    return losses, found


def digest(engine: Any) -> str:
    """Return a digest of the bits of all parameters, or of this rank's parts of them without what fills them up."""
    found = hashlib.sha256()
    for parameter in engine.module.parameters():
        found.update(_part(parameter).numpy().tobytes())
    return found.hexdigest()


def _part(parameter: Tensor) -> Tensor:
    if not hasattr(parameter, "ds_tensor"):
        return parameter.detach().view(-1)
    part = parameter.ds_tensor.detach().view(-1)
    return part[: max(0, parameter.ds_numel - dist.get_rank() * part.numel())]


def _loss(logits: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
