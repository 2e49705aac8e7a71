"""Trainings that torch itself makes parallel, on any process group: what they end with says how calls travelled."""

from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from tests.integrations.training import fill
from tests.synthetic import gradient

WIDTH, BATCH, STEPS, MICROBATCHES = 64, 16, 3, 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


def model() -> nn.Sequential:
    blocks = nn.Sequential(Block(), Block())
    fill(blocks)
    return blocks


def batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    x, y = gradient(2 * BATCH * WIDTH, 100 * step + rank).view(2, BATCH, WIDTH)
    return x, y


def train(blocks: nn.Module, rank: int) -> list[Tensor]:
    optimizer = torch.optim.SGD(blocks.parameters(), lr=0.1)
    losses = []
    for step in range(STEPS):
        x, y = batch(step, rank)
        loss = (blocks(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def values(blocks: nn.Module) -> list[Tensor]:
    found = [p.detach() for p in blocks.parameters()]
    return [(p.to_local() if hasattr(p, "to_local") else p).clone() for p in found]


def ddp(group: dist.ProcessGroup) -> list[Tensor]:
    blocks = DistributedDataParallel(model(), process_group=group, bucket_cap_mb=1)
    return [*train(blocks, dist.get_rank()), *values(blocks)]


def fsdp(group: dist.ProcessGroup) -> list[Tensor]:
    blocks, mesh = model(), DeviceMesh.from_group(group, "cpu")
    for block in blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(blocks, mesh=mesh)
    return [*train(blocks, dist.get_rank()), *values(blocks)]


def tensor_parallel(group: dist.ProcessGroup) -> list[Tensor]:
    # torch remembers how tensors travel by mesh, and takes meshes of the same ranks and names for the same.
    blocks, mesh = model(), DeviceMesh.from_group(group, "cpu", mesh_dim_names=(group.group_name,))
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    for block in blocks:
        parallelize_module(block, mesh, plan)
    return [*train(blocks, 0), *values(blocks)]


def compiled(group: dist.ProcessGroup) -> list[Tensor]:
    weight = gradient(WIDTH * WIDTH, 7).view(WIDTH, WIDTH)
    size = dist.get_world_size(group)

    def layer(x: Tensor) -> tuple[Tensor, ...]:
        total = functional.all_reduce(x @ weight, "sum", group)
        pieces = functional.reduce_scatter_tensor(total @ weight, "avg", 0, group)
        whole = functional.all_gather_tensor(pieces @ weight, 0, group)
        half = [whole.shape[0] // size] * size
        moved = functional.all_to_all_single(whole, half, half, group)
        return total, pieces, whole, moved @ weight

    x, _ = batch(0, dist.get_rank())
    return list(torch.compile(layer, backend="inductor", fullgraph=True)(x))


def pipeline(group: dist.ProcessGroup) -> list[Tensor]:
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    block = model()[rank]
    stage = PipelineStage(block, rank, size, torch.device("cpu"), group=group)
    schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=nn.functional.mse_loss)
    x, y = batch(0, 0)
    losses: list[Tensor] = []
    schedule.step(*([x] if rank == 0 else []), **({"target": y, "losses": losses} if rank == size - 1 else {}))
    return [*losses, *(p.grad for p in block.parameters() if p.grad is not None)]


WORKLOADS: dict[str, tuple[Callable[[dist.ProcessGroup], list[Tensor]], set[str]]] = {
    "ddp": (ddp, {"all_reduce"}),
    "fsdp": (fsdp, {"reduce_scatter"}),
    "tensor parallel": (tensor_parallel, {"all_reduce"}),
    "compiled": (compiled, {"all_reduce", "reduce_scatter", "all_to_all"}),
    "pipeline": (pipeline, {"send", "recv"}),
}
