"""Gradients are averaged once: whatever else averages those of the same parameters is refused."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

import fusionlayer as fl
import fusionlayer.torch as hvd
from tests.harness import run_ranks
from tests.loops import looped

TWICE = "is averaged by a {} already, and would be averaged twice"


def sgd(model: nn.Module) -> Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def backward(model: nn.Module) -> None:
    model(torch.ones(2, 3)).sum().backward()


class DeepSpeedEngine(nn.Module):
    """A stand-in: an engine is a module that holds the user's as ``module``, and DeepSpeed is slow to import."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


class FullyShardedDataParallel(DeepSpeedEngine):
    """A stand-in: FSDP1 refuses to run without an accelerator."""


class _Horovods(Optimizer):
    _allreduce_grad_async = synchronize = None


def horovods(model: nn.Module) -> Optimizer:
    """Return an optimizer as the real Horovod makes it: of a new class, below that of the optimizer."""
    optimizer = sgd(model)
    optimizer.__class__ = type("SGD", (torch.optim.SGD,), dict(vars(_Horovods)))
    return optimizer


MAKERS: dict[str, Callable[..., Any]] = {
    "fl": fl.DistributedOptimizer,
    "hvd": hvd.DistributedOptimizer,
    "Adasum": partial(hvd.DistributedOptimizer, op=hvd.Adasum),
    "local steps": partial(fl.DistributedOptimizer, sync=fl.Local(every=2)),
    "sharded": lambda optimizer, *_: fl.ShardedOptimizer(
        [p for group in optimizer.param_groups for p in group["params"]], torch.optim.SGD, lr=0.1
    ),
}

# What averages gradients of a model, and what the error calls it.
AVERAGING: dict[str, Callable[[nn.Module], Any]] = {
    "DistributedDataParallel": DistributedDataParallel,
    "FullyShardedDataParallel": FullyShardedDataParallel,
    "DeepSpeedEngine": DeepSpeedEngine,
    "SGD that Horovod has wrapped": horovods,
}


def check_refused(rank: int, world: int) -> None:
    """Try each way to average twice: the model or what is in it, names or parameters alone, by each optimizer."""
    hvd.init()
    for what, wrap in AVERAGING.items():
        for kind, make in MAKERS.items():
            net = nn.Linear(3, 2)
            around = wrap(net)
            outer = around if isinstance(around, nn.Module) else net
            for given in ([], [net.named_parameters()], [outer]) if kind == "fl" else ([],):
                with pytest.raises(fl.ConfigError, match=TWICE.format(what)):
                    make(sgd(outer), *given)
            del around, outer, given
            closing = make(sgd(net))  # what has gone averages nothing
            if hasattr(closing, "close"):
                closing.close()


def check_later(rank: int, world: int) -> None:
    """The optimizer is first, and what averages comes later: refused in the first step, in backward or in ``step``."""
    hvd.init()
    for kind in ("fl", "hvd", "local steps"):
        net = nn.Linear(3, 2)
        optimizer = MAKERS[kind](sgd(net), net.named_parameters())
        model = DistributedDataParallel(net)
        with pytest.raises(fl.ConfigError, match=TWICE.format("DistributedDataParallel")):
            backward(model)
            optimizer.step()
        if kind != "local steps":
            with pytest.raises(fl.ConfigError, match="belongs to a DistributedOptimizer already"):
                fl.ddp.register(model)
        optimizer.close()
        fl.ddp.register(model).close()
    net = nn.Linear(3, 2)
    sharded = fl.ShardedOptimizer(net.parameters(), torch.optim.SGD, lr=0.1)
    with pytest.raises(fl.ConfigError, match=TWICE.format("ShardedOptimizer")):
        fl.ddp.register(DistributedDataParallel(net))
    with pytest.raises(fl.ConfigError, match=TWICE.format("ShardedOptimizer")):
        fl.DistributedOptimizer(sharded)
    part, rest = nn.Linear(3, 2), nn.Linear(3, 2)
    optimizer = fl.DistributedOptimizer(sgd(part))
    averaging = DistributedDataParallel(rest)
    backward(part)
    optimizer.step()
    with pytest.raises(fl.ConfigError, match=TWICE.format("DistributedDataParallel")):
        optimizer.add_param_group({"params": [*rest.parameters()]})
    assert len(optimizer.param_groups) == 1 and averaging is not None
    optimizer.close()


def check_once(rank: int, world: int) -> list[float]:
    """Average by two things, each its own part: nothing is refused, and each gradient is averaged once."""
    fl.init()
    net = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 1, bias=False))
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, ["0.weight"])
    model = DistributedDataParallel(net)
    optimizer = fl.DistributedOptimizer(sgd(net[0]), net[0])
    nn.utils.vector_to_parameters(torch.ones(12), net.parameters())
    model(torch.full((1, 3), rank + 1.0)).sum().backward()
    optimizer.synchronize()
    found = [p.grad[0, 0].item() for p in net.parameters() if p.grad is not None]
    optimizer.close()
    alone = dist.new_group([rank], use_local_synchronization=True)
    within = DistributedDataParallel(nn.Linear(3, 2), process_group=alone)  # local steps between such groups
    fl.DistributedOptimizer(sgd(within), sync=fl.Local(every=2)).close()
    return found


class LightningOptimizer:
    """As Lightning's: it takes the class of what it wraps as a base."""

    __module__ = "lightning.pytorch.core.optimizer"

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self.__class__ = type("LightningSGD", (LightningOptimizer, type(optimizer)), {"__module__": self.__module__})


class DeepSpeedZeroOptimizer:
    """As DeepSpeed's, which is no ``Optimizer``."""

    __module__ = "deepspeed.runtime.zero"

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer


class AcceleratedOptimizer(Optimizer):
    """As Accelerate's."""

    __module__ = "accelerate.optimizer"

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer


@looped("wrap", [LightningOptimizer, DeepSpeedZeroOptimizer, AcceleratedOptimizer])
def test_what_a_framework_has_wrapped_is_refused(wrap: Callable[[Optimizer], Any]) -> None:
    with pytest.raises(fl.ConfigError, match="around SGD, which steps and averages.*give the plain optimizer"):
        fl.DistributedOptimizer(wrap(sgd(nn.Linear(3, 2))))
    with pytest.raises(fl.ConfigError, match="got Horovod's SGD, .*as it was before Horovod wrapped it"):
        fl.DistributedOptimizer(horovods(nn.Linear(3, 2)))


@pytest.mark.medium
@pytest.mark.parametrize("check", [check_refused, check_later])
def test_averaging_twice_is_refused(check: Callable[..., Any]) -> None:
    run_ranks(check, 2, timeout=100)


@pytest.mark.medium
def test_parameters_that_others_leave_out_are_averaged() -> None:
    assert run_ranks(check_once, 2) == [[1.5, 4.5]] * 2
