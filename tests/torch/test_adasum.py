"""Adasum beside the formula, pair by pair, and the optimizer that adds up steps by it."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fusionlayer as fl
import fusionlayer.torch as hvd
from fusionlayer.torch import adasum
from fusionlayer.transport import Transport, local
from tests.integrations.training import CLASSES, fill, make_model, train, weights
from tests.loops import looped
from tests.ranks import over_threads
from tests.synthetic import gradient


def pairwise(values: list[Tensor]) -> Tensor:
    """Return the adaptive sum of neighbours, then of the sums of neighbours, and so on, in f64."""
    level = [value.double() for value in values]
    while len(level) > 1:
        sums = []
        for a, b in zip(level[::2], level[1::2], strict=True):
            both, of_a, of_b = a @ b, a @ a, b @ b
            sums.append((1 - both / (2 * of_a) if of_a else 1.0) * a + (1 - both / (2 * of_b) if of_b else 1.0) * b)
        level = sums
    return level[0]


@looped("world", [1, 2, 4, 8])
def test_is_the_formula_and_the_same_bits_on_every_rank(world: int) -> None:
    for numel in (0, 1, 7, 1000):
        for dtype, error in ((torch.float32, 2e-6), (torch.float64, 1e-14), (torch.bfloat16, 8e-3)):
            values = [(gradient(numel, 31 * rank) + gradient(numel, 5)).to(dtype) for rank in range(world)]

            def body(transport: Transport, values: list[Tensor] = values) -> Tensor:
                x = values[transport.rank].clone()
                adasum.all_reduce(x, transport)
                return x

            results = over_threads(world, body)
            assert all(torch.equal(result, results[0]) for result in results)
            assert results[0].dtype == dtype
            expected = pairwise(values)
            assert torch.linalg.vector_norm(results[0].double() - expected) <= error * expected.norm()


def test_equal_gradients_stay_orthogonal_ones_add_up_and_zeros_change_nothing() -> None:
    same = gradient(64, 1)
    unit = torch.eye(4)

    def body(transport: Transport) -> list[Tensor]:
        cases = [same.clone(), unit[transport.rank].clone(), same * (transport.rank == 2)]
        for x in cases:
            adasum.all_reduce(x, transport)
        return cases

    for equal, orthogonal, one in over_threads(4, body):
        assert torch.allclose(equal, same, rtol=1e-6)
        assert torch.equal(orthogonal, torch.ones(4))
        assert torch.equal(one, same)


def test_sends_no_more_than_an_all_reduce() -> None:
    def body(transport: Transport) -> int:
        before = transport.bytes_sent
        adasum.all_reduce(torch.ones(1 << 16), transport)
        return transport.bytes_sent - before

    whole = 4 << 16
    assert all(sent < 2 * whole * 7 / 8 + 1000 for sent in over_threads(8, body))


def test_nan_of_one_rank_is_nan_on_all() -> None:
    def body(transport: Transport) -> Tensor:
        x = torch.ones(5)
        if transport.rank == 1:
            x[3] = torch.nan
        adasum.all_reduce(x, transport)
        return x

    assert all(bool(x.isnan().all()) for x in over_threads(2, body))


def test_what_has_no_adaptive_sum_is_refused() -> None:
    def three(transport: Transport) -> None:
        with pytest.raises(fl.ConfigError, match=r"1, 2, 4, 8, \.\.\. ranks and got 3; use op=Average"):
            adasum.all_reduce(torch.ones(4), transport)

    def integers(transport: Transport) -> None:
        with pytest.raises(fl.ConfigError, match="op=Adasum of a torch.int64 tensor"):
            adasum.all_reduce(torch.ones(4, dtype=torch.int64), transport)

    over_threads(3, three)
    over_threads(2, integers)


# ---- the optimizer --------------------------------------------------------------------------------------------------


def test_optimizer_adds_up_steps() -> None:
    """Two ranks with Adam and a scheduler, beside the same in one process."""

    def rank_main(rank: int) -> Tensor:
        hvd.init()
        model = make_model()
        adam = torch.optim.Adam(model.parameters(), lr=0.01)
        optimizer = hvd.DistributedOptimizer(adam, model.named_parameters(), op=hvd.Adasum)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        assert optimizer is adam and isinstance(optimizer, torch.optim.Adam)
        for step in range(4):
            train(model, optimizer, rank, [step])
            schedule.step()
        return weights(model)

    models = [make_model(), make_model()]
    optimizers = [torch.optim.Adam(model.parameters(), lr=0.01) for model in models]
    schedules = [torch.optim.lr_scheduler.StepLR(optimizer, 2) for optimizer in optimizers]
    for step in range(4):
        starts = [parameter.detach().clone() for parameter in models[0].parameters()]
        for rank in range(2):
            train(models[rank], optimizers[rank], rank, [step])
            schedules[rank].step()
        with torch.no_grad():
            for start, a, b in zip(starts, models[0].parameters(), models[1].parameters(), strict=True):
                changes = [(p - start).reshape(-1) for p in (a, b)]
                start += pairwise(changes).view(start.shape).to(start.dtype)
                a.copy_(start)
                b.copy_(start)
    results = local.run(rank_main, 2)
    assert torch.equal(*results)
    assert torch.allclose(results[0], weights(models[0]), rtol=1e-5, atol=1e-7)


def test_optimizer_says_what_it_cannot_and_takes_parameters_that_come_later() -> None:
    def rank_main(rank: int) -> Tensor:
        hvd.init()
        model = make_model()

        def wrap(**options: Any) -> Any:
            sgd = torch.optim.SGD(model.parameters(), lr=0.1)
            return hvd.DistributedOptimizer(sgd, model.named_parameters(), op=hvd.Adasum, **options)

        for options in ({"gradient_predivide_factor": 2.0}, {"planner": "wfbp"}, {"compression": hvd.Compression.int8}):
            with pytest.raises(fl.ConfigError, match="op=Adasum with"):
                wrap(**options)
        optimizer = wrap(compression=hvd.Compression.fp16)
        optimizer.synchronize()
        with pytest.raises(AssertionError, match="reduces steps, not gradients"), optimizer.skip_synchronize():
            pass
        model[0].weight.requires_grad_(rank == 0)  # the other rank's step does not move it
        before = model[0].weight.detach().clone()
        train(model, optimizer, rank, [0])
        assert not torch.equal(model[0].weight, before)

        model.requires_grad_(True)
        model.append(nn.Linear(CLASSES, CLASSES).requires_grad_(False))
        fill(model)
        optimizer.add_param_group({"params": list(model[3].parameters())})
        train(model, optimizer, rank, [1])
        model[3].weight.requires_grad_(True)
        train(model, optimizer, rank, [2])
        hvd.shutdown()
        return weights(model)

    assert torch.equal(*local.run(rank_main, 2))
