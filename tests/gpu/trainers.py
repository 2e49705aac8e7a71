"""The trainers among the bodies of ``test_nccl.py``: what ``two_ranks.py`` says of bodies is so of these."""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

import fusionlayer as fl
import fusionlayer.torch as hvd
from tests.gpu.place import TensorsOn
from tests.gpu.two_ranks import place
from tests.integrations.training import CLASSES, FEATURES, HIDDEN, fill, make_batch
from tests.synthetic import gradient
from tests.torch import behaviours

STEPS = 4


def model_on(device: torch.device) -> nn.Sequential:
    """Return a perceptron whose tensors have lengths that fit no block of any codec, with fixed values."""
    layers = [nn.Linear(FEATURES, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, CLASSES)]
    model = nn.Sequential(*layers)
    fill(model)
    return model.to(device)


def train(model: nn.Module, optimizer: Optimizer, rank: int, device: torch.device, steps: int = STEPS) -> None:
    for step in range(steps):
        x, y = (values.to(device) for values in make_batch(rank, step))
        optimizer.zero_grad()
        (model(x) - y).square().mean().backward()
        optimizer.step()


def adamw(parameters: Iterable[Tensor]) -> Optimizer:
    return torch.optim.AdamW(parameters, lr=5e-3)


def numbers(tensors: Iterable[Tensor]) -> list[float]:
    return torch.cat([tensor.detach().float().reshape(-1) for tensor in tensors]).tolist()


def optimizer(rank: int, world: int, device: str, options: dict[str, Any]) -> list[float]:
    """It is closed right behind its last step, whose buckets the device may still have before it."""
    on = place(rank, device)
    model = model_on(on)
    if options.get("overlap_forward"):
        options = {**options, "overlap_forward": model}
    wrapped: Any = fl.DistributedOptimizer(adamw(model.parameters()), model.named_parameters(), **options)
    train(model, wrapped, rank, on)
    wrapped.close()
    return numbers(model.parameters())


def ddp(rank: int, world: int, device: str, options: dict[str, Any]) -> list[float]:
    on = place(rank, device)
    model = DistributedDataParallel(model_on(on), bucket_cap_mb=0.005)
    fl.ddp.register(model, **options)
    train(model, adamw(model.parameters()), rank, on)
    return numbers(model.parameters())


def fsdp(rank: int, world: int, device: str, options: dict[str, Any]) -> list[float]:
    """Each rank returns its own shards."""
    on = place(rank, device)
    mesh = init_device_mesh(device, (world,))
    model = model_on(on)
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    fl.fsdp.compress(model, **options)
    train(model, adamw(model.parameters()), rank, on)
    return numbers(parameter.to_local() for parameter in model.parameters())  # type: ignore[attr-defined]


def sharded(rank: int, world: int, device: str, options: dict[str, Any]) -> list[float]:
    on = place(rank, device)
    model = model_on(on)
    train(model, fl.ShardedOptimizer(model.parameters(), torch.optim.AdamW, lr=5e-3, **options), rank, on)
    return numbers(model.parameters())


def backend(rank: int, world: int, device: str, options: dict[str, Any]) -> list[float]:
    """DDP by the process group, then its calls one by one, compressed and as they are."""
    on = place(rank, device)
    if "nccl" not in dist.get_backend_config():
        dist.is_nccl_available = lambda: False  # the group would take it for CUDA tensors wherever torch has it
    group: Any = dist.new_group(backend="fusionlayer", pg_options={"min_bytes": 0, "rules": [options]})
    model = DistributedDataParallel(model_on(on), process_group=group)
    train(model, adamw(model.parameters()), rank, on)
    kept = [*model.parameters()]
    x = gradient(4096, rank).to(on)
    work = dist.all_reduce(summed := x.clone(), group=group, async_op=True)
    gathered, part, swapped = torch.empty(2 * 4096, device=on), torch.empty(2048, device=on), torch.empty_like(x)
    dist.all_gather_into_tensor(gathered, x, group=group)
    dist.reduce_scatter_tensor(part, x, group=group)
    dist.all_to_all_single(swapped, x, group=group)
    assert work is not None
    work.wait()
    received = torch.empty_like(x)
    both = [dist.P2POp(dist.isend, x, 1 - rank, group), dist.P2POp(dist.irecv, received, 1 - rank, group)]
    for each in dist.batch_isend_irecv(both):
        each.wait()
    kept += [summed, gathered, part, swapped, received]
    dist.destroy_process_group(group)
    return numbers(kept)


def horovod(rank: int, world: int, device: str, options: dict[str, Any]) -> list[float]:
    on = place(rank, device)
    hvd.init()
    model = model_on(on)
    if rank:
        fill(model, 7)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    compression = getattr(hvd.Compression, options["compression"])
    wrapped: Any = hvd.DistributedOptimizer(adamw(model.parameters()), model.named_parameters(), compression)
    train(model, wrapped, rank, on)
    x = gradient(70_001, rank).to(on)
    uneven = hvd.allgather(x[: 100 + 50 * rank], name="uneven")
    begun = [hvd.allreduce_async(x[: 10 ** (1 + i)], name=f"sum.{i}", op=hvd.Sum) for i in range(4)]
    kept = [uneven, hvd.broadcast(x, 1), *map(hvd.synchronize, begun), hvd.alltoall(x[:1000], name="swap")]
    hvd.shutdown()
    return numbers([*model.parameters(), *kept])


def horovods_behaviours(rank: int, world: int, device: str) -> None:
    on = place(rank, device)
    hvd.init()
    for name, check in behaviours.CHECKS.items():
        try:
            with TensorsOn(on):
                check(rank, world)
        except BaseException as error:
            raise AssertionError(f"{name}: {error}") from error
    hvd.shutdown()


class _Cut(nn.Module):
    """A perceptron cut over ranks: its first layer by columns, its second by rows."""

    def __init__(self, channel: Any, rank: int, sequence: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 64), nn.Linear(64, 64, bias=False)
        fill(self, 20 + rank)
        self._channel, self._sequence = channel, sequence

    def forward(self, x: Tensor) -> Tensor:
        channel = self._channel
        whole = channel.gather(x, 1) if self._sequence else channel.copy(x)
        out = self.down(torch.tanh(self.up(whole)))
        return x + (channel.reduce_scatter(out, 1) if self._sequence else channel.reduce(out))


def tensor_parallel(rank: int, world: int, device: str, options: dict[str, Any]) -> list[float]:
    """Activations in pieces, on a stream beside the computing one; each rank returns its own parts."""
    on = place(rank, device)
    sequence = options.get("sequence", False)
    channel = fl.tensor_parallel.Channel(codec=options["codec"], piece_bytes=4096)
    model = nn.Sequential(*(_Cut(channel, rank, sequence) for _ in range(2))).to(on)
    optimizer = adamw(model.parameters())
    for step in range(STEPS):
        x = gradient(4 * 32 * 64, 500 + step).view(4, 32, 64)
        x = (x.chunk(world, 1)[rank] if sequence else x).contiguous().to(on).requires_grad_()
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    assert x.grad is not None
    return numbers([*model.parameters(), x.grad])


TRAINERS: list[tuple[Any, dict[str, Any]]] = [
    (optimizer, {"codec": "raw", "planner": "wfbp"}),
    (optimizer, {"codec": "bf16"}),
    (optimizer, {"codec": "int8", "planner": "wfbp"}),
    (optimizer, {"codec": "int4", "overlap_forward": True}),
    (optimizer, {"codec": "zip"}),
    (optimizer, {"codec": "topk", "density": 0.1}),
    (optimizer, {"codec": "omnireduce"}),
    (optimizer, {"codec": "thc"}),
    (optimizer, {"codec": "dynamiq", "algorithm": "ring"}),
    (optimizer, {"codec": "powersgd"}),
    (ddp, {"codec": "raw"}),
    (ddp, {"codec": "int8"}),
    (fsdp, {"weights": "raw", "gradients": "raw"}),
    (fsdp, {"weights": "zip", "gradients": "int8"}),
    (fsdp, {"weights": "qwd", "gradients": "tlq_hs"}),
    (sharded, {"weights": None, "gradients": None}),
    (sharded, {"weights": "qwd", "gradients": "tlq_hs"}),
    (backend, {"codec": "int8", "op": ["all_reduce", "reduce_scatter", "all_gather", "all_to_all", "send"]}),
    (horovod, {"compression": "none"}),
    (horovod, {"compression": "int8"}),
    (tensor_parallel, {"codec": "taco"}),
    (tensor_parallel, {"codec": "int8", "sequence": True}),
]
OWN_PARTS = (fsdp, tensor_parallel, backend, horovod)
"""Trainers whose ranks return what they alone have, beside what all have."""


# ---- others' communicators beside ours ------------------------------------------------------------------------------


class _Summed(torch.autograd.Function):
    """Torch's own all-reduce in the middle of a model, forward and backward, as of another library's layer."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        total = x.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        total = grad.clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None


def beside_others(rank: int, world: int, device: str, codec: str) -> list[float]:
    """FSDP2 of torch, sums of torch, a channel and an optimizer of ours, each with a communicator of its own."""
    on = place(rank, device)
    mesh = init_device_mesh(device, (world,))
    other: Any = dist.new_group()
    blocks = [nn.Linear(64, 64).to(on) for _ in range(4)]
    for number, block in enumerate(blocks):
        fill(block, number)
    fully_shard(blocks[0], mesh=mesh)
    channel = fl.tensor_parallel.Channel(codec="int8")
    ours = [p for block in blocks[1:] for p in block.parameters()]
    wrapped: Any = fl.DistributedOptimizer(
        adamw(ours), [(str(i), p) for i, p in enumerate(ours)], codec=codec, planner="wfbp"
    )
    theirs = adamw(blocks[0].parameters())
    for step in range(5 * STEPS):
        x = gradient(16 * 64, 1000 * step + rank).view(16, 64).to(on)
        wrapped.zero_grad()
        theirs.zero_grad()
        x = torch.tanh(blocks[0](x))
        x = torch.tanh(blocks[1](_Summed.apply(x, other)))  # type: ignore[no-untyped-call]
        x = torch.tanh(blocks[2](channel.reduce(channel.copy(x))))
        blocks[3](x).square().mean().backward()
        wrapped.step()
        theirs.step()
    wrapped.close()
    return numbers(ours)
