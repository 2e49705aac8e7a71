"""Trainers over processes that share a GPU: what travels goes by gloo, through the host."""

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import fusionlayer as fl
from fusionlayer import context
from tests.gpu.place import GPU, ON
from tests.harness import run_ranks
from tests.synthetic import gradient

pytestmark = pytest.mark.medium

STEPS, WIDTH = 40, 96


def prepare() -> torch.device:
    os.environ["FUSIONLAYER_TIMEOUT"] = "60"
    if ON != "cuda":
        return GPU
    torch.cuda.set_device(0)
    return torch.device("cuda", 0)


def make_model(device: torch.device) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Linear(32, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 8)]
    return nn.Sequential(*layers).to(device)


def losses(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, device: torch.device) -> list[float]:
    kept = []
    for step in range(STEPS):
        x = gradient(64 * 32, 1000 * step + rank).view(64, 32).to(device) * 8
        optimizer.zero_grad()
        loss = (model(x) - x[:, :8]).square().mean()
        loss.backward()
        optimizer.step()
        kept.append(loss.detach())
    return torch.stack(kept).tolist()


def same_everywhere(tensors: list[Tensor]) -> bool:
    mine = torch.cat([t.detach().reshape(-1) for t in tensors]).cpu()
    every = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(every, mine)
    return all(torch.equal(other, mine) for other in every)


def with_optimizer(rank: int, world: int, options: dict[str, Any]) -> list[float]:
    device = prepare()
    model = make_model(device)
    if options.get("overlap_forward"):
        options = {**options, "overlap_forward": model}
    optimizer = fl.DistributedOptimizer(
        torch.optim.AdamW(model.parameters(), lr=5e-3), model.named_parameters(), **options
    )
    result = losses(model, optimizer, rank, device)
    assert same_everywhere(list(model.parameters()))
    optimizer.close()
    return result


@pytest.fixture(scope="module")
def uncompressed() -> list[list[float]]:
    return run_ranks(with_optimizer, 2, {"codec": "raw"})


def near(got: list[list[float]], expected: list[list[float]], tolerance: float) -> None:
    """The mean loss of the last four steps, which is below a third of the first's, is that without compression."""
    end, reference = (sum(sum(of_rank[-4:]) for of_rank in losses) for losses in (got, expected))
    assert reference < sum(4 * of_rank[0] for of_rank in expected) / 3
    assert abs(end / reference - 1) < tolerance


@pytest.mark.parametrize(
    "options, tolerance",
    [
        ({"codec": "raw", "planner": "wfbp"}, 1e-3),
        ({"codec": "zip"}, 1e-3),
        ({"codec": "rans"}, 1e-3),
        ({"codec": "bf16"}, 0.01),
        ({"codec": "int8"}, 0.01),
        ({"codec": "int4"}, 0.02),
        ({"codec": "taco"}, 0.01),
        ({"codec": "mxfp8"}, 0.02),
        ({"codec": "thc"}, 0.05),
        ({"codec": "dynamiq", "algorithm": "ring"}, 0.02),
        ({"codec": "dynamiq", "algorithm": "butterfly"}, 0.02),
        ({"codec": "tlq_hs"}, 0.02),
        ({"codec": "topk", "density": 0.2}, 0.2),
        ({"codec": "onebit"}, 0.2),
        ({"codec": "powersgd"}, 0.2),
        ({"codec": "int8", "overlap_forward": True}, 0.01),
    ],
    ids=str,
)
def test_the_optimizer_learns_what_it_does_without_compression(
    options: dict[str, Any], tolerance: float, uncompressed: list[list[float]]
) -> None:
    near(run_ranks(with_optimizer, 2, options), uncompressed, tolerance)


def with_ddp(rank: int, world: int, codec: str) -> list[float]:
    device = prepare()
    model = DistributedDataParallel(make_model(device), bucket_cap_mb=0.01)
    if codec:
        fl.ddp.register(model, codec=codec)
    result = losses(model, torch.optim.AdamW(model.parameters(), lr=5e-3), rank, device)
    assert same_everywhere(list(model.parameters()))
    return result


@pytest.mark.parametrize("codec, tolerance", [("raw", 1e-3), ("int8", 0.01), ("dynamiq", 0.02)])
def test_ddp(codec: str, tolerance: float, uncompressed: list[list[float]]) -> None:
    near(run_ranks(with_ddp, 2, codec), uncompressed, tolerance)


def with_shards(rank: int, world: int, weights: str | None, gradients: str | None) -> list[float]:
    device = prepare()
    model = make_model(device)
    optimizer = fl.ShardedOptimizer(
        model.parameters(), torch.optim.AdamW, lr=5e-3, weights=weights, gradients=gradients
    )
    result = losses(model, optimizer, rank, device)
    assert same_everywhere(list(model.parameters()))
    return result


@pytest.mark.parametrize("weights, gradients, tolerance", [(None, None, 1e-3), ("qwd", "tlq_hs", 0.02)])
def test_the_sharded_optimizer(
    weights: str | None, gradients: str | None, tolerance: float, uncompressed: list[list[float]]
) -> None:
    near(run_ranks(with_shards, 2, weights, gradients), uncompressed, tolerance)


def with_fsdp(rank: int, world: int, weights: str, gradients: str) -> list[float]:
    device = prepare()
    mesh = init_device_mesh(ON, (world,))
    model = make_model(device)
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    fl.fsdp.compress(model, weights, gradients)
    return losses(model, torch.optim.AdamW(model.parameters(), lr=5e-3), rank, device)


@pytest.mark.parametrize(
    "weights, gradients, tolerance", [("raw", "raw", 1e-3), ("qwd", "tlq_hs", 0.02), ("int8", "int8", 0.01)]
)
def test_fsdp(weights: str, gradients: str, tolerance: float, uncompressed: list[list[float]]) -> None:
    near(run_ranks(with_fsdp, 2, weights, gradients), uncompressed, tolerance)


def alone(rank: int, world: int) -> dict[str, float]:
    """One rank, of which nothing travels: what a collective encodes it decodes."""
    device = prepare()
    fl.init(timeout=60)
    found = {}
    x = gradient(100_000, 3).to(device)
    for name in ("raw", "zip", "bf16", "int8", "int4", "dynamiq", "taco", "mxfp4", "tlq_hs"):
        for algorithm in ("two_shot", "ring"):
            out = fl.all_reduce(x.clone(), codec=name, algorithm=algorithm)
            found[f"{name}, {algorithm}"] = float((out - x).norm() / x.norm())
    context.transport().barrier()
    return found


def test_one_rank_alone() -> None:
    (errors,) = run_ranks(alone, 1, backend="cpu:gloo,cuda:nccl" if ON == "cuda" else "gloo")
    limits = {"raw": 0.0, "zip": 0.0, "int4": 0.2, "mxfp4": 0.3, "dynamiq": 0.12, "tlq_hs": 0.25}
    for name, error in errors.items():
        assert error <= limits.get(name.split(",")[0], 0.05), errors


def with_backend(rank: int, world: int) -> list[float]:
    device = prepare()
    x = gradient(100_000, 3).to(device)
    work = dist.all_reduce(x, async_op=True)
    work.wait()
    gathered = torch.empty_like(x)
    dist.all_gather_into_tensor(gathered, x)
    assert torch.equal(gathered, x) and torch.equal(x.cpu(), gradient(100_000, 3))
    model = DistributedDataParallel(make_model(device))
    return losses(model, torch.optim.AdamW(model.parameters(), lr=5e-3), rank, device)


def test_the_backend_of_one_rank() -> None:
    (got,) = run_ranks(with_backend, 1, backend="fusionlayer")
    assert got[-1] < got[0] / 3
