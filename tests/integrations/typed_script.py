"""Users' code for type checkers: what is right, and what is wrong, where each error must be found.

mypy reads this file and nobody runs it. It finds an error in every line that says so; a comment without one is an
error too (``warn_unused_ignores``).
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import StepLR

import fusionlayer as fl


def right(model: nn.Linear, batches: Iterable[Tensor], options: dict[str, Any]) -> None:
    optimizer = fl.DistributedOptimizer(
        SGD(model.parameters(), lr=0.1), model.named_parameters(), codec="int", bits=4, overlap_forward=model
    )
    schedule = StepLR(optimizer, 1)
    for batch in batches:
        optimizer.zero_grad()
        model(batch).sum().backward()
        optimizer.synchronize()
        with optimizer.skip_synchronize():
            optimizer.step()
        schedule.step()
    plan: fl.FusionPlan | None = optimizer.fusion_plan
    if plan is not None:
        plan.to_yaml(Path("plan.yaml"))
    wrapped: fl.Distributed = fl.DistributedOptimizer(SGD(model.parameters()), **options)
    as_before: Optimizer = wrapped
    as_before.state_dict()
    total: Tensor = fl.all_reduce(torch.ones(3), codec="topk", density=0.1, op=fl.Sum)
    fl.ddp.register(DistributedDataParallel(model), codec="powersgd", rank=2).close()
    engine, *_ = fl.deepspeed.initialize(model=model, model_parameters=model.parameters(), config={"fusionlayer": {}})
    engine.step(total)


def wrong(model: nn.Linear) -> None:
    sgd = SGD(model.parameters())
    fl.DistributedOptimizer(sgd, codce="int8")  # type: ignore[call-arg]
    fl.DistributedOptimizer(sgd, codec="int", bits="four")  # type: ignore[arg-type]
    fl.DistributedOptimizer(sgd, 3)  # type: ignore[arg-type]
    fl.DistributedOptimizer(model)  # type: ignore[arg-type]
    fl.DistributedOptimizer(sgd).synchronise()  # type: ignore[attr-defined]
    print(fl.DistributedOptimizer(sgd).fusion_plan.buckets)  # type: ignore[union-attr]
    fl.all_reduce([1.0])  # type: ignore[arg-type]
    fl.all_gather(torch.ones(3), codec="topk", densty=0.1)  # type: ignore[call-arg]
    fl.reduce_scatter(torch.ones(3), "int8", rounding="up")  # type: ignore[arg-type]
    fl.ddp.register(model, "int8")  # type: ignore[arg-type]
    fl.deepspeed.initialize(modle=model)  # type: ignore[call-arg]
    fl.deepspeed.initialize(model=model, config=3)  # type: ignore[arg-type]
