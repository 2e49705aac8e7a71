"""What DistributedOptimizer computes: the training of one process on everybody's data, the same bits on all ranks."""

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


@looped("world, codec", [(world, codec) for codec in CODECS for world in (2, 3)] + [(64, CODECS[0]), (64, CODECS[3])])
def test_every_rank_ends_with_the_same_bits_near_uncompressed_training(world: int, codec: dict[str, Any]) -> None:
    result = assert_same_bits(trained(world, 3, **codec))
    start, exact = weights(make_model()), reference(world, 3, sgd)
    assert (result - exact).norm() < 0.25 * (exact - start).norm()


def plan_of(world: int, codec: str = "raw", **change: Any) -> fl.FusionPlan:
    """Return a plan of two buckets, the later layer first."""
    model = make_model()
    tensors = [fl.plan.TensorInfo(n, p.numel(), "float32", 4) for n, p in model.named_parameters()]
    algorithm = "dense" if codec == "raw" else "two_shot"
    return fl.FusionPlan.build([tensors[2:], tensors[:2]], world, codec, change, algorithm, 32)


def test_planners_and_plans_do_not_change_the_numbers(tmp_path: Path) -> None:
    path, planners = tmp_path / "plan.yaml", ["wfbp", "horovod", fl.planners.get("horovod", threshold=600)]
    plan_of(3).to_yaml(path)
    for options in [{"planner": each} for each in planners] + [
        {"plan": each} for each in (plan_of(3), path, str(path))
    ]:
        assert torch.equal(assert_same_bits(trained(3, 3, **options)), reference(3, 3, sgd))
    with_plan = assert_same_bits(trained(3, 3, plan=plan_of(3, "int4"), codec="raw"))
    assert not torch.equal(with_plan, reference(3, 3, sgd)), "a plan names its own codecs"


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


def test_planning_in_one_argument_is_that_by_single_names() -> None:
    def rank_main(rank: int) -> list[list[list[str]]]:
        found = []
        for options in (
            {"planner": "wfbp"},
            {"planning": fl.Planning(planner="wfbp")},
            {"planning": fl.Planning(groups=2)},
        ):
            model = make_model()
            optimizer: Any = fl.DistributedOptimizer(sgd(model.parameters()), model.named_parameters(), **options)
            train(model, optimizer, rank, range(2))
            found.append([[*bucket.names] for bucket in optimizer.fusion_plan.buckets])
        return found

    by_name, together, groups = local.run(rank_main, 2)[0]
    assert by_name == together and len(by_name) > len(groups) == 2


def test_groups_become_buckets() -> None:
    def rank_main(rank: int) -> list[list[list[str]]]:
        found = []
        for groups in (2, 100, "lists", "num_groups"):
            model = make_model()
            members = list(model.parameters())
            lists = [[members[0], members[3]], [members[1]]]
            options: dict[str, Any] = {"groups": lists if groups == "lists" else groups}
            options = {"num_groups": 2} if groups == "num_groups" else options
            optimizer: Any = fl.DistributedOptimizer(sgd(members), model.named_parameters(), **options)
            train(model, optimizer, rank, range(2))
            found.append(sorted(sorted(bucket.names) for bucket in optimizer.fusion_plan.buckets))
            assert torch.equal(weights(model), reference(2, 2, sgd))
        return found

    with pytest.warns(DeprecationWarning, match="groups=<number>"):
        two, many, lists, deprecated = local.run(rank_main, 2)[0]
    assert two == deprecated == [["0.bias", "0.weight"], ["2.bias", "2.weight"]]
    assert many == [["0.bias"], ["0.weight"], ["2.bias"], ["2.weight"]]
    assert lists == [["0.bias"], ["0.weight", "2.bias"], ["2.weight"]]


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


class Tied(nn.Module):
    """Has a parameter twice, and one that is not contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(FEATURES, FEATURES, bias=False)
        self.outer = nn.Linear(FEATURES, FEATURES, bias=False)
        self.outer.weight = self.inner.weight
        self.strided = nn.Parameter(torch.empty(HIDDEN, FEATURES).t())
        fill(self)

    def forward(self, x: Tensor) -> Tensor:
        return (self.outer(self.inner(x)) @ self.strided)[:, :CLASSES]


def micro_batches(model: nn.Module, rank: int, step: int) -> list[Tensor]:
    return [loss_of(model, rank, 3 * step + part) / 3 for part in range(3)]


def two_losses(model: nn.Module, rank: int, step: int) -> list[Tensor]:
    x, y = make_batch(rank, step)
    out = model(x)
    return [((out - y) ** 2).mean(), out.abs().mean()]


def one_loss(model: nn.Module, rank: int, step: int) -> list[Tensor]:
    return [loss_of(model, rank, step)]


def one_loss_or_none(model: nn.Module, rank: int, step: int) -> list[Tensor]:
    return one_loss(model, rank, step) if rank or step != 1 else []


@looped("make", [make_model, Tied])
@looped("losses", [micro_batches, two_losses, one_loss, one_loss_or_none])
@looped("closure", [False, True])
def test_each_way_to_make_gradients_is_training_of_one_process(make: Any, losses: Any, closure: bool) -> None:
    """Several backward passes before a step, by ``step`` itself or before it, or none on one rank."""
    passes = len(losses(make(), 1, 0))

    def steps(model: nn.Module, optimizer: Any, ranks: Iterable[int], share: float) -> Tensor:
        for step in range(3):

            def backward(step: int = step) -> Tensor:
                optimizer.zero_grad(set_to_none=step != 2)
                every = [loss * share for rank in ranks for loss in losses(model, rank, step)]
                for loss in every:
                    loss.backward(retain_graph=True)
                return sum(every, torch.zeros(()))

            if closure:
                assert optimizer.step(backward).item() >= 0, "the rank's own loss"
            else:
                backward()
                optimizer.step()
        return weights(model)

    def rank_main(rank: int) -> Tensor:
        model = make()
        return steps(
            model, fl.DistributedOptimizer(sgd(model.parameters()), model, backward_passes_per_step=passes), [rank], 1.0
        )

    model = make()
    expected = steps(model, sgd(model.parameters()), range(3), 1 / 3)
    torch.testing.assert_close(assert_same_bits(local.run(rank_main, 3)), expected, rtol=1e-5, atol=1e-7)


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


def test_lbfgs_is_refused_because_each_rank_would_search_by_its_own_loss() -> None:
    """https://github.com/pytorch/pytorch/issues/30439: ranks evaluated it differently often, and connections closed."""
    with pytest.raises(fl.ConfigError, match="LBFGS"):
        local.run(lambda rank: fl.DistributedOptimizer(torch.optim.LBFGS(make_model().parameters())), 2)


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
