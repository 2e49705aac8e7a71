"""Training on one GPU: two processes that share it over gloo, then an engine of one; checks results, tells step times.

    python -m benchmarks.gpu_training [--out benchmarks/results] [--steps 40]

The two processes send through pinned host memory: the numbers say what the engine's streams and events cost, not what
a network would. Two ranks of NCCL on one GPU (tests/gpu/two_ranks.py) take turns on it, so their times would mean
nothing. Every run ends with bit-equal parameters on both ranks, or fails. The engine of one rank sends
nothing: its rows are what it encodes and decodes around an exchange, and launches.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import fusionlayer as fl
from benchmarks import driver
from fusionlayer import context
from fusionlayer.plan import TensorInfo
from fusionlayer.scheduler import Engine

METHODS: dict[str, dict[str, Any]] = {
    "ddp": {},
    "raw": {"codec": "raw"},
    "bf16": {"codec": "bf16"},
    "int8": {"codec": "int8"},
    "int4": {"codec": "int4"},
    "int4 stochastic": {"codec": "int4", "rounding": "stochastic"},
    "zip": {"codec": "zip"},
    "taco": {"codec": "taco"},
    "tlq_hs": {"codec": "tlq_hs"},
    "dynamiq, ring": {"codec": "dynamiq", "algorithm": "ring"},
    "topk 1 %": {"codec": "topk", "density": 0.01},
}
# What comes back of one rank's tensor is as good as the codec.
ALONE = ("raw", "zip", "bf16", "int8", "int4", "tlq_hs", "taco", "mxfp8", "mxfp4", "dynamiq")


def _model(device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Linear(256, 1024), nn.GELU()]
    for _ in range(6):
        layers += [nn.Linear(1024, 1024), nn.GELU()]
    return nn.Sequential(*layers, nn.Linear(1024, 16)).to(device)


def _batches(rank: int, steps: int, device: torch.device) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1 + rank)
    inputs = torch.randn(steps, 128, 256, generator=generator)
    return [(x.to(device), x[:, :16].sin().to(device)) for x in inputs]


def _train(method: str, rank: int, steps: int, device: torch.device) -> dict[str, Any]:
    model = _model(device)
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    forward: nn.Module = model
    if method == "ddp":
        forward = DistributedDataParallel(model)
    else:
        optimizer = fl.DistributedOptimizer(optimizer, model.named_parameters(), **METHODS[method])
    seconds, loss = [], torch.zeros(())
    for x, y in _batches(rank, steps, device):
        start = time.perf_counter()
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(forward(x), y)
        loss.backward()
        optimizer.step()
        torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - start)
    flat = torch.cat([p.detach().view(-1).view(torch.int32) for p in model.parameters()])
    both = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
    dist.all_gather(both, flat)
    if any(not torch.equal(other, flat) for other in both):
        raise SystemExit(f"{method}: parameters differ over ranks")
    if method != "ddp":
        optimizer.close()  # type: ignore[attr-defined]
    return {"method": method, "loss": round(loss.item(), 5), "step ms": round(1000 * statistics.median(seconds[5:]), 2)}


def _shared_gpu(rank: int, store: str, steps: int, results: Any) -> None:
    device = torch.device("cuda", 0)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=timedelta(seconds=60)
    )
    fl.init(timeout=60)
    rows = [_train(method, rank, steps, device) for method in METHODS]
    dist.barrier()
    if rank == 0:
        results.put(rows)
    fl.shutdown()
    dist.destroy_process_group()


def _alone(rank: int, store: str, steps: int, results: Any) -> None:
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", init_method=f"file://{store}", rank=0, world_size=1, timeout=timedelta(seconds=60))
    fl.init(timeout=60)
    rows = []
    for name in ALONE:
        gradients = {f"g{i}": torch.randn(1 << 20, device=device) for i in range(8)}
        infos = [TensorInfo(name, g.numel(), "float32", 4) for name, g in gradients.items()]
        engine = Engine(
            infos,
            context.transport().duplicate(),
            codec=fl.codecs.get(name).bare,
            algorithm="two_shot",
            planner=fl.planners.get("horovod", threshold=8 << 20),
            device=device,
            error_feedback=False,
        )
        seconds = []
        for _ in range(steps):
            fresh = {key: torch.randn_like(g) for key, g in gradients.items()}
            expected = {key: g.clone() for key, g in fresh.items()}
            torch.cuda.synchronize(device)
            start = time.perf_counter()
            for key, g in fresh.items():
                engine.submit(key, g)
            engine.synchronize()
            torch.cuda.synchronize(device)
            seconds.append(time.perf_counter() - start)
            for key, g in fresh.items():
                error = (g - expected[key]).norm() / expected[key].norm()
                if not error < 0.25:
                    raise SystemExit(f"{name} alone: relative error {error:.3f} of {key}")
        engine.close()
        rows.append(
            {"method": f"engine alone, {name}", "loss": "", "step ms": round(1000 * statistics.median(seconds), 2)}
        )
    results.put(rows)
    fl.shutdown()
    dist.destroy_process_group()


def _run(target: Any, world: int, steps: int) -> list[dict[str, Any]]:
    spawn = mp.get_context("spawn")
    results = spawn.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        workers = [
            spawn.Process(target=target, args=(rank, f"{folder}/store", steps, results), daemon=True)
            for rank in range(world)
        ]
        for worker in workers:
            worker.start()
        deadline = time.monotonic() + 240
        for worker in workers:
            worker.join(max(1, deadline - time.monotonic()))
        codes = [worker.exitcode for worker in workers]
        for worker in workers:
            worker.kill()
    if codes != [0] * world:
        sys.exit(f"{target.__name__}: exit codes {codes}")
    rows: list[dict[str, Any]] = results.get()
    return rows


def main() -> None:
    """Run both parts, print their table and write its result files."""
    parser = driver.make_parser("gpu_training", __doc__)
    parser.add_argument("--steps", type=int, default=40)
    driver.add_options(parser)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("no CUDA device here")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    rows = _run(_shared_gpu, 2, args.steps) + _run(_alone, 1, args.steps)
    environment = driver.begin(args, device="cuda")
    title = f"Training on one GPU: 2 processes over gloo, and an engine of one rank; {args.steps} steps"
    driver.finish(args, "gpu_training", title, environment, rows)


if __name__ == "__main__":
    main()
