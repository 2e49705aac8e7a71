"""torch.amp.GradScaler around a DistributedOptimizer, without a word about synchronize()."""

from typing import Any

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.optim import SGD, Adam

import fusionlayer as fl
from fusionlayer.transport import local
from tests.integrations.training import averaged, loss_of, make_model, weights
from tests.loops import looped
from tests.ranks import on_ranks


def scaled_training(rank: int, steps: int, *, clip: bool = False, inf_at: int | None = None, **options: Any) -> Any:
    """Return weights, scale and residuals; the loss of rank 1 is infinite in step ``inf_at``."""
    model = make_model()
    optimizer: Any = fl.DistributedOptimizer(SGD(model.parameters(), lr=0.1), model.named_parameters(), **options)
    scaler = GradScaler("cpu", init_scale=1024.0, growth_interval=1000)
    for step in range(steps):
        optimizer.zero_grad()
        loss = loss_of(model, rank, step)
        if step == inf_at and rank == 1:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        if clip:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        scaler.step(optimizer)
        scaler.update()
    residuals = optimizer.state_dict()["fusionlayer"]["residuals"]
    return weights(model), scaler.get_scale(), residuals


def test_clipping_after_unscale() -> None:
    model = make_model()
    expected = averaged(model, SGD(model.parameters(), lr=0.1), 2, range(3), clip=0.05)
    results = local.run(lambda rank: scaled_training(rank, 3, clip=True), 2)
    for result, _, _ in results:
        assert torch.equal(result, results[0][0])
        torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-7)


@looped("clip", [False, True])
@looped(
    "options",
    [{"codec": "raw"}, {"codec": "fp16"}, {"codec": "int8", "error_feedback": True}],
    ids=lambda o: o["codec"],
)
@on_ranks(2)
def test_infinity_on_one_rank_makes_all_ranks_skip(rank: int, options: dict[str, Any], clip: bool) -> None:
    before, scale, _ = scaled_training(rank, 1, clip=clip, **options)
    assert scale == 1024.0
    skipped, scale, residuals = scaled_training(rank, 2, clip=clip, inf_at=1, **options)
    assert scale == 512.0
    assert torch.equal(skipped, before), "the step was taken"
    assert all(torch.isfinite(residual).all() for residual in residuals.values())
    after, scale, residuals = scaled_training(rank, 4, clip=clip, inf_at=1, **options)
    assert scale == 512.0
    assert torch.isfinite(after).all() and not torch.equal(after, before)
    assert all(torch.isfinite(residual).all() for residual in residuals.values())
    other = after.clone()
    local.current().broadcast(other, 0)
    assert torch.equal(other, after)


def test_optimizer_that_unscales_in_its_own_kernel() -> None:
    def rank_main(rank: int) -> Tensor:
        model = make_model()
        optimizer = fl.DistributedOptimizer(Adam(model.parameters(), lr=0.01, fused=True), model.named_parameters())
        scaler = GradScaler("cpu", init_scale=1024.0)
        for step in range(3):
            optimizer.zero_grad()
            loss = loss_of(model, rank, step)
            scaler.scale(loss * float("inf") if step == 1 and rank == 0 else loss).backward()
            scaler.step(optimizer)
            scaler.update()
        assert scaler.get_scale() == 512.0
        return weights(model)

    first, second = local.run(rank_main, 2)
    assert torch.equal(first, second)
    assert torch.isfinite(first).all() and not torch.equal(first, weights(make_model()))
