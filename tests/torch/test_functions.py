"""Parameters, optimizer states and objects for all ranks; batch normalization over all ranks; in one job of three."""

import copy
import importlib.util
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fusionlayer.torch import basics, functions, startup
from fusionlayer.torch.sync_batch_norm import SyncBatchNorm
from fusionlayer.transport import local
from tests.integrations.training import fill, make_model, train, weights
from tests.synthetic import gradient


def rank_main(rank: int, world: int = 3) -> list[str]:
    startup.init()
    checks = [
        check_parameters,
        check_optimizer_states,
        check_state_of_who_has_taken_no_step,
        check_gradients_of_who_has_taken_no_step,
        check_objects,
        check_refusals,
        check_batch_norm,
        check_batch_norm_of_uneven_batches,
        check_batch_norm_in_evaluation,
        check_batch_norm_refusals,
    ]
    for check in checks:
        check(rank, world)
    basics.shutdown()
    return [check.__name__ for check in checks]


def test_functions_and_batch_normalization() -> None:
    assert all(len(checks) == 10 for checks in local.run(rank_main, 3))


# ---- what one rank has, for all -------------------------------------------------------------------------------------


def check_parameters(rank: int, world: int) -> None:
    model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4))
    expected = copy.deepcopy(model)
    fill(expected, 1)
    for give in (model.state_dict, model.named_parameters, model.parameters, lambda: list(model.parameters())):
        fill(model, rank)
        functions.broadcast_parameters(give(), root_rank=1)
        assert torch.equal(weights(model), weights(expected))
    model[1].num_batches_tracked.fill_(rank)
    skewed = gradient(12, rank).view(3, 4).t()
    functions.broadcast_parameters({"count": model[1].num_batches_tracked, "skewed": skewed, "text": rank}, 2)
    assert model[1].num_batches_tracked == 2
    assert torch.equal(skewed, gradient(12, 2).view(3, 4).t())


def check_optimizer_states(rank: int, world: int) -> None:
    for make in (torch.optim.Adam, torch.optim.Adagrad, torch.optim.RMSprop):
        model, theirs = make_model(), make_model()
        optimizer, original = make(model.parameters(), lr=0.1 + rank), make(theirs.parameters(), lr=0.1)
        train(model, optimizer, rank, range(2 + rank))
        train(theirs, original, 0, range(2))
        functions.broadcast_optimizer_state(optimizer, root_rank=0, model=model)
        mine, expected = optimizer.state_dict(), original.state_dict()
        assert mine["param_groups"] == expected["param_groups"]
        assert mine["state"].keys() == expected["state"].keys()
        for index, state in expected["state"].items():
            assert all(same(mine["state"][index][key], value) for key, value in state.items())


def check_state_of_who_has_taken_no_step(rank: int, world: int) -> None:
    model = make_model()
    optimizer = torch.optim.SGD([*model.parameters()], lr=0.5, momentum=0.9)
    functions.broadcast_optimizer_state(optimizer, 0)
    assert not optimizer.state
    if rank == 2:
        train(model, optimizer, 2, range(3))
    functions.broadcast_optimizer_state(optimizer, 2)
    momenta = [optimizer.state[parameter]["momentum_buffer"].sum().item() for parameter in model.parameters()]
    assert len(momenta) == 4 and all(momenta)
    assert functions.allgather_object(momenta) == [momenta] * world


def check_gradients_of_who_has_taken_no_step(rank: int, world: int) -> None:
    model = nn.ModuleList([nn.Embedding(4, 2, sparse=True), nn.Embedding(4, 2), nn.Linear(2, 3), nn.Linear(3, 1)])
    sparse, table, used, frozen = [module.weight for module in model]
    used.grad = torch.ones_like(used)
    frozen.requires_grad_(False)
    functions.broadcast_optimizer_state(torch.optim.SGD(model.parameters(), lr=0.5), 0, model=model)
    assert frozen.grad is None and torch.equal(used.grad, torch.ones(3, 2))
    assert table.grad is not None and table.grad.count_nonzero() == 0
    assert sparse.grad is None, "zeros and what backward gives would be dense"
    functions.broadcast_optimizer_state(torch.optim.SparseAdam([sparse]), 0)
    assert sparse.grad is None


def check_objects(rank: int, world: int) -> None:
    thing = {"rank": rank, "values": [1.5] * rank, "tensor": torch.full((rank,), 2.0)}
    received = functions.broadcast_object(thing, root_rank=2)
    assert received["rank"] == 2 and torch.equal(received["tensor"], torch.full((2,), 2.0))
    assert (received is thing) == (rank == 2)
    assert functions.broadcast_object(None, 1, name="nothing") is None
    assert functions.allgather_object("x" * rank) == ["", "x", "xx"]
    assert functions.allgather_object(rank if rank else None, name="of several types") == [None, 1, 2]
    if importlib.util.find_spec("cloudpickle") is not None:
        call: Any = functions.broadcast_object((lambda x: x + rank) if rank == 1 else None, 1, name="function")
        assert call(10) == 11


def check_refusals(rank: int, world: int) -> None:
    with pytest.raises(ValueError, match="got an int; give model.state_dict"):
        functions.broadcast_parameters(7, 0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="cannot broadcast the state of LBFGS"):
        functions.broadcast_optimizer_state(torch.optim.LBFGS(make_model().parameters()), 0)


def same(a: Any, b: Any) -> bool:
    return torch.equal(a, b) if isinstance(a, Tensor) else a == b


# ---- batch normalization --------------------------------------------------------------------------------------------


def batch(rank: int, rows: int, *rest: int, dtype: torch.dtype = torch.float32) -> Tensor:
    numel = rows * int(torch.tensor(rest).prod())
    return gradient(max(numel, 1), 900 + rank)[:numel].view(rows, *rest).to(dtype) * (rank + 1) + 3 * rank


def against_one_process(rank: int, sizes: list[int], rest: tuple[int, ...], **options: Any) -> None:
    """Compare outputs, gradients and running statistics with torch's module on the batches of all ranks at once."""
    dtype = options.pop("dtype", torch.float32)
    mine: nn.Module = SyncBatchNorm(rest[0], **options).to(dtype)
    plain: nn.Module = (nn.BatchNorm1d if len(rest) == 1 else nn.BatchNorm2d)(rest[0], **options).to(dtype)
    for module in (mine, plain):
        fill(module, 4)
    for step in range(2):
        inputs = [batch(r + step, rows, *rest, dtype=dtype) for r, rows in enumerate(sizes)]
        x = inputs[rank].clone().requires_grad_()
        every = torch.cat(inputs).requires_grad_()
        y, expected = mine(x), plain(every)
        slope = batch(7, sum(sizes), *rest, dtype=dtype)
        (expected * slope).sum().backward()
        (y * slope.split(sizes)[rank]).sum().backward()
        assert every.grad is not None and x.grad is not None
        close = {"rtol": 1e-4, "atol": 2e-5} if dtype == torch.float32 else {"rtol": 1e-9, "atol": 1e-11}
        assert torch.allclose(y, expected.split(sizes)[rank], **close)
        assert torch.allclose(x.grad, every.grad.split(sizes)[rank], **close)
    for one, other in zip(mine.parameters(), plain.parameters(), strict=True):
        assert one.grad is not None and other.grad is not None
        total = sum(functions.allgather_object(one.grad))
        assert torch.allclose(total, other.grad, **close)
    for name, value in plain.named_buffers():
        assert torch.allclose(mine.get_buffer(name), value, **close), name


def check_batch_norm(rank: int, world: int) -> None:
    against_one_process(rank, [4, 4, 4], (5,))
    against_one_process(rank, [2, 2, 2], (3, 4, 5), momentum=None)
    against_one_process(rank, [2, 2, 2], (3, 4, 5), affine=False, dtype=torch.float64)


def check_batch_norm_of_uneven_batches(rank: int, world: int) -> None:
    against_one_process(rank, [1, 7, 2], (4,), momentum=0.3)
    against_one_process(rank, [3, 0, 1], (4,), track_running_stats=False)
    against_one_process(rank, [1, 1, 0], (2, 1, 1), dtype=torch.float64)


def check_batch_norm_in_evaluation(rank: int, world: int) -> None:
    module = SyncBatchNorm(4)
    module(batch(rank, 3, 4))
    module.eval()
    if rank == 0:  # alone: nothing is sent
        assert module(batch(0, 2, 4)).shape == (2, 4)
    half = module.train().bfloat16()(batch(rank, 3, 4, dtype=torch.bfloat16))
    assert half.dtype == torch.bfloat16


def check_batch_norm_refusals(rank: int, world: int) -> None:
    with pytest.raises(ValueError, match="at least 2D input"):
        SyncBatchNorm(4)(torch.ones(4))
    with pytest.raises(ValueError, match="more than 1 value per channel over all ranks when training, got 1"):
        SyncBatchNorm(4)(torch.ones(int(rank == 1), 4))
