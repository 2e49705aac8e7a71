"""Parameters that are unfrozen, frozen or added after wrapping: they are reduced like others, or refused by name."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

import fusionlayer as fl
from fusionlayer.transport import local
from tests.integrations.training import CLASSES, fill, loss_of, make_model, train, weights
from tests.loops import looped
from tests.ranks import on_ranks

STEPS = 10


def grown_model() -> nn.Sequential:
    """Return a model of which only the second layer is trained at first, and of which the third joins later."""
    model = nn.Sequential(*make_model(), nn.Linear(CLASSES, CLASSES))
    fill(model)
    model.requires_grad_(False)
    model[2].requires_grad_(True)
    return model


def grow(model: nn.Sequential, optimizer: Optimizer, step: int) -> bool:
    """Freeze, unfreeze and add parameters before a step; return whether there was something to do."""
    if step == 2:
        model[0].weight.requires_grad_(True)
    elif step == 4:
        model[0].bias.requires_grad_(True)
        model[2].weight.requires_grad_(False)
    elif step == 6:
        model[3].weight.requires_grad_(True)
        optimizer.add_param_group({"params": list(model[3].parameters()), "lr": 0.02})
    elif step == 8:
        model.requires_grad_(True)
    return step in (2, 4, 6, 8)


def adamw(parameters: Iterable[Any]) -> Optimizer:
    return AdamW(parameters, lr=0.01, weight_decay=0.1)


def grown(
    rank: int, make: Callable[[Iterable[Any]], Optimizer] = adamw, anew: bool = False, passes: int = 1, **options: Any
) -> Tensor:
    """Return the weights after a training in which parameters come and go; ``anew``: wrap again after each change."""
    model = grown_model()
    if options.get("overlap_forward"):
        options["overlap_forward"] = model

    def wrap(plain: Optimizer) -> Any:
        named = model.named_parameters()
        return fl.DistributedOptimizer(plain, named, backward_passes_per_step=passes, **options)

    optimizer = wrap(make([*model[0].parameters(), *model[2].parameters()]))
    for step in range(STEPS):
        if grow(model, optimizer, step) and anew:
            state = optimizer.state_dict()
            optimizer.close()
            optimizer = make([{**each, "params": list(each["params"])} for each in optimizer.param_groups])
            optimizer = wrap(optimizer)
            optimizer.load_state_dict(state)
        optimizer.zero_grad()
        for part in range(passes):
            loss_of(model, rank, 100 * part + step).backward()
        optimizer.step()
    optimizer.synchronize() if options.get("overlap_forward") else None
    optimizer.close()
    return weights(model)


def alone(world: int) -> Tensor:
    """Return the weights of one process that averages what ``world`` ranks would compute, in rank order."""
    model = grown_model()
    optimizer = adamw([*model[0].parameters(), *model[2].parameters()])
    for step in range(STEPS):
        grow(model, optimizer, step)
        totals: dict[Tensor, Tensor] = {}
        for rank in range(world):
            optimizer.zero_grad()
            loss_of(model, rank, step).backward()
            for p in model.parameters():
                if p.grad is not None:
                    totals[p] = totals.get(p, torch.zeros_like(p)) + p.grad * (1 / world)
        for p in model.parameters():
            p.grad = totals.get(p)
        optimizer.step()
    return weights(model)


def test_training_is_that_of_one_process_whatever_is_frozen_unfrozen_and_added() -> None:
    """Also weight decay: it moves no frozen parameter."""
    for result in local.run(grown, 3):
        assert torch.equal(result, alone(3))


@looped(
    "options",
    [
        {"codec": "int8", "planner": "wfbp"},
        {"codec": "int4", "error_feedback": True, "passes": 2},
        {"codec": "topk", "density": 0.2},
        {"codec": "powersgd"},
        {"codec": "int4", "error_feedback": True, "overlap_forward": True},
    ],
    ids=lambda options: "-".join(map(str, options.values())),
)
def test_bits_are_those_of_an_optimizer_that_is_wrapped_anew(options: dict[str, Any]) -> None:
    expected = local.run(lambda rank: grown(rank, anew=True, **options), 2)
    for result in local.run(lambda rank: grown(rank, **options), 2):
        assert torch.equal(result, expected[0])


def wrap(model: nn.Module, parameters: Iterable[Any] | None = None, **options: Any) -> Any:
    plain = SGD(model.parameters() if parameters is None else parameters, lr=0.1)
    return fl.DistributedOptimizer(plain, model.named_parameters(), **options)


def planned(optimizer: Any) -> set[str]:
    return {name for bucket in optimizer.fusion_plan.buckets for name in bucket.names}


LATER = {"0.weight", "0.bias"}
FIRST = {"2.weight", "2.bias"}


def half_frozen() -> nn.Sequential:
    model = make_model()
    model[0].requires_grad_(False)
    return model


@on_ranks(3)
def test_ranks_that_change_different_parameters_are_told_which(rank: int) -> None:
    model = half_frozen()
    optimizer = wrap(model)
    train(model, optimizer, rank, range(2))
    (model[0].bias if rank == 1 else model[0].weight).requires_grad_(True)
    with pytest.raises(fl.PlanMismatch) as error:
        train(model, optimizer, rank, range(2, 4))
    assert error.value.ranks == (1,)
    assert "'0.bias' only on ranks [1], '0.weight' only on ranks [0, 2]" in str(error.value)


@on_ranks(3)
def test_a_rank_that_unfreezes_alone_is_named_everywhere_with_its_parameters(rank: int) -> None:
    """Also where the others send as many bytes as a digest has: 8 numbers of f32."""
    model = nn.Sequential(nn.Linear(1, 4), nn.Linear(4, 2, bias=False))
    fill(model)
    model[0].requires_grad_(False)
    optimizer = wrap(model, algorithm="one_shot")
    for step in range(3):
        if rank == 1 and step == 2:
            model[0].bias.requires_grad_(True)
        before = weights(model)
        optimizer.zero_grad()
        loss = model(torch.ones(1, 1)).sum()
        if step < 2:
            loss.backward()
            optimizer.step()
    with pytest.raises(fl.TransportError, match=r"rank 1 (is )?in an agreement.*\('0.bias' now require gradients\)"):
        loss.backward()
    assert torch.equal(weights(model), before)


@on_ranks(2)
def test_a_gradient_that_came_too_late_is_refused(rank: int) -> None:
    model = half_frozen()
    optimizer = wrap(model)
    train(model, optimizer, rank, range(1))
    for synchronized in (False, True):
        loss_of(model, rank, 1).backward()
        if synchronized:
            optimizer.synchronize()
        model[0].bias.requires_grad_(True)
        model[0].bias.sum().backward()
        with pytest.raises(fl.UsageError, match="gradient '0.bias' is not reduced.*before backward"):
            if synchronized:
                with optimizer.skip_synchronize():
                    optimizer.step()
            else:
                optimizer.step()
        model[0].bias.grad.zero_()  # as zero_grad(set_to_none=False) leaves it
        optimizer.step() if not synchronized else None
        assert planned(optimizer) == FIRST
        model[0].bias.requires_grad_(False)
        optimizer.zero_grad()


def test_a_gradient_that_was_begun_is_still_reduced_if_its_parameter_is_frozen() -> None:
    def rank_main(rank: int) -> Tensor:
        model = make_model()
        optimizer = wrap(model, backward_passes_per_step=2)
        loss_of(model, rank, 0).backward()
        model[0].bias.requires_grad_(False)
        loss_of(model, rank, 1).backward()
        optimizer.synchronize()
        reduced = model[0].bias.grad
        assert reduced is not None
        with optimizer.skip_synchronize():
            optimizer.step()
        optimizer.zero_grad()
        for part in range(2):
            loss_of(model, rank, part).backward()
        optimizer.step()
        assert planned(optimizer) == {"0.weight", *FIRST}
        return reduced

    model = make_model()
    for rank in range(2):
        loss_of(model, rank, 0).backward()
    assert model[0].bias.grad is not None
    for reduced in local.run(rank_main, 2):
        torch.testing.assert_close(reduced, model[0].bias.grad / 2)


def test_a_parameter_that_replaces_another_is_reduced() -> None:
    def rank_main(rank: int) -> Tensor:
        model = make_model()
        optimizer = wrap(model)
        train(model, optimizer, rank, range(1))
        model[0].weight = nn.Parameter(torch.ones_like(model[0].weight))
        optimizer.param_groups[0]["params"][0] = model[0].weight
        train(model, optimizer, rank, range(1, 3))
        return weights(model)

    assert torch.equal(*local.run(rank_main, 2))


def test_all_parameters_may_be_frozen_for_a_while() -> None:
    def rank_main(rank: int) -> Tensor:
        model = half_frozen()
        optimizer = wrap(model)
        train(model, optimizer, rank, range(1))
        before = weights(model)
        model.requires_grad_(False)
        for _ in range(2):
            optimizer.zero_grad()
            optimizer.step()
        assert torch.equal(weights(model), before)
        model.requires_grad_(True)
        train(model, optimizer, rank, range(2))
        assert planned(optimizer) == FIRST | LATER
        return weights(model)

    assert torch.equal(*local.run(rank_main, 2))


@on_ranks(2)
def test_a_given_plan_must_have_them(rank: int, tmp_path: Path) -> None:
    model = make_model()
    optimizer = wrap(model)
    train(model, optimizer, rank, range(1))
    whole = optimizer.fusion_plan
    optimizer.close()

    # A plan of the whole model serves while parts of it are frozen.
    model[0].requires_grad_(False)
    optimizer = wrap(model, plan=whole)
    train(model, optimizer, rank, range(1, 2))
    part = optimizer.fusion_plan
    assert planned(optimizer) == FIRST
    model.requires_grad_(True)
    train(model, optimizer, rank, range(2, 3))
    assert optimizer.fusion_plan == whole
    optimizer.adopt_plan(part)  # of before: it changes nothing
    train(model, optimizer, rank, range(3, 4))
    assert optimizer.fusion_plan == whole
    optimizer.close()

    model[0].requires_grad_(False)
    path = tmp_path / f"{rank}.yaml"
    part.to_yaml(path)
    optimizer = wrap(model, plan=path)
    train(model, optimizer, rank, range(1))
    model[0].requires_grad_(True)
    optimizer.zero_grad()
    text = r"2 tensors differ.*'0.bias': plan has none.*make a plan for this"
    for again in (lambda: loss_of(model, rank, 1).backward(), optimizer.step):
        with pytest.raises(fl.ConfigError, match=text):
            again()


@on_ranks(2)
def test_names_of_added_parameters(rank: int) -> None:
    model = make_model()
    extra = nn.Parameter(torch.ones(3))
    first, last = list(model[0].parameters()), list(model[2].parameters())
    named = list(model[0].named_parameters())

    def names_after(optimizer: Any, group: Any) -> set[str]:
        loss_of(model, rank, 0).backward()
        optimizer.step()
        optimizer.zero_grad()
        optimizer.add_param_group({"params": group, "lr": 0.5})
        (loss_of(model, rank, 0) + extra.sum()).backward()
        optimizer.step()
        assert optimizer.param_groups[-1]["lr"] == 0.5
        names = planned(optimizer)
        optimizer.close()
        return names

    assert names_after(wrap(model, first), last) == FIRST | LATER  # listed when it was wrapped
    by_place = fl.DistributedOptimizer(SGD(first, lr=0.1))
    places = {f"allreduce.noname.{place}" for place in ("0.0", "0.1", "1.0")}
    assert names_after(by_place, extra) == places
    by_name = fl.DistributedOptimizer(SGD(named, lr=0.1), named)
    assert names_after(by_name, [("extra", extra)]) == {"weight", "bias", "extra"}


@on_ranks(2)
def test_added_parameters_begin_with_rank_0s_values_and_ranks_add_the_same(rank: int) -> None:
    model = make_model()
    optimizer = wrap(model)
    train(model, optimizer, rank, range(1))
    extra = nn.Parameter(torch.full((3,), float(rank)))
    optimizer.add_param_group({"params": [extra]})
    assert not extra.any()
    train(model, optimizer, rank, range(1))
    text = r"rank 1 (is )?in add_param_group\(\) \(which adds 'allreduce.noname.2.0'\)"
    with pytest.raises(fl.TransportError, match=text):
        if rank == 1:
            optimizer.add_param_group({"params": [nn.Parameter(torch.ones(8))]})
        else:
            train(model, optimizer, rank, range(1))


@looped("world", [1, 2])
@on_ranks()
def test_groups_that_cannot_be_added_leave_the_optimizer_as_it_was(rank: int, world: int) -> None:
    model, other = make_model(), make_model()
    named = list(model[0].named_parameters())
    # Where step() does not wait for backward's results, they are being reduced in between.
    optimizer: Any = fl.DistributedOptimizer(SGD(named, lr=0.1), named, overlap_forward=model)
    theirs = wrap(other)
    taken: list[tuple[Any, str]] = [
        ([("weight", nn.Parameter(torch.ones(2)))], "has the name 'weight' of another one"),
        ([("w", nn.Parameter(torch.ones(2, device="meta")))], "meta.*one optimizer for each device"),
    ]
    if world > 1:
        taken += [([("w", other[0].weight)], "'w' belongs to a DistributedOptimizer already")]
    for group, text in taken:
        with pytest.raises(fl.ConfigError, match=text):
            optimizer.add_param_group({"params": group})
        assert len(optimizer.param_groups) == 1
    loss_of(model, rank, 0).backward()
    if world > 1:
        with pytest.raises(fl.UsageError, match="being reduced; call it before backward"):
            optimizer.add_param_group({"params": [("w", nn.Parameter(torch.ones(2)))]})
    optimizer.step()
    optimizer.close()
    theirs.close()
