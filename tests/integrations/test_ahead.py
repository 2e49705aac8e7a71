"""Training with gradients that are encoded one by one, ahead of fusion."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam

import fusionlayer as fl
from fusionlayer import context
from fusionlayer.transport import local
from tests.codecs.toy_sparse import toy_sparse
from tests.integrations.training import make_model, reference, train, weights
from tests.loops import looped
from tests.ranks import on_ranks

SPARSE: dict[str, Any] = {"codec": "toysparse", "density": 0.1, "warmup": 3}


@pytest.fixture(autouse=True)
def toy() -> Iterator[None]:
    with toy_sparse():
        yield


def make_pair(model: nn.Module | None = None, overlap: bool = False, **options: Any) -> tuple[nn.Module, Any]:
    model = model or make_model()
    optimizer = Adam(model.parameters(), lr=0.01)
    if overlap:
        options["overlap_forward"] = model
    return model, fl.DistributedOptimizer(optimizer, model.named_parameters(), **options)


@looped("algorithm", [None, "gather_v"])
@looped("world", [2, 3, 4])
@on_ranks()
def test_at_density_one_training_is_that_of_one_process(rank: int, world: int, algorithm: str | None) -> None:
    expected = reference(world, 3, lambda parameters: Adam(parameters, lr=0.01))
    model, optimizer = make_pair(codec="toysparse", density=1.0, algorithm=algorithm)
    train(model, optimizer, rank, range(3))
    optimizer.close()
    assert torch.equal(weights(model), expected)


@on_ranks(2)
def test_a_state_without_more_than_residuals_is_taken(rank: int) -> None:
    """As it was saved before codecs kept states of their own."""
    model, optimizer = make_pair(**SPARSE)
    train(model, optimizer, rank, range(2))
    state = optimizer.state_dict()
    mine = state["fusionlayer"]
    old = {key: mine[key] for key in ("rank", "size", "step", "residuals")}
    optimizer.load_state_dict({**state, "fusionlayer": old})
    loaded = optimizer.state_dict()["fusionlayer"]
    assert not loaded["numbers"] and not loaded["tensors"]
    assert all(torch.equal(loaded["residuals"][name], kept) for name, kept in mine["residuals"].items())


@on_ranks(2)
def test_a_broadcast_state_brings_the_step(rank: int) -> None:
    """Warm-ups and seeds depend on it; error feedback stays the rank's own."""
    model, optimizer = make_pair(**SPARSE)
    train(model, optimizer, rank, range(2))
    state = optimizer.state_dict()
    residuals = state["fusionlayer"]["residuals"]
    if rank == 0:
        optimizer.load_state_dict({**state, "fusionlayer": {**state["fusionlayer"], "step": 7}})
    fl.broadcast_optimizer_state(optimizer, root_rank=0)
    mine = optimizer.state_dict()["fusionlayer"]
    assert mine["step"] == 7 and mine["rank"] == rank
    assert all(torch.equal(mine["residuals"][name], kept) for name, kept in residuals.items())
    plain = SGD(model.parameters(), lr=0.1)
    fl.broadcast_optimizer_state(plain, root_rank=0)


def test_the_configuration_and_the_argument_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    def ahead(**options: Any) -> set[bool]:
        def rank_main(rank: int) -> set[bool]:
            model, optimizer = make_pair(codec="toysparse", **options)
            train(model, optimizer, rank, range(1))
            buckets = {bucket.ahead for bucket in optimizer.fusion_plan.buckets}
            optimizer.close()
            return buckets

        return local.run(rank_main, 2)[0]

    assert ahead() == {True} and ahead(ahead=False) == {False}
    monkeypatch.setattr(context, "settings", lambda: fl.config.Config(planning=fl.config.PlanningSettings(ahead=False)))
    assert ahead() == {False} and ahead(ahead=True) == {True}
