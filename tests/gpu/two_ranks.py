"""What two ranks do over NCCL and must do over gloo to the same bits: the bodies of ``test_nccl.py``.

Each is called as ``body(rank, world, device, ...)`` in a process of its own and returns numbers to compare. With
``device`` "cpu" it runs over gloo, in the fast and exhaustive tiers too, so that all of it is known to work before
there is a GPU.

NCCL refuses two ranks that share a device, unless it takes them for two hosts: it tells hosts by ``NCCL_HOSTID``. Then
messages go through sockets of the loopback, which is slow, and enough to see that sums, orders and failures are right.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

import fusionlayer as fl
import fusionlayer.torch as hvd
from fusionlayer import codecs, collectives
from fusionlayer.transport import C10dTransport, c10d
from fusionlayer.transport._peer_link import PeerLink
from tests.gpu.place import TensorsOn
from tests.harness import checkpoint
from tests.integrations.training import CLASSES, FEATURES, HIDDEN, fill, make_batch
from tests.synthetic import gradient
from tests.torch import behaviours
from tests.transport import conformance

STEPS = 4
NCCL = {
    "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
    "NCCL_IB_DISABLE": "1",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_MAX_CTAS": "1",
    "NCCL_MULTI_RANK_GPU_ENABLE": "1",  # from 2.30 on
    # Two communicators whose operations two threads launch at once are an error, not a rare hang.
    "NCCL_LAUNCH_ORDER_IMPLICIT": "1",
    "NCCL_LAUNCH_RACE_FATAL": "1",
}
TIMEOUT = 5.0


def place(rank: int, device: str, timeout: float = 60.0) -> torch.device:
    """Return the device of this rank, which both share; NCCL has not looked at its variables before."""
    os.environ["FUSIONLAYER_TIMEOUT"] = str(timeout)
    if device == "cpu":
        return torch.device("cpu")
    os.environ.update(NCCL, NCCL_HOSTID=f"rank-{rank}", CUBLAS_WORKSPACE_CONFIG=":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.cuda.set_device(0)
    return torch.device("cuda", 0)


def wait_for(device: torch.device) -> None:
    """Wait until the device has done what this thread has asked for. It looks again and again: a wait inside CUDA would
    hold up the thread that aborts an operation which never ends."""
    if device.type == "cuda":
        done = torch.cuda.current_stream(device).record_event()
        while not done.query():
            time.sleep(0.001)


# ---- the transport --------------------------------------------------------------------------------------------------


def meet(rank: int, world: int, device: str) -> list[float]:
    """Sum by torch alone: if this fails, this machine cannot run two ranks on one device, whatever we do."""
    x = torch.full((1000,), rank + 1.0, device=place(rank, device))
    dist.all_reduce(x)
    return x[:3].tolist()


def connect(on: torch.device, timeout: float, peers: bool) -> C10dTransport:
    """Return a transport whose messages travel by peer memory, if ``peers`` and the device has such a thing."""
    with mock.patch.object(c10d, "is_faster", lambda *_: True):  # whatever is measured
        transport = C10dTransport(timeout=timeout, peer_bytes=(1 << 20) * peers)
    assert on.type == "cpu" or isinstance(transport._links["cuda"], PeerLink) == peers
    return transport


def conform(rank: int, world: int, device: str, peers: bool) -> None:
    """What every transport must do, with tensors on the device."""
    on = place(rank, device)
    transport = connect(on, 30.0, peers)
    for check in conformance.CHECKS:
        try:
            with TensorsOn(on):
                check(transport)
        except BaseException as error:
            raise AssertionError(f"{check.__name__}: {error}") from error
    transport.close()


def in_parts(rank: int, world: int, device: str, peers: bool) -> list[float]:
    """Subsets in another order and of one rank alone, a duplicate, and messages both ways at once."""
    on = place(rank, device)
    transport = connect(on, 30.0, peers)
    turned, alone, twin = transport.subset([1, 0]), transport.subset([rank]), transport.duplicate()
    assert (turned.rank, turned.size, alone.size) == (1 - rank, 2, 1)
    kept = []
    for number, each in enumerate((turned, alone, twin, transport)):
        x = gradient(5000, 10 * number + rank).to(on)
        each.all_reduce(x)
        kept.append(x)
    sends = [gradient(1000 * (1 + peer), 50 + rank).to(on).view(torch.uint8) for peer in range(2)]
    recvs = [torch.empty(4000 * (1 + rank), dtype=torch.uint8, device=on) for _ in range(2)]
    turned.exchange(sends[::-1], recvs[::-1])
    kept += [each.view(torch.float32) for each in recvs]
    for sender in (0, 1):
        x = gradient(300, 60 + sender).to(on) if rank == sender else torch.empty(300, device=on)
        twin.send(x, 1 - rank, tag=5) if rank == sender else twin.recv(x, sender, tag=5)
        kept.append(x)
    for each in (turned, alone, twin, transport):
        each.close()
    return torch.cat(kept).tolist()


def in_one_launch(rank: int, world: int, device: str) -> list[float]:
    """Sums whose kernels write into each other's memory, several in a row. Over gloo they travel as messages.

    The transport measures whether messages travel by peer memory, too.
    """
    on = place(rank, device)
    transport = C10dTransport(timeout=30.0, peer_bytes=8 << 20)
    kept = []
    for number, (name, numel) in enumerate((("int4", 5_000_001), ("tlq_hs", 100), ("int8", 70_000), ("taco", 300_000))):
        x, residual = gradient(numel, 10 * number + rank).to(on), torch.zeros(numel, device=on) if number < 2 else None
        collectives.get("two_shot")(x, codecs.get(name).bare, transport, seed=number, residual=residual)
        kept.append(x if residual is None else torch.cat([x, residual]))
    transport.drain()
    transport.close()
    return torch.cat(kept)[::7].tolist()


def beyond_32_bits(rank: int, world: int, device: str, numel: int) -> list[float]:
    """Sum a tensor whose elements, and message whose bytes, 32 bits cannot count; return the errors of three places."""
    on = place(rank, device, timeout=120.0)
    period = gradient(4097, rank).to(on, torch.bfloat16)
    x = period.repeat(-(-numel // 4097))[:numel]
    fl.init()
    fl.all_reduce(x, codec="int8", op=fl.Sum)
    exact = sum(gradient(4097, each).double() for each in range(world))
    errors = []
    for start in (0, numel // 2 // 4097 * 4097, numel // 4097 * 4097 - 4097):
        part = x[start : start + 4097].cpu().double()
        errors.append(float((part - exact).norm() / exact.norm()))
    fl.shutdown()
    return errors


# ---- trainers -------------------------------------------------------------------------------------------------------


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
    """FSDP2 of torch, sums of torch, a channel and an optimizer of ours, each with a communicator of its own.

    While backward calls torch's, buckets of ours leave. NCCL ends the process where two threads launch at once.
    """
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


# ---- failures -------------------------------------------------------------------------------------------------------


def lose_the_other(rank: int, world: int, device: str, peers: bool) -> None:
    """Rank 1 gets a signal at the checkpoint. The other goes on until it is told, which must be soon."""
    on = place(rank, device)
    transport = connect(on, TIMEOUT, peers)
    x = torch.zeros(2, 3 << 20, dtype=torch.uint8, device=on)

    def call() -> None:
        transport.all_to_all(x, torch.empty_like(x)) if peers else transport.all_reduce(x)
        wait_for(on)

    call()
    checkpoint("summed")
    while True:
        call()


def close_at_once(rank: int, world: int, device: str, numel: int) -> list[float]:
    """Close while the device still sums what the last step has sent: the update gets whole sums."""
    on = place(rank, device)
    parameter = nn.Parameter(torch.zeros(numel, device=on))
    wrapped: Any = fl.DistributedOptimizer(torch.optim.SGD([parameter], lr=1.0), [("p", parameter)], codec="raw")
    given = gradient(numel, rank).to(on)
    for _ in range(2):
        wrapped.zero_grad()
        (parameter * given).sum().backward()
        wrapped.step()
    wrapped.close()
    wait_for(on)
    expected = -2 * sum(gradient(numel, each) * 0.5 for each in range(world))
    wrong = int((parameter.detach().cpu() != expected).sum())
    assert not wrong, f"{wrong} of {numel} elements are not summed"
    return []


def break_the_device(rank: int, world: int, device: str) -> None:
    """Rank 1's device fails in a kernel of the user's own: neither a call of ours nor the network is to blame."""
    on = place(rank, device)
    transport = C10dTransport(timeout=TIMEOUT)
    x = torch.zeros(1000, device=on)
    transport.all_reduce(x)
    wait_for(on)
    if rank == 1:
        torch._assert_async(torch.zeros((), device=on))
    while True:
        transport.all_reduce(x)
        time.sleep(0.01)
        if rank == 0:
            wait_for(on)
