"""``.grad`` is the average of all ranks when ``backward()`` returns; a gradient that changes before is refused."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD, AdamW, Optimizer

import fusionlayer as fl
import fusionlayer.torch as hvd
from fusionlayer.transport import local
from tests.integrations.training import (
    CLASSES,
    FEATURES,
    HIDDEN,
    averaged,
    fill,
    loss_of,
    make_batch,
    make_model,
    weights,
)
from tests.loops import looped
from tests.ranks import on_ranks


def gradients(model: nn.Module) -> Tensor:
    return torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None])


def average(world: int, steps: list[int], make: Callable[[], nn.Module] = make_model) -> Tensor:
    """Return what one process computes for all ranks."""
    model = make()
    for rank in range(world):
        for step in steps:
            (loss_of(model, rank, step) / world).backward()
    return gradients(model)


class Recomputed(torch.autograd.Function):
    """What ``checkpoint(use_reentrant=True)`` does, without the seconds that its import of a compiler takes."""

    @staticmethod
    def forward(ctx: Any, layer: nn.Module, x: Tensor) -> Tensor:
        ctx.layer = layer
        ctx.save_for_backward(x)
        return layer(x)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor | None]:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            out = ctx.layer(x)
        out.backward(gradient)
        return None, x.grad


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = make_model()

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        for layer in self.layers:
            x = Recomputed.apply(layer, x)
        return x


@looped(
    "world, options, make",
    [
        (2, {}, make_model),
        (3, {"planner": "wfbp"}, Checkpointed),
        (2, {"groups": 2}, Checkpointed),
        (2, {"codec": "int8"}, Checkpointed),
        (3, {"codec": "topk", "error_feedback": True}, make_model),
    ],
)
def test_gradients_are_averages_when_backward_returns(
    world: int, options: dict[str, Any], make: Callable[[], nn.Module]
) -> None:
    def body(rank: int, passes: int) -> list[Tensor]:
        model, seen = make(), []
        optimizer = fl.DistributedOptimizer(
            SGD(model.parameters(), lr=0.0), model, backward_passes_per_step=passes, **options
        )
        for step in range(3):
            optimizer.zero_grad()
            for i in range(passes):
                loss_of(model, rank, 2 * step + i).backward()
            seen.append(gradients(model).clone())
            optimizer.step()
        return seen

    for passes in (1, 2) if world == 2 else (1,):
        first, *others = local.run(lambda rank, passes=passes: body(rank, passes), world)  # type: ignore[misc]
        for step, mine in enumerate(first):
            assert all(torch.equal(mine, other[step]) for other in others)
            if "error_feedback" not in options:
                expected = average(world, [2 * step + i for i in range(passes)], make)
                close = 1e-6 if "codec" not in options else expected.abs().max().item() / 60
                torch.testing.assert_close(mine, expected, atol=close, rtol=1e-5)


@looped("make", [lambda p: SGD(p, lr=0.5, momentum=0.9), lambda p: AdamW(p, lr=0.02)])
@looped("codec", ["raw", "int8"])
def test_clipping_between_backward_and_step_clips_the_average(make: Callable[[Any], Optimizer], codec: str) -> None:
    def body(rank: int) -> Tensor:
        model = make_model()
        optimizer = fl.DistributedOptimizer(make(model.parameters()), model, codec=codec, planner="wfbp")
        for step in range(6):
            optimizer.zero_grad()
            loss_of(model, rank, step).backward()
            assert clip_grad_norm_(model.parameters(), 0.05) > 0.05
            optimizer.step()
        return weights(model)

    first, second = local.run(body, 2)
    assert torch.equal(first, second)
    if codec == "raw":
        model = make_model()
        expected = averaged(model, make(model.parameters()), 2, range(6), clip=0.05)
        torch.testing.assert_close(first, expected, atol=1e-4, rtol=1e-4)


def test_with_local_steps_clipping_clips_the_ranks_own_gradient() -> None:
    def body(rank: int) -> tuple[Tensor, Tensor]:
        model, alone = make_model(), make_model()
        optimizer = fl.DistributedOptimizer(SGD(model.parameters(), lr=0.5), model, sync=fl.Local.averaging(every=4))
        plain = SGD(alone.parameters(), lr=0.5)
        for step in range(3):
            for m, o in ((model, optimizer), (alone, plain)):
                o.zero_grad()
                loss_of(m, rank, step).backward()
                assert clip_grad_norm_(m.parameters(), 0.05) > 0.05
                o.step()
        return weights(model), weights(alone)

    for mine, expected in local.run(body, 2):
        assert torch.equal(mine, expected)


def scaled(p: nn.Parameter) -> None:
    assert p.grad is not None
    p.grad.mul_(2)


def replaced(p: nn.Parameter) -> None:
    assert p.grad is not None
    p.grad = p.grad * 2


def cleared(p: nn.Parameter) -> None:
    p.grad = None


def moved(p: nn.Parameter) -> None:
    assert p.grad is not None
    p.grad.data = p.grad.data.clone()


CHANGES = [scaled, replaced, cleared, moved]


@looped("change", CHANGES)
def test_a_gradient_that_changes_while_it_is_reduced_is_refused(change: Callable[[nn.Parameter], None]) -> None:
    def refused() -> Any:
        return pytest.raises(fl.UsageError, match=r"'2.weight' was changed or replaced.*call synchronize\(\)")

    def overlapping(rank: int) -> None:
        model = make_model()
        optimizer = fl.DistributedOptimizer(SGD(model.parameters(), lr=0.1), model, overlap_forward=model)
        loss_of(model, rank, 0).backward()
        change(model[2].weight)  # type: ignore[arg-type]
        with refused():
            optimizer.step()

    def as_horovod(rank: int) -> None:
        hvd.init()
        model = make_model()
        optimizer: Any = hvd.DistributedOptimizer(SGD(model.parameters(), lr=0.1), model.named_parameters())
        loss_of(model, rank, 0).backward()
        change(model[2].weight)  # type: ignore[arg-type]
        with refused():
            optimizer.step()

    def in_a_hook(rank: int) -> None:
        model = make_model()
        optimizer = fl.DistributedOptimizer(SGD(model.parameters(), lr=0.1), model)
        model[2].weight.register_post_accumulate_grad_hook(change)  # type: ignore[arg-type]
        with refused():
            loss_of(model, rank, 0).backward()
        optimizer.close()

    for body in (overlapping, as_horovod, in_a_hook):
        local.run(body, 2)


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(FEATURES, HIDDEN)
        self.heads = nn.ModuleList(nn.Linear(HIDDEN, CLASSES) for _ in range(3))
        fill(self)

    def loss(self, head: int, rank: int, step: int) -> Tensor:
        x, y = make_batch(rank, step)
        return ((self.heads[head](self.trunk(x)) - y) ** 2).mean()


@looped("op", [fl.Average, fl.Sum])
def test_backward_may_run_several_times_for_different_parameters(op: Any) -> None:
    """In the first step with a reduction each; then ``step`` waits for one reduction of all."""
    factor = 2 if op is fl.Sum else 1

    def losses(model: nn.Module, rank: int, step: int) -> list[Tensor]:
        x, y = make_batch(rank, step)
        return [((layer(x) - y) ** 2).mean() for layer in model.children()]

    def make() -> nn.Module:
        model = nn.Sequential(nn.Linear(FEATURES, CLASSES), nn.Linear(FEATURES, CLASSES))
        fill(model)
        return model

    def body(rank: int) -> tuple[Tensor, list[int]]:
        model, reductions = make(), []
        optimizer = fl.DistributedOptimizer(SGD(model.parameters(), lr=0.1, momentum=0.9), model, op=op)
        for step in range(3):
            before = optimizer.reducer.engine.step
            optimizer.zero_grad()
            for loss in losses(model, rank, step):
                loss.backward()
            optimizer.step()
            reductions.append(optimizer.reducer.engine.step - before)
        return weights(model), reductions

    (first, reductions), (second, _) = local.run(body, 2)
    assert torch.equal(first, second) and reductions == [2, 1, 1]
    model = make()
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(3):
        optimizer.zero_grad()
        for rank in range(2):
            for loss in losses(model, rank, step):
                (loss * factor / 2).backward()
        optimizer.step()
    torch.testing.assert_close(first, weights(model), atol=1e-5, rtol=1e-5)


def test_ranks_may_exchange_something_else_between_backward_and_step_though_one_lacks_gradients() -> None:
    meeting = threading.Barrier(2)

    def body(rank: int) -> Tensor:
        model = Heads()
        optimizer = fl.DistributedOptimizer(SGD(model.parameters(), lr=0.1), model)
        for step in range(4):
            optimizer.zero_grad()
            model.loss(0 if step % 2 else rank, rank, step).backward()
            meeting.wait(120)
            clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
        return weights(model)

    assert torch.equal(*local.run(body, 2))


def state_of(optimizer: Any, parameter: Tensor) -> list[Tensor]:
    return [parameter.detach().clone(), *(x.clone() for x in optimizer.state[parameter].values())]


FEEDBACK: list[dict[str, Any]] = [
    {"codec": "topk", "density": 0.1},
    {"codec": "topk", "density": 0.1, "ahead": False, "feedback_bits": 8},
    {"codec": "int4", "planner": "single"},
    {"codec": "int4", "algorithm": "ring", "planner": "single"},
    {"codec": "int4", "feedback_bits": 8, "groups": 2},
    {"codec": "powersgd", "rank": 1},
    {"codec": "dgc", "density": 0.1},
]


@looped("options", FEEDBACK)
@looped("world", [2, 3])
def test_a_parameter_that_no_rank_uses_keeps_all_that_belongs_to_it(options: dict[str, Any], world: int) -> None:
    """Its values, gradient, optimizer state and error feedback; what it owes is delivered when it is used again."""

    def body(rank: int) -> Tensor:
        model = Heads()
        optimizer: Any = fl.DistributedOptimizer(
            AdamW(model.parameters(), lr=0.01, weight_decay=0.5), model, **{"error_feedback": True, **options}
        )
        for step, head in enumerate([0, 1, 1, 0, 2, 1]):
            optimizer.zero_grad()
            engine, unused = optimizer.reducer.engine, [i for i in range(3) if i != head]
            resting = {f"heads.{i}.{key}": p for i in unused for key, p in model.heads[i].named_parameters()}
            before = engine.memory.state_dict()
            states = [state_of(optimizer, p) for p in resting.values()]
            model.loss(head, rank, step).backward()
            assert all(p.grad is None for p in resting.values())
            optimizer.step()
            for p, mine in zip(resting.values(), states, strict=True):
                assert all(map(torch.equal, state_of(optimizer, p), mine))
            after = engine.memory.state_dict()
            for key in ("residuals", "tensors", "packed"):
                for name in before[key].keys() & resting.keys():
                    old, new = before[key][name], after[key][name]
                    pairs = [(old, new)] if isinstance(old, Tensor) else [(old[k], new[k]) for k in old]
                    assert all(torch.equal(x, y) for x, y in pairs), (step, key, name)
        return weights(model)

    first, *others = local.run(body, world)
    assert all(torch.equal(first, other) for other in others)


def test_a_parameter_that_one_rank_uses_counts_as_zero_on_the_others() -> None:
    def body(rank: int) -> Tensor:
        model = Heads()
        optimizer = fl.DistributedOptimizer(AdamW(model.parameters(), lr=0.01), model)
        for step in range(4):
            optimizer.zero_grad()
            model.loss((rank + step) % 3, rank, step).backward()
            assert all(
                (p.grad is not None) == (i != (step + 2) % 3) for i in range(3) for p in model.heads[i].parameters()
            )
            optimizer.step()
        return weights(model)

    first, second = local.run(body, 2)
    assert torch.equal(first, second)
    model = Heads()
    optimizer = AdamW(model.parameters(), lr=0.01)
    expected = averaged(
        model, optimizer, 2, range(4), lambda model, rank, step: model.loss((rank + step) % 3, rank, step)
    )
    torch.testing.assert_close(first, expected, atol=1e-5, rtol=1e-5)


@on_ranks(2)
def test_the_next_forward_updates_no_parameter_that_no_rank_uses(rank: int) -> None:
    """With ``overlap_forward``, and where gradients are asked for by ``synchronize``."""
    model = Heads()
    optimizer: Any = fl.DistributedOptimizer(
        AdamW(model.parameters(), lr=0.01, weight_decay=0.5), model, overlap_forward=model, planner="single"
    )
    for step in range(4):
        before = weights(model.heads[1])
        model.loss(0, rank, step).backward()
        if step == 2:
            optimizer.synchronize()
            assert model.heads[1].weight.grad is None
            with optimizer.skip_synchronize():
                optimizer.step()
        else:
            optimizer.step()
        model.state_dict()
        assert torch.equal(weights(model.heads[1]), before)
