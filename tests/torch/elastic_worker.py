"""What torchrun starts in test_elastic: training that writes down each of its steps."""

import hashlib
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import fusionlayer.torch as hvd
from tests.integrations.training import CLASSES, FEATURES, make_model, weights
from tests.synthetic import gradient

SAMPLES = 60


def main(folder: Path) -> None:
    """Train until the file "finish" is there, then to the end of the epoch."""
    torch.set_num_threads(1)
    hvd.init()
    log = (folder / f"{time.time():.3f}-{os.getpid()}.jsonl").open("w")
    model = make_model()
    optimizer: Any = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
        model.named_parameters(),
        compression=hvd.Compression.int4,
        error_feedback=True,
    )
    sampler = hvd.elastic.ElasticSampler(range(SAMPLES), seed=3)
    state: Any = hvd.elastic.TorchState(model, optimizer, sampler=sampler, step=0, epoch=0, seen=[], finish=False)

    def note(kind: str, **more: Any) -> None:
        feedback = optimizer.state_dict().get("fusionlayer", {}).get("residuals", {})
        facts = {
            "kind": kind,
            "rank": hvd.rank(),
            "size": hvd.size(),
            "agent": os.environ.get("TEST_AGENT"),
            "pid": os.getpid(),
            "step": state.step,
            "epoch": state.epoch,
            "weights": digest([weights(model)]),
            "momenta": digest([optimizer.state[p]["momentum_buffer"] for p in model.parameters() if optimizer.state]),
            "feedback": digest([feedback[name] for name in sorted(feedback)]),
            "sent": None if optimizer.fusion_plan is None else optimizer.fusion_plan.digest().hex(),
        }
        log.write(json.dumps({**facts, **more}) + "\n")
        log.flush()

    @hvd.elastic.run
    def train(state: Any) -> None:
        note("begin", seen=len(state.seen))
        while not state.finish:
            for batch, indices in batches(sampler, 4):
                optimizer.zero_grad()
                x = torch.stack([gradient(FEATURES, 100 + i) for i in indices])
                y = torch.stack([gradient(CLASSES, 900 + i) for i in indices])
                ((model(x) - y) ** 2).mean().backward()
                optimizer.step()
                state.seen = state.seen + [i for each in hvd.allgather_object(indices, name="indices") for i in each]
                sampler.record_batch(batch, len(indices))
                state.step += 1
                # Noted first: a worker that is killed has then noted all that it saved.
                note("step")
                state.save()
                state.commit()
                time.sleep(0.05)
            note("epoch", covered=sorted(set(state.seen)) == list(range(SAMPLES)), twice=len(state.seen) - SAMPLES)
            state.epoch += 1
            state.seen = []
            state.finish = hvd.broadcast_object((folder / "finish").exists(), name="finish")
            sampler.set_epoch(state.epoch)
        note("end")

    train(state)
    hvd.shutdown()


def batches(sampler: hvd.elastic.ElasticSampler, size: int) -> Iterator[tuple[int, list[int]]]:
    """Return the indices of one epoch's rest in batches."""
    indices = list(sampler)
    for number, start in enumerate(range(0, len(indices), size)):
        yield number, indices[start : start + size]


def digest(tensors: list[Tensor]) -> str:
    """Return a few characters that differ when any bit does."""
    return hashlib.sha256(b"".join(tensor.numpy().tobytes() for tensor in tensors)).hexdigest()[:12]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
