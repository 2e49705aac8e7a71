"""One rank: ``python -m benchmarks.deepspeed.worker JOB RESULT``, the job as JSON; rank 0 writes what was measured."""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist

import fusionlayer as fl
from examples.gpt import Config, Corpus
from examples.wire import carrier, sent_bytes

from .models import build

__all__ = ["Job", "main"]

VALIDATION_PIECES = 256


@dataclass(frozen=True)
class Job:
    """What one set of workers does.

    Attributes:
        kind: of ``models.KINDS``.
        section: "fusionlayer" of the configuration; None: DeepSpeed alone, on gloo.
        steps: that are taken.
        batch: pieces of text for each rank and step.
        shape: of the model, as a mapping.
        learning_rate: of Adam at its peak.
        seed: of weights and data.
        warm: steps at the beginning that are not timed.
        validate: find the validation loss in the end.
    """

    kind: str
    section: Mapping[str, Any] | None
    steps: int
    batch: int = 8
    shape: Mapping[str, Any] = field(default_factory=dict)
    learning_rate: float = 4e-3
    seed: int = 0
    warm: int = 0
    validate: bool = True

    @property
    def stage(self) -> int:
        """Of ZeRO."""
        return int(self.kind[4:]) if self.kind.startswith("zero") else 0

    @property
    def config(self) -> dict[str, Any]:
        """DeepSpeed's configuration."""
        schedule = {"total_num_steps": self.steps + 1, "warmup_num_steps": max(2, self.steps // 10)}
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": self.batch,
            "optimizer": {"type": "Adam", "params": {"lr": self.learning_rate, "torch_adam": True}},
            "scheduler": {"type": "WarmupCosineLR", "params": schedule},
            "zero_optimization": {"stage": self.stage, "stage3_param_persistence_threshold": 10000},
        }
        return config if self.section is None else {**config, "fusionlayer": dict(self.section)}

    def as_json(self) -> str:
        """Return what ``main`` reads."""
        return json.dumps(asdict(self))


def main() -> None:
    """Run the worker that the command line describes."""
    job = Job(**json.loads(sys.argv[1]))
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    # DeepSpeed compiles it at every first start on a CPU, and training does not use it.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    measured = run(job)
    if dist.get_rank() == 0:
        Path(sys.argv[2]).write_text(json.dumps(measured))
    dist.barrier()
    fl.shutdown()
    dist.destroy_process_group()


def run(job: Job) -> dict[str, Any]:
    """Return losses, seconds of the slowest rank and bytes that a host has sent, by step, and the validation loss."""
    fl.deepspeed.init_distributed(job.config)
    config = Config(**job.shape)
    model = build(job.kind, config, job.seed)
    engine, *_ = fl.deepspeed.initialize(
        model=model, model_parameters=[each for each in model.parameters() if each.requires_grad], config=job.config
    )
    corpus = Corpus()
    replica = 0 if job.kind == "pipeline" else dist.get_rank()  # stages of a pipeline work on the same text
    data = torch.Generator().manual_seed(job.seed * dist.get_world_size() + replica + 1)
    device = carrier(fl.local_size(), fl.size(), os.environ.get("GLOO_SOCKET_IFNAME"))
    losses, seconds, sent = [], [], []
    for _ in range(job.steps):
        batch = corpus.sample(job.batch, config.context, data)
        dist.barrier()
        before = sent_bytes(device) if device else 0
        start = time.perf_counter()
        losses.append(_step(engine, job.kind, batch))
        dist.barrier()
        seconds.append(time.perf_counter() - start)
        sent.append((sent_bytes(device) if device else 0) - before)
    return {
        "loss": _mean(statistics.fmean(losses[-10:])),
        "validation": _validate(engine, job.kind, corpus, config) if job.validate else None,
        "seconds": seconds[job.warm :],
        "sent": sent[job.warm :],
        "exempt": list(engine.fusionlayer.exempt) if job.section is not None else [],
    }


def _step(engine: Any, kind: str, batch: tuple[torch.Tensor, torch.Tensor]) -> float:
    if kind == "pipeline":
        return float(engine.train_batch(data_iter=iter([batch])))
    loss = engine(*batch)
    engine.backward(loss)
    engine.step()
    return float(loss.detach())


def _validate(engine: Any, kind: str, corpus: Corpus, config: Config) -> float:
    tokens, targets = corpus.validate(VALIDATION_PIECES, config.context)
    if kind == "pipeline":
        size = engine.train_micro_batch_size_per_gpu()
        pieces = zip(tokens.split(size), targets.split(size), strict=True)
        losses = [float(engine.eval_batch(iter([piece]))) for piece in pieces]
        return _mean(statistics.fmean(losses))
    mine = slice(dist.get_rank(), None, dist.get_world_size())
    engine.eval()
    with torch.no_grad():
        return _mean(float(engine(tokens[mine], targets[mine])))


def _mean(value: float) -> float:
    total = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(total)
    return float(total) / dist.get_world_size()


if __name__ == "__main__":
    main()
