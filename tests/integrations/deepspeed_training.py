"""Trainings by DeepSpeed that tests start in their ranks: one for each kind of parallelism, small, from one seed."""

from __future__ import annotations

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
KINDS = ("zero0", "zero1", "zero2", "zero3", "moe", "pipeline")


class Mixture(nn.Module):
    """A token model with a layer of DeepSpeed's experts."""

    def __init__(self, experts_by_rank: bool = True) -> None:
        super().__init__()
        from deepspeed.moe.layer import MoE

        self.tokens = nn.Embedding(256, 32)
        expert = nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32))
        self.experts = MoE(32, expert, 4, ep_size=dist.get_world_size() if experts_by_rank else 1, k=1, min_capacity=4)
        self.head = nn.Linear(32, 256)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(tokens)
        mixed, balance, _ = self.experts(x)
        return functional.cross_entropy(self.head(x + mixed).flatten(0, 1), targets.flatten()) + 0.01 * balance


class Embed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(256, 64)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.tokens(tokens)


def settings(kind: str, section: Any = None, **more: Any) -> dict[str, Any]:
    """Return a DeepSpeed configuration."""
    stage = int(kind[4:]) if kind.startswith("zero") else 0
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": BATCH,
        "optimizer": {"type": "Adam", "params": {"lr": 2e-3, "torch_adam": True}},
        # A threshold of none, so that small parameters are partitioned too; small buckets, so that there are several.
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 20000, "stage3_param_persistence_threshold": 0},
        **more,
    }
    return config if section is None else {**config, "fusionlayer": section}


def quiet() -> None:
    """Let DeepSpeed say nothing, and keep it from compiling what training does not use."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed.ops

    deepspeed.ops.__compatible_ops__ = {}
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)


def join(rank: int, world: int, port: int) -> None:
    """Say what a launcher would."""
    os.environ |= {
        **{"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world)},
        **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)},
    }
    quiet()


def batches(steps: int, context: int = CONTEXT) -> Iterator[tuple[Tensor, Tensor]]:
    corpus = Corpus()
    data = torch.Generator().manual_seed(dist.get_rank() + 1)
    for _ in range(steps):
        yield corpus.sample(BATCH, context, data)


def build(kind: str) -> nn.Module:
    torch.manual_seed(0)
    if kind == "moe":
        return Mixture()
    if kind == "pipeline":
        from deepspeed.pipe import PipelineModule

        layers = [Embed(), nn.Linear(64, 127), nn.GELU(), nn.Linear(127, 256)]
        return PipelineModule(layers, num_stages=2, loss_fn=lambda x, y: functional.cross_entropy(x.flatten(0, 1), y.flatten()))
    # Widths that two ranks cannot share evenly, so that ZeRO pads.
    return GPT(Config(width=36, layers=2, heads=2, context=CONTEXT, vocabulary=255 + 1))


def train(initialize: Any, kind: str, steps: int, section: Any = None, **more: Any) -> dict[str, Any]:
    """Train and return the losses, a digest of this rank's part of the model, and the engine."""
    model = build(kind)
    engine, *_ = initialize(model=model, model_parameters=list(model.parameters()), config=settings(kind, section, **more))
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
    return {"losses": losses, "digest": digest(engine), "engine": engine}


def digest(engine: Any) -> str:
    """Return a digest of the bits of all parameters, or of this rank's parts of them."""
    found = hashlib.sha256()
    for parameter in engine.module.parameters():
        value = getattr(parameter, "ds_tensor", parameter).detach().view(-1)
        if hasattr(parameter, "ds_tensor"):
            filled = parameter.ds_numel - dist.get_rank() * value.numel()
            value = value[: max(0, filled)]
        found.update(value.numpy().tobytes())
    return found.hexdigest()
