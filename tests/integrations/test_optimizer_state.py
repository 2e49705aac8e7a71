"""What a checkpoint holds, and what is broadcast at the start."""

import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Adam

import fusionlayer as fl
from fusionlayer.transport import local
from tests.integrations.training import fill, loss_of, make_model, train, weights
from tests.loops import looped
from tests.ranks import on_ranks


def make_pair(**options: Any) -> tuple[nn.Module, Any]:
    model = make_model()
    return model, fl.DistributedOptimizer(Adam(model.parameters(), lr=0.01), model.named_parameters(), **options)


def save(state: dict[str, Any]) -> bytes:
    file = io.BytesIO()
    torch.save(state, file)
    return file.getvalue()


def load(data: bytes) -> dict[str, Any]:
    return torch.load(io.BytesIO(data), weights_only=True)


@on_ranks(2)
def test_a_state_of_another_rank_is_refused_unless_the_rank_has_its_own(rank: int) -> None:
    model, optimizer = make_pair(codec="int4")
    train(model, optimizer, rank, range(2))
    state = optimizer.state_dict()
    mine = state["fusionlayer"]
    assert (mine["rank"], mine["size"], mine["step"]) == (rank, 2, 2)
    assert mine["residuals"].keys() == dict(model.named_parameters()).keys()
    assert all(residual.any() for residual in mine["residuals"].values())

    def kept() -> bool:
        loaded = optimizer.state_dict()["fusionlayer"]
        same = (torch.equal(loaded["residuals"][name], kept) for name, kept in mine["residuals"].items())
        return loaded["step"] == 2 and all(same)

    for key, value in (("rank", 1 - rank), ("size", 3)):
        other = {**state, "fusionlayer": {**mine, key: value}}
        with pytest.raises(fl.ConfigError, match=rf"of rank \d of \d, this is rank {rank} of 2; .* every rank"):
            optimizer.load_state_dict(other)
        assert kept(), "a refused state changes nothing"
        optimizer.load_state_dict(state)
        optimizer.load_state_dict(other)  # as frameworks do that load rank 0's state everywhere
        assert kept()
        with pytest.raises(fl.ConfigError, match="every rank"):
            optimizer.load_state_dict({**state, "fusionlayer": {**other["fusionlayer"], "step": 7}})
        optimizer.reducer.restored = None
    optimizer.load_state_dict({**state, "fusionlayer": {"rank": 1 - rank, "size": 2, "step": 7}})
    loaded = optimizer.state_dict()["fusionlayer"]
    assert loaded["step"] == 7, "a state without error feedback serves all ranks"
    assert not any(residual.any() for residual in loaded["residuals"].values())
    optimizer.load_state_dict(state)
    assert kept()


@on_ranks(2)
def test_state_is_exchanged_with_the_plain_optimizer(rank: int) -> None:
    model, optimizer = make_pair(codec="int4")
    train(model, optimizer, rank, range(2))
    plain = Adam(model.parameters(), lr=1.0)
    plain.load_state_dict(optimizer.state_dict())
    assert plain.param_groups[0]["lr"] == 0.01
    assert torch.equal(plain.state[model[0].weight]["exp_avg"], optimizer.state[model[0].weight]["exp_avg"])
    residuals = optimizer.state_dict()["fusionlayer"]["residuals"]
    optimizer.load_state_dict(plain.state_dict())
    kept = optimizer.state_dict()["fusionlayer"]["residuals"]
    assert all(torch.equal(kept[name], residual) for name, residual in residuals.items())


@on_ranks(3)
def test_broadcast_parameters_gives_the_roots_values_in_place(rank: int) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    fill(model, stream=rank)
    model[1].num_batches_tracked.fill_(rank)
    state = {
        **model.state_dict(),
        "empty": torch.full((0, 3), float(rank)),
        "strided": torch.full((4, 3), float(rank)).t(),
        "flag": torch.tensor([rank == 1, False]),
        "note": f"not a tensor, on rank {rank}",
    }
    address = model[0].weight.data_ptr()
    fl.broadcast_parameters(state, root_rank=1)
    assert model[0].weight.data_ptr() == address
    expected = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    fill(expected, stream=1)
    for name, value in expected.named_parameters():
        assert torch.equal(state[name], value)
    assert model[1].num_batches_tracked == 1
    assert torch.equal(state["strided"], torch.ones(3, 4)) and state["strided"].stride() == (1, 3)
    assert state["flag"].tolist() == [True, False]
    assert state["note"] == f"not a tensor, on rank {rank}"
    fill(model, stream=rank)
    fl.broadcast_parameters(model.named_parameters(), root_rank=0)
    fill(expected, stream=0)
    assert torch.equal(weights(model), weights(expected))


@looped("other", ["name", "shape", "type", "root", "missing"])
def test_broadcast_of_different_things_is_a_mismatch_on_every_rank(other: str) -> None:
    def rank_main(rank: int) -> tuple[int, ...]:
        odd = rank == 1
        params = {f"weight {i}": torch.zeros(3) for i in range(40)}
        if odd and other == "name":
            params["another"] = params.pop("weight 0")
        elif odd and other == "shape":
            params["weight 0"] = torch.zeros(2)
        elif odd and other == "type":
            params["weight 0"] = torch.zeros(3, dtype=torch.int32)
        elif odd and other == "missing":
            del params["weight 0"]
        with pytest.raises(fl.PlanMismatch) as error:
            fl.broadcast_parameters(params, root_rank=1 if odd and other == "root" else 0)
        assert len(str(error.value)) < 600, "all names of a model are too much for a message"
        return error.value.ranks

    assert local.run(rank_main, 3) == [(1,)] * 3


@on_ranks(2)
def test_broadcast_arguments_are_checked(rank: int) -> None:
    with pytest.raises(fl.ConfigError, match=r"model\.state_dict\(\)"):
        fl.broadcast_parameters([torch.zeros(3)])  # type: ignore[list-item]
    for root in (-1, 2):
        with pytest.raises(fl.ConfigError, match="0 to 1"):
            fl.broadcast_parameters({"w": torch.zeros(3)}, root_rank=root)
        with pytest.raises(fl.ConfigError, match="0 to 1"):
            fl.broadcast_object("x", root_rank=root)


@on_ranks(3)
def test_broadcast_object(rank: int) -> None:
    given = {"rank": rank, "list": [rank, None, "x"], "tensor": torch.arange(3) * rank}
    found = fl.broadcast_object(given, root_rank=2)
    assert found["rank"] == 2 and found["list"] == [2, None, "x"] and found["tensor"].tolist() == [0, 2, 4]
    assert fl.broadcast_object(None if rank else "", 0) == ""


def test_state_saved_between_backward_and_step_does_not_disturb_the_step() -> None:
    def rank_main(rank: int) -> Tensor:
        model, optimizer = make_pair()
        loss_of(model, rank, 0).backward()
        if rank == 0:
            save(optimizer.state_dict())
        optimizer.step()
        return weights(model)

    first, second = local.run(rank_main, 2)
    assert torch.equal(first, second)
