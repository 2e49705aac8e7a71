"""A worker of the elastic job: trains and writes a line for each step."""

from __future__ import annotations

import json
import os
import time
import zlib
from pathlib import Path
from typing import Any

import torch
from torch import nn

import fusionlayer as fl
from benchmarks.training.workloads import make_workload

__all__ = ["CODEC", "FIRST", "TIMEOUT", "digest_of", "main", "validation"]

FIRST = 4
"""Workers that begin together."""
CODEC = "int4"
TIMEOUT = 30.0
_VALIDATED = 16
_COMPARED = 2
"""Steps of a generation after which a worker tells its bits. Others may have made the first one before they changed."""


def main(folder: str, rank: int, model: str, seed: int, pause: float, elastic: bool) -> None:
    """Train until the step that the file ``stop`` names; write ``<pid>.jsonl``, a line for each step.

    Args:
        folder: where the workers find each other and their orders.
        rank: among those that begin together; others join.
        model: name of a workload.
        seed: of weights and data.
        pause: seconds that each step waits, as for a device that computes.
        elastic: whether ranks may be lost.
    """
    torch.set_num_threads(1)
    os.environ.update(TMPDIR=folder, FUSIONLAYER_MEMBERS=f"{folder}/members", GLOO_SOCKET_IFNAME="lo")
    os.environ.update(TORCH_CPP_LOG_LEVEL="ERROR")
    if rank < FIRST:
        os.environ.update(PMI_RANK=str(rank), PMI_SIZE=str(FIRST), PMIX_NAMESPACE=f"benchmark-{seed}")
    else:
        os.environ["FUSIONLAYER_JOIN"] = f"{folder}/members"
    fl.init(TIMEOUT, elastic=elastic)
    members = fl.membership() if elastic else None
    workload = make_workload(model, seed, rank)
    net, plain = workload.begin()
    optimizer = fl.DistributedOptimizer(plain, net, codec=CODEC, error_feedback=True)
    orders, seen, told, step = Path(folder, "stop"), -1, 0, 0
    with open(f"{folder}/{os.getpid()}.jsonl", "w", buffering=1) as log:
        while True:
            if orders.exists() and step >= int(orders.read_text()):
                break
            began = time.monotonic()
            loss = net(*workload.batch(step))
            loss.backward()
            time.sleep(pause)
            optimizer.step()
            ended = time.monotonic()
            optimizer.zero_grad()
            step = step + 1 if members is None else members.step
            generation = 0 if members is None else members.generation
            line: dict[str, Any] = {"step": step, "at": ended, "seconds": ended - began}
            line.update(generation=generation, rank=fl.rank(), size=fl.size(), loss=loss.item())
            if generation != seen:
                seen, told = generation, 0
            if told < _COMPARED:
                told += 1
                line["digest"] = digest_of(net)
            log.write(json.dumps(line) + "\n")
        log.write(json.dumps({"end": step, "digest": digest_of(net), "validation": validation(net, model)}) + "\n")
    fl.shutdown()


def validation(net: nn.Module, model: str) -> float:
    """Return the mean loss over batches that no worker trains on."""
    workload = make_workload(model, 10_000, 0)
    with torch.no_grad():
        return sum(net(*workload.batch(step)).item() for step in range(_VALIDATED)) / _VALIDATED


def digest_of(net: nn.Module) -> int:
    """Return a checksum of all parameters and buffers."""
    value = 0
    for x in net.state_dict().values():
        value = zlib.crc32(x.detach().numpy().tobytes(), value)
    return value
