"""What DistributedOptimizer computes: the training of one process on everybody's data, the same bits on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer

import fusionlayer as fl
from fusionlayer.transport import local
from tests.integrations.training import (
    CLASSES,
    FEATURES,
    HIDDEN,
    fill,
    loss_of,
    make_batch,
    make_model,
    reference,
    train,
    weights,
)
from tests.loops import looped

pytestmark = pytest.mark.short

MakeOptimizer = Callable[[Iterable[Tensor]], Optimizer]


def sgd(parameters: Iterable[Tensor]) -> Optimizer:
    return SGD(parameters, lr=0.1, momentum=0.9)


def adam(parameters: Iterable[Tensor]) -> Optimizer:
    return Adam(parameters, lr=0.01)


def trained(
    world: int, steps: int, make_optimizer: MakeOptimizer = sgd, dtype: torch.dtype = torch.float32, **options: Any
) -> list[Tensor]:
    """Return every rank's weights after ``steps`` steps of the same model on the ranks' own data."""

    def rank_main(rank: int) -> Tensor:
        model = make_model(dtype)
        optimizer = fl.DistributedOptimizer(make_optimizer(model.parameters()), model.named_parameters(), **options)
        train(model, optimizer, rank, range(steps))
        return weights(model)

    return local.run(rank_main, world)


def assert_same_bits(results: list[Tensor]) -> Tensor:
    for rank, result in enumerate(results):
        assert torch.equal(result, results[0]), f"rank {rank} has other weights than rank 0"
    return results[0]


@looped("dtype", [torch.float32, torch.bfloat16], ids=str)
@looped("make_optimizer", [sgd, adam])
@looped("world", [2, 3, 4])
def test_raw_training_equals_one_process_with_the_union_of_batches(
    world: int, make_optimizer: MakeOptimizer, dtype: torch.dtype
) -> None:
    result = assert_same_bits(trained(world, 4, make_optimizer, dtype))
    assert torch.equal(result, reference(world, 4, make_optimizer, dtype))


def test_average_of_gradients_equals_the_gradient_of_the_union_batch() -> None:
    model = make_model()
    x, y = (torch.cat(parts) for parts in zip(*(make_batch(rank, 0) for rank in range(3)), strict=True))
    ((model(x) - y) ** 2).mean().backward()
    SGD(model.parameters(), lr=0.1).step()
    result = trained(3, 1, lambda parameters: SGD(parameters, lr=0.1))[0]
    torch.testing.assert_close(result, weights(model), rtol=1e-5, atol=1e-7)


CODECS = [
    {"codec": "raw"},
    {"codec": "bf16"},
    {"codec": "int8"},
    {"codec": "int4"},
    {"codec": "int", "bits": 4, "rounding": "stochastic"},
    {"codec": "int4", "error_feedback": True},
    {"codec": "raw", "algorithm": "two_shot"},
    {"codec": "int8", "algorithm": "ring"},
    {"codec": "int4", "algorithm": "butterfly", "error_feedback": True},
]


@looped("codec", CODECS, ids=lambda codec: "-".join(map(str, codec.values())))
@looped("world", [2, 3, 8])
def test_every_rank_ends_with_the_same_bits_near_uncompressed_training(world: int, codec: dict[str, Any]) -> None:
    result = assert_same_bits(trained(world, 4, **codec))
    start, exact = weights(make_model()), reference(world, 4, sgd)
    assert (result - exact).norm() < 0.25 * (exact - start).norm()


@looped("codec", ["raw", "int4"])
def test_sixty_four_ranks_end_with_the_same_bits(codec: str) -> None:
    result = assert_same_bits(trained(64, 2, codec=codec))
    start, exact = weights(make_model()), reference(64, 2, sgd)
    assert (result - exact).norm() < 0.25 * (exact - start).norm()


@looped("planner", ["wfbp", "horovod", fl.planners.get("horovod", threshold=600)])
def test_planner_does_not_change_the_numbers(planner: Any) -> None:
    assert torch.equal(assert_same_bits(trained(3, 3, planner=planner)), reference(3, 3, sgd))


def plan_of(world: int, codec: str = "raw", **change: Any) -> fl.FusionPlan:
    """Return a plan of two buckets, the later layer first."""
    model = make_model()
    tensors = [fl.plan.TensorInfo(n, p.numel(), "float32", 4) for n, p in model.named_parameters()]
    algorithm = "dense" if codec == "raw" else "two_shot"
    return fl.FusionPlan.build([tensors[2:], tensors[:2]], world, codec, change, algorithm, 32)


def test_plan_may_be_given_as_object_and_as_file(tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    plan_of(3).to_yaml(path)
    for plan in (plan_of(3), path, str(path)):
        assert torch.equal(assert_same_bits(trained(3, 3, plan=plan)), reference(3, 3, sgd))


def test_plan_names_its_own_codec() -> None:
    with_plan = assert_same_bits(trained(2, 3, plan=plan_of(2, "int4"), codec="raw"))
    without = assert_same_bits(trained(2, 3, codec="raw"))
    assert not torch.equal(with_plan, without)


@pytest.mark.parametrize("broken", ["world", "codec", "algorithm", "model", "file"])
def test_plan_that_cannot_be_used_is_refused_when_it_is_given(broken: str, tmp_path: Path) -> None:
    plan: Any = plan_of(5 if broken == "world" else 2)
    if broken in ("codec", "algorithm"):
        buckets = tuple(fl.plan.Bucket(**{**vars(bucket), broken: "no_such"}) for bucket in plan.buckets)
        plan = fl.FusionPlan(buckets, 2)
    elif broken == "model":
        plan = fl.FusionPlan(plan.buckets[:1], 2)
    elif broken == "file":
        plan = tmp_path / "plan.yaml"
        plan.write_text("buckets: [")

    def rank_main(rank: int) -> str:
        model = make_model()
        with pytest.raises(fl.ConfigError) as error:
            fl.DistributedOptimizer(sgd(model.parameters()), model.named_parameters(), plan=plan)
        return str(error.value)

    message = local.run(rank_main, 2)[0]
    assert ("no_such" if broken in ("codec", "algorithm") else "plan") in message


def test_groups_become_buckets() -> None:
    def rank_main(rank: int) -> tuple[list[list[str]], list[list[str]], list[list[str]]]:
        found = []
        for groups in (2, 100, "lists"):
            model = make_model()
            members = list(model.parameters())
            lists = [[members[0], members[3]], [members[1]]]
            optimizer = fl.DistributedOptimizer(
                sgd(members), model.named_parameters(), groups=lists if groups == "lists" else groups
            )
            train(model, optimizer, rank, range(2))
            found.append(sorted(sorted(bucket.names) for bucket in optimizer._fl_engine.plan.buckets))
            assert torch.equal(weights(model), reference(2, 2, sgd))
        return found[0], found[1], found[2]

    two, many, lists = local.run(rank_main, 2)[0]
    assert two == [["0.bias", "0.weight"], ["2.bias", "2.weight"]]
    assert many == [["0.bias"], ["0.weight"], ["2.bias"], ["2.weight"]]
    assert lists == [["0.bias"], ["0.weight", "2.bias"], ["2.weight"]]


def test_num_groups_is_deprecated_and_still_means_groups() -> None:
    def rank_main(rank: int) -> int:
        model = make_model()
        optimizer = fl.DistributedOptimizer(sgd(model.parameters()), model.named_parameters(), num_groups=2)
        train(model, optimizer, rank, range(1))
        return len(optimizer._fl_engine.plan.buckets)

    with pytest.warns(DeprecationWarning, match="groups=<number>"):
        assert local.run(rank_main, 2) == [2, 2]


@looped("groups", [None, 2])
@looped("factor", [0.25, 3.0, 8.0])
def test_predivide_factor_leaves_an_average_with_and_without_groups(factor: float, groups: int | None) -> None:
    result = assert_same_bits(trained(3, 3, gradient_predivide_factor=factor, groups=groups))
    torch.testing.assert_close(result, reference(3, 3, sgd), rtol=1e-5, atol=1e-6)


def test_predivide_factor_divides_before_the_sum() -> None:
    """Three ranks with 30000 in float16: the sum alone would be infinite."""

    def rank_main(rank: int) -> Tensor:
        weight = nn.Parameter(torch.zeros(8, dtype=torch.float16))
        optimizer = fl.DistributedOptimizer(SGD([weight], lr=1.0), gradient_predivide_factor=3.0)
        (weight * 30000.0).sum().backward()
        optimizer.step()
        return weight.detach()

    for result in local.run(rank_main, 3):
        assert torch.equal(result, torch.full((8,), -30000.0, dtype=torch.float16))


def test_sum_is_the_average_times_the_number_of_ranks() -> None:
    def make(scale: float) -> MakeOptimizer:
        return lambda parameters: SGD(parameters, lr=0.1 * scale)

    summed = assert_same_bits(trained(4, 3, make(0.25), op=fl.Sum))
    torch.testing.assert_close(summed, reference(4, 3, make(1.0)), rtol=1e-5, atol=1e-7)


def test_accumulation_over_backward_passes() -> None:
    def rank_main(rank: int) -> Tensor:
        model = make_model()
        optimizer = fl.DistributedOptimizer(
            SGD(model.parameters(), lr=0.1), model.named_parameters(), backward_passes_per_step=3
        )
        for step in range(2):
            optimizer.zero_grad()
            for micro in range(3):
                (loss_of(model, rank, 3 * step + micro) / 3).backward()
            optimizer.step()
        return weights(model)

    result = assert_same_bits(local.run(rank_main, 2))

    model = make_model()
    optimizer = SGD(model.parameters(), lr=0.1)
    for step in range(2):
        optimizer.zero_grad()
        for micro in range(3):
            for rank in range(2):
                (loss_of(model, rank, 3 * step + micro) / 6).backward()
        optimizer.step()
    torch.testing.assert_close(result, weights(model), rtol=1e-5, atol=1e-7)


def test_two_losses_before_one_step() -> None:
    def losses(model: nn.Module, rank: int) -> tuple[Tensor, Tensor]:
        x, y = make_batch(rank, 0)
        out = model(x)
        return ((out - y) ** 2).mean(), out.abs().mean()

    def rank_main(rank: int) -> Tensor:
        model = make_model()
        optimizer = fl.DistributedOptimizer(
            SGD(model.parameters(), lr=0.1), model.named_parameters(), backward_passes_per_step=2
        )
        for _ in range(2):
            first, second = losses(model, rank)
            first.backward(retain_graph=True)
            second.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
        return weights(model)

    result = assert_same_bits(local.run(rank_main, 2))
    model = make_model()
    for _ in range(2):
        model.zero_grad()
        for rank in range(2):
            (sum(losses(model, rank)) / 2).backward()
        SGD(model.parameters(), lr=0.1).step()
    torch.testing.assert_close(result, weights(model), rtol=1e-5, atol=1e-7)


def test_gradients_that_are_not_contiguous_and_tied_parameters() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(FEATURES, FEATURES, bias=False)
            self.outer = nn.Linear(FEATURES, FEATURES, bias=False)
            self.outer.weight = self.inner.weight
            self.strided = nn.Parameter(torch.empty(HIDDEN, FEATURES).t())
            fill(self)

        def forward(self, x: Tensor) -> Tensor:
            return (self.outer(self.inner(x)) @ self.strided)[:, :CLASSES]

    def rank_main(rank: int) -> tuple[Tensor, bool]:
        model = Tied()
        optimizer = fl.DistributedOptimizer(sgd(model.parameters()), model.named_parameters())
        train(model, optimizer, rank, range(3))
        assert model.strided.grad is not None
        return weights(model), model.strided.grad.is_contiguous()

    results = local.run(rank_main, 3)
    assert not any(contiguous for _, contiguous in results), "the gradient is meant to be strided"
    result = assert_same_bits([result for result, _ in results])
    assert torch.equal(result, reference(3, 3, sgd, model=Tied()))


def test_parameters_that_some_ranks_do_not_use_count_as_zeros_and_those_that_none_uses_rest() -> None:
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.trunk = nn.Linear(FEATURES, CLASSES)
            self.even = nn.Linear(CLASSES, CLASSES)
            self.never = nn.Linear(3, 3)
            fill(self)

        def forward(self, x: Tensor, even: bool) -> Tensor:
            out = self.trunk(x)
            return self.even(out) if even else out

    def loss(model: nn.Module, rank: int, step: int) -> Tensor:
        x, y = make_batch(rank, step)
        return ((model(x, (rank + step) % 2 == 0) - y) ** 2).mean()

    def rank_main(rank: int) -> Tensor:
        model = Branches()
        optimizer = fl.DistributedOptimizer(sgd(model.parameters()), model.named_parameters(), planner="wfbp")
        for step in range(4):
            optimizer.zero_grad()
            loss(model, rank, step).backward()
            optimizer.step()
        assert model.never.weight.grad is None
        return weights(model)

    result = assert_same_bits(local.run(rank_main, 3))
    model = Branches()
    optimizer = sgd(model.parameters())
    for step in range(4):
        optimizer.zero_grad()
        for rank in range(3):
            (loss(model, rank, step) / 3).backward()
        optimizer.step()
    torch.testing.assert_close(result, weights(model), rtol=1e-5, atol=1e-7)


def test_frozen_parameters_neither_travel_nor_move() -> None:
    def rank_main(rank: int) -> tuple[set[str], bool]:
        model = make_model()
        model[0].weight.requires_grad_(False)
        before = model[0].weight.clone()
        optimizer = fl.DistributedOptimizer(sgd(model.parameters()), model.named_parameters())
        train(model, optimizer, rank, range(2))
        sent = {name for bucket in optimizer._fl_engine.plan.buckets for name in bucket.names}
        return sent, torch.equal(before, model[0].weight)

    assert local.run(rank_main, 2) == [({"0.bias", "2.weight", "2.bias"}, True)] * 2


def test_sparse_gradients_are_refused_or_made_dense() -> None:
    def rank_main(rank: int, sparse_as_dense: bool) -> Tensor:
        embedding = nn.Embedding(10, 4, sparse=True)
        fill(embedding)
        optimizer = fl.DistributedOptimizer(
            SGD(embedding.parameters(), lr=1.0), embedding.named_parameters(), sparse_as_dense=sparse_as_dense
        )
        embedding(torch.tensor([rank, 5])).sum().backward()
        optimizer.step()
        return weights(embedding)

    with pytest.raises(fl.ConfigError, match="'weight' is sparse; give sparse_as_dense=True"):
        local.run(lambda rank: rank_main(rank, False), 2)
    embedding = nn.Embedding(10, 4)
    fill(embedding)
    expected = embedding.weight.detach().clone()
    expected[[0, 1]] -= 0.5
    expected[5] -= 1.0
    for result in local.run(lambda rank: rank_main(rank, True), 2):
        torch.testing.assert_close(result.view(10, 4), expected)


def test_closures_are_evaluated_with_reduced_gradients() -> None:
    """Also the closure of a rank that has nothing to contribute: the last one, in step 1."""

    def loss_at(model: nn.Module, rank: int, step: int) -> Tensor:
        return loss_of(model, rank, step) * (rank < 2 or step != 1)

    def rank_main(rank: int) -> tuple[Tensor, list[float]]:
        model = make_model()
        optimizer = fl.DistributedOptimizer(sgd(model.parameters()), model.named_parameters())
        losses = []
        for step in range(3):

            def closure(step: int = step) -> Tensor:
                optimizer.zero_grad()
                loss = loss_at(model, rank, step)
                if loss.item():
                    loss.backward()
                return loss

            losses.append(optimizer.step(closure).item())
        return weights(model), losses

    results = local.run(rank_main, 3)
    result = assert_same_bits([w for w, _ in results])
    assert results[0][1] != results[1][1], "step() returns the rank's own loss"
    model = make_model()
    optimizer = sgd(model.parameters())
    for step in range(3):
        optimizer.zero_grad()
        for rank in range(3):
            (loss_at(model, rank, step) / 3).backward()
        optimizer.step()
    torch.testing.assert_close(result, weights(model), rtol=1e-5, atol=1e-7)


def test_lbfgs_is_refused_because_each_rank_would_search_by_its_own_loss() -> None:
    with pytest.raises(fl.ConfigError, match="LBFGS"):
        local.run(lambda rank: fl.DistributedOptimizer(torch.optim.LBFGS(make_model().parameters())), 2)


def test_compiled_model() -> None:
    """Compilation in several threads at once is not what is tested here: every rank compiles in its turn."""
    compiled = [torch.compile(make_model(), backend="aot_eager") for _ in range(2)]
    for model in compiled:
        loss_of(model, 0, 0).backward()
        model.zero_grad()

    def rank_main(rank: int) -> Tensor:
        model = compiled[rank]
        optimizer = fl.DistributedOptimizer(sgd(model.parameters()), model.named_parameters())
        train(model, optimizer, rank, range(3))
        return weights(model)

    result = assert_same_bits(local.run(rank_main, 2))
    torch.testing.assert_close(result, reference(2, 3, sgd), rtol=1e-5, atol=1e-7)


def test_two_optimizers_in_one_process_have_their_own_threads() -> None:
    def rank_main(rank: int) -> tuple[Tensor, Tensor]:
        first, second = make_model(), make_model(torch.bfloat16)
        one = fl.DistributedOptimizer(sgd(first.parameters()), first.named_parameters())
        two = fl.DistributedOptimizer(adam(second.parameters()), second.named_parameters())
        for step in range(3):
            one.zero_grad()
            two.zero_grad()
            loss_of(first, rank, step).backward()
            loss_of(second, rank, step).backward()
            two.step()
            one.step()
        return weights(first), weights(second)

    results = local.run(rank_main, 3)
    assert torch.equal(assert_same_bits([a for a, _ in results]), reference(3, 3, sgd))
    assert torch.equal(assert_same_bits([b for _, b in results]), reference(3, 3, adam, torch.bfloat16))


def test_one_rank_is_a_pass_through() -> None:
    assert torch.equal(trained(1, 3, codec="int4")[0], reference(1, 3, sgd))

    def rank_main(rank: int) -> None:
        model = make_model()
        optimizer = fl.DistributedOptimizer(sgd(model.parameters()), model.named_parameters())
        for _ in range(2):  # nothing is counted, nothing is refused
            loss_of(model, rank, 0).backward()
        optimizer.zero_grad()
        optimizer.synchronize()
        with optimizer.skip_synchronize():
            optimizer.step()
        optimizer.load_state_dict(optimizer.state_dict())
        assert optimizer.state_dict().keys() == {"state", "param_groups"}
        optimizer.close()

    local.run(rank_main, 1)
