"""A worker of the same job under torchft: f32 gradients by its DDP, each worker a replica group of its own."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.training.workloads import make_workload

from .worker import TIMEOUT, digest_of, validation

__all__ = ["lighthouse", "main"]

_HEARTBEAT = 1000
"""Milliseconds after which the lighthouse leaves a silent worker out; torchft's default is 5000."""


@contextmanager
def lighthouse(folder: Path) -> Iterator[None]:
    """Run the server by which workers meet, and write where it is. It has to outlive them."""
    os.environ.setdefault("RUST_LOG", "error")  # else each quorum is told
    from torchft.coordination import LighthouseServer

    server = LighthouseServer(
        bind="[::]:0", min_replicas=1, join_timeout_ms=100, quorum_tick_ms=10, heartbeat_timeout_ms=_HEARTBEAT
    )
    port = server.address().rpartition(":")[2]
    (folder / "lighthouse").write_text(f"http://127.0.0.1:{port}")
    try:
        yield
    finally:
        server.shutdown()


def main(folder: str, rank: int, model: str, seed: int, pause: float, elastic: bool) -> None:
    """Train as ``worker.main`` does, and write the same lines.

    A step that torchft does not commit, because a worker was lost in it, is made anew with the next batch.
    """
    del elastic
    torch.set_num_threads(1)
    os.environ.update(TMPDIR=folder, GLOO_SOCKET_IFNAME="lo", TORCH_CPP_LOG_LEVEL="ERROR", RUST_LOG="error")
    from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

    socket.gethostname = lambda: "127.0.0.1"
    workload = make_workload(model, seed, rank)
    net, plain = workload.begin()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def load(state: dict[str, Any]) -> None:
        net.load_state_dict(state["model"])
        plain.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=TIMEOUT)),
        load_state_dict=load,
        state_dict=lambda: {"model": net.state_dict(), "optimizer": plain.state_dict()},
        min_replica_size=1,
        timeout=timedelta(seconds=TIMEOUT),
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        lighthouse_addr=Path(folder, "lighthouse").read_text(),
        replica_id=f"worker{rank}",
        hostname="127.0.0.1",
    )
    wrapper = DistributedDataParallel(manager, net)
    optimizer = Optimizer(manager, plain)
    orders, seen, step, began = Path(folder, "stop"), -1, 0, time.monotonic()
    with open(f"{folder}/{os.getpid()}.jsonl", "w", buffering=1) as log:
        while not (orders.exists() and step >= int(orders.read_text())):
            optimizer.zero_grad()  # the members of the step are found meanwhile
            loss = wrapper(*workload.batch(step))
            loss.backward()
            time.sleep(pause)
            optimizer.step()
            if manager.current_step() == step:
                continue  # it counts for the time of the next one
            step, ended = manager.current_step(), time.monotonic()
            line: dict[str, Any] = {"step": step, "at": ended, "seconds": ended - began, "loss": loss.item()}
            began = ended
            line.update(generation=manager._quorum_id, size=manager.num_participants())
            if line["generation"] != seen:
                seen = line["generation"]
                line["digest"] = digest_of(net)
            log.write(json.dumps(line) + "\n")
        log.write(json.dumps({"end": step, "digest": digest_of(net), "validation": validation(net, model)}) + "\n")
    manager.shutdown(wait=False)
