"""The ways into fusionlayer, and plain DDP on gloo, each as the training of one small model."""

from __future__ import annotations

import os
import random
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
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

if TYPE_CHECKING:
    from .worker import Worker

__all__ = ["FRONTS", "PLAIN", "Front", "Habits", "make_front"]

PLAIN = "torch-ddp"
"""The front that is not fusionlayer's."""

FEATURES, CLASSES, BATCH = 24, 8, 6
RATE = 0.05


@dataclass(frozen=True)
class Habits:
    """What a user's program does; one rank may do otherwise.

    Attributes:
        seed: of the weights; None: left to chance.
        extra: layers more than the other ranks have.
        dtype: of the model.
        codec: in place of the job's; with options, behind a question mark: "int8?group_size=64".
        options: of the optimizer or hook.
        sum: sums gradients where others average them.
        swap: takes equally long calls in another order.
        skip: step whose update is left out.
        freeze: begins with the first layer frozen.
        unfreeze: step before which the first layer is unfrozen.
    """

    seed: int | None = 0
    extra: int = 0
    dtype: str = "float32"
    codec: str | None = None
    options: dict[str, Any] = field(default_factory=dict)
    sum: bool = False
    swap: bool = False
    skip: int | None = None
    freeze: bool = False
    unfreeze: int | None = None


class Front(ABC):
    """A rank's training.

    Attributes:
        habits: of this rank.
        codec: of the job, or of this rank.
    """

    def __init__(self, worker: Worker, codec: str) -> None:
        self.worker, self.job, self.rank = worker, worker.job, worker.rank
        self.habits = Habits(**{**self.job.habits, **self.job.changes.get(self.rank, {})})
        self.codec = self.habits.codec or codec
        self.join()
        self.dtype: torch.dtype = getattr(torch, self.habits.dtype)
        if self.habits.seed is None:
            torch.seed()
        else:
            torch.manual_seed(self.habits.seed)
        self.model: nn.Module = self.make_model()
        if self.habits.freeze:
            self.thaw(False)
        self.wrap()

    def make_model(self) -> nn.Module:
        """Return the model with its first weights."""
        width = self.job.width
        layers = [nn.Linear(FEATURES, width), _Marked(self.worker), nn.Linear(width, width), nn.Tanh()]
        layers += [nn.Linear(width, width) for _ in range(self.habits.extra)]
        return nn.Sequential(*layers, nn.Linear(width, CLASSES)).to(self.dtype)

    def thaw(self, wanted: bool) -> None:
        """Freeze the first layer, or let it learn again."""
        for parameter in self.layers[0].parameters():
            parameter.requires_grad_(wanted)

    @property
    def layers(self) -> nn.Sequential:
        """The model's layers, whatever they are wrapped in."""
        inner = getattr(self.model, "module", self.model)
        assert isinstance(inner, nn.Sequential)
        return inner

    def batch(self, step: int) -> Tensor:
        """Return this rank's input of a step."""
        generator = torch.Generator().manual_seed(1000 * step + self.rank)
        return torch.randn(BATCH, FEATURES, generator=generator).to(self.dtype)

    def loss(self, x: Tensor) -> Tensor:
        """Return what is to become less."""
        target = x.float().sin()[:, :CLASSES]
        loss: Tensor = (self.model(x).float() - target).square().mean()
        return loss

    def step(self, number: int) -> None:
        """Take one training step, and tell the points that it passes."""
        worker = self.worker
        worker.at("forward", number)
        if number == self.habits.unfreeze:
            self.thaw(True)
        self.optimizer.zero_grad()
        self.loss(self.batch(number)).backward()
        worker.at("reduced", number)
        if number != self.habits.skip:
            self.optimizer.step()
        worker.at("stepped", number)

    optimizer: Any

    def join(self) -> None:
        """Join the job, as a program of this front does."""
        fl.init()

    @abstractmethod
    def wrap(self) -> None:
        """Make ``optimizer``, and what else the front needs."""

    def state(self) -> list[Tensor]:
        """Return the final parameters: those of this rank, if ranks hold different ones."""
        return list(self.model.parameters())

    def leave(self) -> None:
        """Leave the job, as a program of this front does."""
        fl.shutdown()


class _Marked(nn.Tanh):
    """A layer whose backward is a point: the gradients of all later layers are on their way by then."""

    def __init__(self, worker: Worker) -> None:
        super().__init__()
        self._worker = worker
        self._passes = 0
        self.register_full_backward_hook(lambda *_: self._pass())

    def _pass(self) -> None:
        self._passes += 1
        self._worker.at("backward", self._passes - 1)

    def __deepcopy__(self, memo: Any) -> _Marked:
        return _Marked(self._worker)


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
            **{**_split(self.codec), **op, **self.habits.options},
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
        self._hook = fl.ddp.register(self.model, **{**_split(self.codec), **self.habits.options})
        self.optimizer = SGD(self.model.parameters(), lr=RATE)

    def leave(self) -> None:
        self._hook.close()
        fl.shutdown()


class Backend(Plain):
    """DDP over the process group ``fusionlayer``."""

    def join(self) -> None:
        rules = [{"op": "all_reduce", "min_bytes": 1, **_named(self.codec)}]
        # No timeout: FUSIONLAYER_TIMEOUT is the smaller one.
        dist.init_process_group("fusionlayer", pg_options={"rules": rules})


class Group(Plain):
    """DDP over a group ``fusionlayer`` that is made in a running job, and destroyed before its end."""

    def join(self) -> None:
        fl.init()

    def wrap(self) -> None:
        rules = [{"op": "all_reduce", "min_bytes": 1, **_named(self.codec)}]
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

    def step(self, number: int) -> None:
        worker = self.worker
        worker.at("forward", number)
        self.optimizer.zero_grad()
        self.loss(self.batch(number)).backward()
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        square = [i for i, g in enumerate(gradients) if g.ndim == 1]
        if self.habits.swap:  # the biases of the hidden layers are equally long
            gradients[square[0]], gradients[square[1]] = gradients[square[1]], gradients[square[0]]
        for gradient in gradients:
            dist.all_reduce(gradient, dist.ReduceOp.SUM if self.habits.sum else dist.ReduceOp.AVG)
        worker.at("reduced", number)
        if number != self.habits.skip:
            self.optimizer.step()
        worker.at("stepped", number)


class Horovod(Front):
    """``fusionlayer.torch``, with Horovod's calls: parameters broadcast, gradients reduced, the loss by name."""

    def join(self) -> None:
        hvd.init()

    def wrap(self) -> None:
        if self.habits.seed is not None:  # a program without a seed has forgotten this, too
            hvd.broadcast_parameters(self.model.state_dict(), root_rank=0)
        compression = _compression(self.codec)
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

    def step(self, number: int) -> None:
        worker = self.worker
        worker.at("forward", number)
        self.optimizer.zero_grad()
        self.loss(self.batch(number)).backward()
        compression = _compression(self.codec)
        op = hvd.Sum if self.habits.sum else hvd.Average
        for name, parameter in self.model.named_parameters():
            if parameter.grad is not None:
                parameter.grad = hvd.allreduce(parameter.grad, name=name, op=op, compression=compression)
        worker.at("reduced", number)
        if number != self.habits.skip:
            self.optimizer.step()
        worker.at("stepped", number)

    def leave(self) -> None:
        hvd.shutdown()


class Sharded(Front):
    """``fl.ShardedOptimizer``."""

    def wrap(self) -> None:
        gradients = fl.codecs.get(**_get(self.codec))
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
        codec = fl.codecs.get(**_get(self.codec))
        fl.fsdp.compress(self.model, codec, codec, **self.habits.options)
        self.optimizer = SGD(self.model.parameters(), lr=RATE)

    def state(self) -> list[Tensor]:
        return [parameter.to_local() for parameter in self.model.parameters()]  # type: ignore[attr-defined]


class TensorParallel(Front):
    """A perceptron whose hidden layers are cut over ranks, by ``fl.tensor_parallel.Channel``."""

    def wrap(self) -> None:
        self.channel = fl.tensor_parallel.Channel(**_split(self.codec), **self.habits.options)
        self.optimizer = SGD(self.model.parameters(), lr=RATE)

    def make_model(self) -> nn.Module:
        width = self.job.width
        shared = nn.Linear(FEATURES, width)
        torch.manual_seed(100 + self.rank)
        mine = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, CLASSES, bias=False))
        return nn.Sequential(shared, _Marked(self.worker), *mine).to(self.dtype)

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

    def step(self, number: int) -> None:
        worker = self.worker
        worker.at("forward", number)
        self.optimizer.zero_grad()
        self.loss(self.batch(number)).backward()
        op = fl.Sum if self.habits.sum else fl.Average
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        if self.habits.swap:
            gradients.reverse()
        for gradient in gradients:
            fl.all_reduce(gradient, **{**_split(self.codec), **self.habits.options}, op=op)
        worker.at("reduced", number)
        if number != self.habits.skip:
            self.optimizer.step()
        worker.at("stepped", number)


class Halves(Front):
    """``fl.reduce_scatter`` and ``fl.all_gather`` of each gradient."""

    def wrap(self) -> None:
        fl.broadcast_parameters(self.model.state_dict())
        self.optimizer = SGD(self.model.parameters(), lr=RATE)

    def step(self, number: int) -> None:
        worker = self.worker
        worker.at("forward", number)
        self.optimizer.zero_grad()
        self.loss(self.batch(number)).backward()
        for parameter in self.model.parameters():
            assert parameter.grad is not None
            size, length = self.job.world, parameter.grad.numel()
            padded = torch.zeros(-(-length // size) * size)
            padded[:length] = parameter.grad.flatten()
            part = fl.reduce_scatter(padded, **_split(self.codec))
            whole = fl.all_gather(part, **_split(self.codec)).flatten()
            parameter.grad.copy_(whole[:length].view_as(parameter.grad))
        worker.at("reduced", number)
        self.optimizer.step()
        worker.at("stepped", number)


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


def _split(codec: str) -> dict[str, Any]:
    """Return ``codec`` and its options as arguments: "int8?group_size=64" has one option."""
    name, _, text = codec.partition("?")
    pairs = [part.split("=") for part in text.split("&") if part]
    return {"codec": name, **{key: float(value) if "." in value else int(value) for key, value in pairs}}


def _get(codec: str) -> dict[str, Any]:
    found = _split(codec)
    return {"name": found.pop("codec"), **found}


def _compression(codec: str) -> Any:
    found = _get(codec)
    name = found.pop("name")
    chosen = getattr(hvd.Compression, "none" if name == "raw" else name)
    return chosen(**found) if found else chosen


def _named(codec: str) -> dict[str, Any]:
    found = _split(codec)
    return {"codec": found.pop("codec"), **({"options": found} if found else {})}
