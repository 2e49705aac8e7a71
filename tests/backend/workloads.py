"""Trainings that torch itself makes parallel, on any process group: what they end with says how calls travelled."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._attention import context_parallel_unshard
from torch.distributed.tensor.experimental._context_parallel import _attention as ring
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


class Gathered(nn.Module):
    """A layer as SimpleFSDP has it: its sharded weight is gathered in forward, its gradient scattered in backward."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        layer = nn.Linear(WIDTH, WIDTH, bias=False)
        fill(layer)
        self.weight = nn.Parameter(distribute_tensor(layer.weight.detach(), mesh, [Shard(0)]))

    def forward(self, x: Tensor) -> Tensor:
        whole: Any = self.weight
        whole = whole.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial("avg")])
        return x + torch.tanh(x @ whole.T)


def simple_fsdp(group: dist.ProcessGroup) -> list[Tensor]:
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=(group.group_name,))
    layers = nn.Sequential(Gathered(mesh), Gathered(mesh))
    losses = train(torch.compile(layers, backend="aot_eager", fullgraph=True), dist.get_rank())
    return [*losses, *values(layers)]


def context(group: dist.ProcessGroup) -> list[Tensor]:
    """Causal attention over tokens cut as torch's ``context_parallel`` cuts them, by its ring and the CPU's kernels.

    torch itself puts the ring in place of the kernels of CUDA alone.
    """
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=(group.group_name,))
    pieces = [each.clone() for each in gradient(4 * 4 * 32 * 16, 11).view(4, 1, 4, 32, 16)]
    query, key, value, grad = pieces
    kernels: Any = torch.ops.aten
    with context_parallel(mesh, buffers=pieces, buffer_seq_dims=[2] * 4, no_restore_buffers={*pieces}):
        flash = kernels._scaled_dot_product_flash_attention_for_cpu.default
        out, sums = ring._templated_ring_attention(group, 2, flash, *pieces[:3], is_causal=True, dropout_p=0.0)
        flash = kernels._scaled_dot_product_flash_attention_for_cpu_backward.default
        grads = ring._templated_ring_attention_backward(
            *(group, 2, flash, grad, "grad_out", query, key, value, out, sums), is_causal=True, dropout_p=0.0
        )
    return context_parallel_unshard(mesh, [out, *grads], [2] * 4)


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
    "simple fsdp": (simple_fsdp, {"reduce_scatter"}),
    "context parallel": (context, {"all_to_all"}),
    "pipeline": (pipeline, {"send", "recv"}),
}
