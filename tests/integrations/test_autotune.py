"""Autotuned training gives what other training gives, whatever is tried, with every kind of codec."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import fusionlayer as fl
from fusionlayer import context
from fusionlayer.config import Config
from fusionlayer.errors import ConfigError
from fusionlayer.integrations.construction import autotuning
from fusionlayer.planning.autotune import search
from fusionlayer.transport import local
from tests.harness import run_ranks
from tests.integrations.test_optimizer_results import sgd
from tests.integrations.training import CLASSES, FEATURES, fill, train, weights
from tests.tiers import exhaustive, tiered

STEPS = 60


def deep_model() -> nn.Sequential:
    """Return a perceptron of 12 tensors."""
    sizes = [FEATURES, 30, 7, 50, 20, 11]
    layers = [layer for a, b in zip(sizes, sizes[1:], strict=False) for layer in (nn.Linear(a, b), nn.Tanh())]
    model = nn.Sequential(*layers, nn.Linear(sizes[-1], CLASSES))
    fill(model)
    return model


def trained(rank: int, overlap: bool = False, **options: Any) -> tuple[Tensor, set[int]]:
    """Return the weights after training, and the numbers of buckets that there were."""
    model = deep_model()
    optimizer: Any = fl.DistributedOptimizer(
        sgd(model.parameters()), model.named_parameters(), overlap_forward=model if overlap else None, **options
    )
    counts = set()
    for step in range(STEPS):
        train(model, optimizer, rank, [step])
        counts.add(len(optimizer.fusion_plan.buckets))
    optimizer.synchronize() if overlap else None
    optimizer.close()
    return weights(model), counts


def assert_same_on_all_ranks(mine: Tensor) -> None:
    every = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(every, mine)
    assert all(torch.equal(theirs, mine) for theirs in every)


def hurry() -> None:
    """Let windows be as short as they get, so that much is tried in few steps; in a process of its own."""
    search.WINDOW_SECONDS = 0.0


def check_training(rank: int, world: int, folder: str) -> None:
    """For ``raw`` the bits of untuned training, since a sum is in rank order wherever its element stands."""
    hurry()
    untuned, _ = trained(rank, planner="wfbp")
    for planner in ("wfbp", "single"):
        for overlap in (False, True):
            tuned, counts = trained(rank, overlap, planner=planner, autotune=fl.Autotune(log=f"{folder}/{planner}.csv"))
            assert len(counts) > 1, "nothing was tried"
            assert torch.equal(tuned, untuned), (planner, overlap)
    for options in (
        {"codec": "int4"},
        {"codec": "int8", "ahead": True},
        {"codec": "dgc", "density": 0.1},
        {"codec": "topk", "density": 0.1, "algorithm": "gather_v"},
    ):
        tuned, counts = trained(rank, autotune=True, planner="wfbp", **options)
        assert len(counts) > 1
        assert_same_on_all_ranks(tuned)
        assert (tuned - untuned).norm() < 0.5 * untuned.norm(), options


@pytest.mark.medium
@exhaustive(guarded_by="tests/planning/test_autotune.py::test_real_steps_with_a_slow_collective")
def test_training(tmp_path: Path) -> None:
    run_ranks(check_training, 3, str(tmp_path))
    for planner in ("wfbp", "single"):
        rows = list(csv.DictReader((tmp_path / f"{planner}.csv").open()))
        assert {"start", "walk"} <= {row["stage"] for row in rows}
        assert all(float(row["seconds"]) > 0 for row in rows)


def check_planner_that_measures(rank: int, world: int) -> None:
    """The plan that the first steps bring is where tuning begins."""
    hurry()
    untuned, _ = trained(rank)
    tuned, counts = trained(rank, autotune=True, planner="mg_wfbp")
    assert torch.equal(tuned, untuned) and len(counts) > 1


@pytest.mark.medium
def test_a_planner_that_measures_first() -> None:
    run_ranks(check_planner_that_measures, 2)


def check_ddp(rank: int, world: int) -> None:
    """DDP's gradients are fused anew: to the same bits as with the plain hook, also where parameters are unused."""

    def train_ddp(unused: bool, **options: Any) -> tuple[Tensor, Any]:
        model = deep_model()
        if unused:
            model.register_parameter("never", nn.Parameter(torch.ones(3)))
        ddp = DistributedDataParallel(model, bucket_cap_mb=0.0005, find_unused_parameters=unused)
        hook = fl.ddp.register(ddp, "raw", **options)
        optimizer, counts = sgd(ddp.parameters()), set()
        for step in range(60):
            train(ddp, optimizer, rank, [step])
            if options:
                counts.add(len(hook._engine.plan.buckets))
        assert not options or len(counts) > 1, "nothing was tried"
        state = hook.state_dict()
        hook.load_state_dict(state)
        hook.close()
        return weights(model), state

    hurry()
    for unused in (False, True):
        plain, _ = train_ddp(unused)
        tuned, state = train_ddp(unused, autotune=True)
        assert torch.equal(plain, tuned)
        assert state["step"] == 60


@pytest.mark.medium
@pytest.mark.parametrize("world", tiered([2, 3], lambda world: world == 2))
def test_ddp(world: int) -> None:
    run_ranks(check_ddp, world)


def check_ddp_feedback(rank: int, world: int) -> None:
    """What came out and what is kept is what was given, over plans and DDP's own rebuilding."""
    hurry()
    model, alone = DistributedDataParallel(deep_model(), bucket_cap_mb=0.0005), deep_model()
    hook = fl.ddp.register(model, "int4", autotune=True)
    given = {name: torch.zeros_like(p, dtype=torch.float64) for name, p in alone.named_parameters()}
    came_out = {name: torch.zeros_like(p, dtype=torch.float64) for name, p in alone.named_parameters()}
    for step in range(60):
        for each in (model, alone):
            each.zero_grad()
            ((each(torch.full((2, FEATURES), 0.1 * (step % 5) + rank))) ** 2).sum().backward()
        for name, parameter in alone.named_parameters():
            assert parameter.grad is not None
            total = parameter.grad.clone()
            dist.all_reduce(total)
            given[name] += total / world
            reduced = model.module.get_parameter(name).grad
            came_out[name] += reduced
            assert_same_on_all_ranks(reduced)
    for name, held in hook.state_dict()["residuals"].items():
        dist.all_reduce(held)
        torch.testing.assert_close(came_out[name] + held.view_as(given[name]), given[name], rtol=1e-4, atol=1e-3)
    hook.close()


@pytest.mark.medium
def test_ddp_loses_nothing() -> None:
    run_ranks(check_ddp_feedback, 2)


def check_ddp_failure(rank: int, world: int) -> None:
    """A rank that tunes alone is told so by backward, and DDP is left in order."""
    model = DistributedDataParallel(deep_model())
    fl.ddp.register(model, "raw", autotune=fl.Autotune(every=100 + rank))
    for _ in range(2):
        with pytest.raises(fl.PlanMismatch):
            model(torch.ones(1, FEATURES)).sum().backward()


@pytest.mark.medium
def test_ddp_failure() -> None:
    run_ranks(check_ddp_failure, 2)


@pytest.mark.short
def test_what_settings_and_arguments_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    def configured(**values: Any) -> None:
        monkeypatch.setattr(context, "settings", lambda: Config(**values))

    configured()
    assert autotuning(None) is None and autotuning(False) is None
    assert autotuning(True) == fl.Autotune()
    configured(autotune=True, autotune_options={"steps": 500, "drift": 0.2})
    assert autotuning(None) == fl.Autotune(steps=500, drift=0.2) == autotuning(True)
    assert autotuning(False) is None
    assert autotuning(fl.Autotune(steps=7)) == fl.Autotune(steps=7)
    with pytest.raises(ConfigError, match="autotune='yes'; expected True, False or"):
        autotuning("yes")  # type: ignore[arg-type]
    configured(autotune=True, autotune_options={"step": 500})
    with pytest.raises(ConfigError, match="unknown key 'step'; did you mean 'steps'"):
        autotuning(None)


@pytest.mark.short
def test_replan_beside_autotune_is_refused() -> None:
    def body(rank: int) -> None:
        model = deep_model()
        with pytest.raises(ConfigError, match="replan=True beside autotune"):
            fl.DistributedOptimizer(sgd(model.parameters()), model.named_parameters(), autotune=True, replan=True)

    local.run(body, 2)


@pytest.mark.short
def test_one_rank_tunes_nothing() -> None:
    def body(rank: int) -> None:
        model = deep_model()
        optimizer: Any = fl.DistributedOptimizer(sgd(model.parameters()), model.named_parameters(), autotune=True)
        train(model, optimizer, rank, range(3))
        assert optimizer.fusion_plan is None

    local.run(body, 1)
