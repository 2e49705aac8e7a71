"""The ways into fusionlayer, and plain DDP on gloo, each as the training of one small model."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

import fusionlayer as fl
import fusionlayer.torch as hvd
from fusionlayer.torch.elastic.storage import Storage

from .front import BATCH, CLASSES, FEATURES, RATE, Front, Marked, arguments

if TYPE_CHECKING:
    from .worker import Worker

__all__ = ["FRONTS", "PLAIN", "make_front"]

PLAIN = "torch-ddp"
"""The front that is not fusionlayer's."""


class Plain(Front):
    """torch's DistributedDataParallel on gloo."""

    def join(self) -> None:
        dist.init_process_group("gloo", timeout=timedelta(seconds=self.job.timeout))

    def wrap(self) -> None:
        self.model = DistributedDataParallel(self.model, find_unused_parameters=self.habits.freeze)
        self.optimizer = SGD(self.model.parameters(), lr=RATE)
        if self.habits.sum:
            self.model.register_comm_hook(None, lambda _, bucket: _summed(bucket))
        elif self.worker.flip_bucket is not None:
            flipping = _Flipping(self.worker)
            self.model.register_comm_hook(None, lambda _, bucket: flipping.reduce(bucket))

    def leave(self) -> None:
        dist.destroy_process_group()


class _Flipping:
    """A hook that averages as DDP does; one of its sums arrives with another bit."""

    def __init__(self, worker: Worker) -> None:
        self._worker, self._left = worker, worker.flip_bucket

    def reduce(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """Return the average of a bucket."""
        done = dist.all_reduce(bucket.buffer().div_(dist.get_world_size()), async_op=True).get_future()
        return done.then(lambda future: self._damaged(future.value()[0]))  # type: ignore[no-any-return]

    def _damaged(self, data: Tensor) -> Tensor:
        assert self._left is not None
        number, seed = self._left
        self._left = number - 1, seed
        if number == 0:
            whole = data.view(torch.uint8)
            bit = random.Random(seed).randrange(8 * whole.numel())
            whole[bit // 8] ^= 1 << bit % 8
            self._worker.facts["flipped"] = f"bit {bit} of {whole.numel()} bytes"
            self._worker.did()
        return data


def _summed(bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    done = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
    return done.then(lambda future: future.value()[0])  # type: ignore[no-any-return]


class Optimizer(Front):
    """``fl.DistributedOptimizer``."""

    def wrap(self) -> None:
        op = {"op": fl.Sum} if self.habits.sum else {}
        self.optimizer = fl.DistributedOptimizer(
            SGD(self.model.parameters(), lr=RATE),
            self.model.named_parameters(),
            **{**arguments(self.codec), **op, **self.habits.options},
        )

    def step(self, number: int) -> None:
        if number != self.habits.skip:
            return super().step(number)
        # The gradients arrive, and a user's condition leaves the update out.
        self.worker.at("forward", number)
        self.optimizer.zero_grad()
        self.loss(self.batch(number)).backward()
        self.optimizer.synchronize()
        self.optimizer.zero_grad()


class Hook(Plain):
    """DDP with ``fl.ddp.register``."""

    def join(self) -> None:
        fl.init()

    def wrap(self) -> None:
        self.model = DistributedDataParallel(self.model, find_unused_parameters=self.habits.freeze)
        self._hook = fl.ddp.register(self.model, **{**arguments(self.codec), **self.habits.options})
        self.optimizer = SGD(self.model.parameters(), lr=RATE)

    def leave(self) -> None:
        self._hook.close()
        fl.shutdown()


class Backend(Plain):
    """DDP over the process group ``fusionlayer``."""

    def join(self) -> None:
        rules = [{"op": "all_reduce", "min_bytes": 1, **rule_of(self.codec)}]
        # Torch has its processes meet before it asks the backend, so that wait has torch's time-out. For all that comes
        # later FUSIONLAYER_TIMEOUT is the smaller one.
        early = any(phase.name in ("start", "grouping") for _, phase in self.job.holds)
        timeout = timedelta(seconds=self.job.timeout) if early else None
        dist.init_process_group("fusionlayer", timeout=timeout, pg_options={"rules": rules})


class Group(Plain):
    """DDP over a group ``fusionlayer`` that is made in a running job, and destroyed before its end."""

    def join(self) -> None:
        fl.init()

    def wrap(self) -> None:
        rules = [{"op": "all_reduce", "min_bytes": 1, **rule_of(self.codec)}]
        self._group = dist.new_group(backend="fusionlayer", pg_options={"rules": rules})
        self.model = DistributedDataParallel(self.model, process_group=self._group)
        self.optimizer = SGD(self.model.parameters(), lr=RATE)

    def leave(self) -> None:
        dist.destroy_process_group(self._group)
        fl.shutdown()


class BackendCalls(Backend):
    """Calls of a training loop of the user's own, over the process group ``fusionlayer``."""

    def wrap(self) -> None:
        for parameter in self.model.parameters():
            dist.broadcast(parameter.data, 0)
        self.optimizer = SGD(self.model.parameters(), lr=RATE)

    def reduce(self) -> None:
        gradients = list(self.gradients().values())
        one, other = [i for i, gradient in enumerate(gradients) if gradient.shape == (self.job.width,)][:2]
        gradients[other] = gradients[other].view(-1, 5)  # as long as the one, in another shape
        if self.habits.swap:
            gradients[one], gradients[other] = gradients[other], gradients[one]
        for gradient in gradients:
            dist.all_reduce(gradient, dist.ReduceOp.SUM if self.habits.sum else dist.ReduceOp.AVG)


class Horovod(Front):
    """``fusionlayer.torch``, with Horovod's calls: parameters broadcast, gradients reduced, the loss by name."""

    def join(self) -> None:
        hvd.init()

    def wrap(self) -> None:
        if self.habits.seed is not None:  # a program without a seed has forgotten this, too
            hvd.broadcast_parameters(self.model.state_dict(), root_rank=0)
        compression = compression_of(self.codec)
        op = {"op": hvd.Sum} if self.habits.sum else {}
        self.optimizer = hvd.DistributedOptimizer(
            SGD(self.model.parameters(), lr=RATE),
            self.model.named_parameters(),
            compression=compression,
            **{**op, **self.habits.options},
        )

    def step(self, number: int) -> None:
        super().step(number)
        hvd.allreduce(torch.tensor([float(number)]), name="other" if self.habits.swap else "loss")

    def leave(self) -> None:
        hvd.shutdown()


class Elastic(Horovod):
    """``hvd.elastic.TorchState``, whose commits are kept in files."""

    def wrap(self) -> None:
        super().wrap()
        self._folder = Path(os.environ["TMPDIR"]) / f"commits-{self.rank}"
        self._elastic = hvd.elastic.TorchState(self.model, self.optimizer)
        self._elastic.keeper = Storage(self._folder, self.rank)

    def step(self, number: int) -> None:
        super().step(number)
        try:
            self._elastic.commit()
        finally:
            self.worker.facts["kept"] = Storage(self._folder, self.rank).newest()
            self.worker.facts["drafts"] = [path.name for path in self._folder.glob("*.draft")]


class HorovodCalls(Front):
    """``hvd.allreduce`` of each gradient by name."""

    def join(self) -> None:
        hvd.init()

    def wrap(self) -> None:
        if self.habits.seed is not None:
            hvd.broadcast_parameters(self.model.state_dict(), root_rank=0)
        self.optimizer = SGD(self.model.parameters(), lr=RATE)

    def reduce(self) -> None:
        op = hvd.Sum if self.habits.sum else hvd.Average
        for name, gradient in self.gradients().items():
            gradient.copy_(hvd.allreduce(gradient, name=name, op=op, compression=compression_of(self.codec)))

    def leave(self) -> None:
        hvd.shutdown()


class Sharded(Front):
    """``fl.ShardedOptimizer``."""

    def wrap(self) -> None:
        gradients = fl.codecs.get(**preset(self.codec))
        self.optimizer = fl.ShardedOptimizer(
            self.model.parameters(), torch.optim.AdamW, gradients=gradients, lr=1e-2, **self.habits.options
        )


class FullySharded(Front):
    """FSDP2 with ``fl.fsdp.compress``."""

    def wrap(self) -> None:
        from torch.distributed.fsdp import fully_shard

        mesh = dist.init_device_mesh("cpu", (self.job.world,))
        for layer in (self.layers[0], self.layers[2]):
            fully_shard(layer, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        codec = fl.codecs.get(**preset(self.codec))
        fl.fsdp.compress(self.model, codec, codec, **self.habits.options)
        self.optimizer = SGD(self.model.parameters(), lr=RATE)

    def state(self) -> list[Tensor]:
        return [parameter.to_local() for parameter in self.model.parameters()]  # type: ignore[attr-defined]


class TensorParallel(Front):
    """A perceptron whose hidden layers are cut over ranks, by ``fl.tensor_parallel.Channel``."""

    def wrap(self) -> None:
        self.channel = fl.tensor_parallel.Channel(**arguments(self.codec), **self.habits.options)
        self.optimizer = SGD(self.model.parameters(), lr=RATE)

    def make_model(self) -> nn.Module:
        width = self.job.width
        shared = nn.Linear(FEATURES, width)
        torch.manual_seed(100 + self.rank)
        mine = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, CLASSES, bias=False))
        return nn.Sequential(shared, Marked(self.worker), *mine).to(self.dtype)

    def batch(self, step: int) -> Tensor:
        generator = torch.Generator().manual_seed(1000 * step)  # the same on all ranks
        return torch.randn(BATCH, FEATURES, generator=generator).to(self.dtype)

    def loss(self, x: Tensor) -> Tensor:
        shared, cut = self.layers[:2], self.layers[2:]
        y = self.channel.reduce(cut(self.channel.copy(shared(x))))
        return (y.float() - x.float().sin()[:, :CLASSES]).square().mean()


class Functional(Front):
    """``fl.all_reduce`` of each gradient, after ``fl.broadcast_parameters``."""

    def wrap(self) -> None:
        if self.habits.seed is not None:
            fl.broadcast_parameters(self.model.state_dict())
        self.optimizer = SGD(self.model.parameters(), lr=RATE)

    def reduce(self) -> None:
        gradients = list(self.gradients().values())
        if self.habits.swap:
            gradients.reverse()
        for gradient in gradients:
            op = fl.Sum if self.habits.sum else fl.Average
            fl.all_reduce(gradient, **{**arguments(self.codec), **self.habits.options}, op=op)


class Halves(Front):
    """``fl.reduce_scatter`` and ``fl.all_gather`` of each gradient."""

    def wrap(self) -> None:
        fl.broadcast_parameters(self.model.state_dict())
        self.optimizer = SGD(self.model.parameters(), lr=RATE)

    def reduce(self) -> None:
        for gradient in self.gradients().values():
            size, length = self.job.world, gradient.numel()
            padded = torch.zeros(-(-length // size) * size)
            padded[:length] = gradient.flatten()
            part = fl.reduce_scatter(padded, **arguments(self.codec))
            whole = fl.all_gather(part, **arguments(self.codec)).flatten()
            gradient.copy_(whole[:length].view_as(gradient))


FRONTS: dict[str, Callable[[Any, str], Front]] = {
    PLAIN: Plain,
    "optimizer": Optimizer,
    "ddp": Hook,
    "backend": Backend,
    "group": Group,
    "backend-calls": BackendCalls,
    "hvd": Horovod,
    "hvd-calls": HorovodCalls,
    "elastic": Elastic,
    "sharded": Sharded,
    "fsdp": FullySharded,
    "tensor-parallel": TensorParallel,
    "functional": Functional,
    "halves": Halves,
}


def make_front(worker: Worker) -> Front:
    """Return the front of the worker's job, wrapped and ready to train."""
    name, _, codec = worker.job.front.partition(":")
    return FRONTS[name](worker, codec or "raw")


def preset(codec: str) -> dict[str, Any]:
    """Return the arguments of ``fl.codecs.get``."""
    found = arguments(codec)
    return {"name": found.pop("codec"), **found}


def compression_of(codec: str) -> Any:
    """Return the value of ``compression`` that Horovod's users would give."""
    found = preset(codec)
    name = found.pop("name")
    chosen = getattr(hvd.Compression, "none" if name == "raw" else name)
    return chosen(**found) if found else chosen


def rule_of(codec: str) -> dict[str, Any]:
    """Return the part of a rule of the backend that names the codec."""
    found = arguments(codec)
    return {"codec": found.pop("codec"), **({"options": found} if found else {})}
