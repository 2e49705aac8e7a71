"""Updates that wait for the next forward give the bits of those that do not."""

import gc
import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import StepLR

import fusionlayer as fl
from fusionlayer.base.errors import ConfigError, UsageError
from fusionlayer.collectives._base import registry
from fusionlayer.scheduler.order import MEASURED, WARM_UP
from fusionlayer.training.overlap import SEPARABLE
from fusionlayer.transport import local
from tests.integrations.training import fill, loss_of, make_model, train, weights
from tests.loops import looped
from tests.ranks import on_ranks

WORLD = 2
STEPS = WARM_UP + MEASURED + 2


def momentum(parameters: Iterable[Tensor]) -> Optimizer:
    return SGD(parameters, lr=0.05, momentum=0.9, weight_decay=0.01)


def onebit(parameters: Iterable[Tensor]) -> Optimizer:
    """Return an optimizer that sends something else from its third step on."""
    return fl.OneBitAdam(parameters, lr=0.01, freeze_step=2, warmup_codec="int4")


def wrap(model: nn.Module, make: Callable[..., Optimizer] = momentum, overlap: bool = True, **options: Any) -> Any:
    """Return an optimizer with a bucket for each tensor."""
    return fl.DistributedOptimizer(
        make(model.parameters()),
        model.named_parameters(),
        overlap_forward=model if overlap else None,
        **{"codec": "int8", "planner": "wfbp", **options},
    )


def both(body: Callable[[int, bool], Tensor], world: int = WORLD) -> None:
    """Run ``body(rank, overlap)`` on all ranks without and with overlap: the same bits everywhere."""
    plain = local.run(lambda rank: body(rank, False), world)
    ahead = local.run(lambda rank: body(rank, True), world)
    for result in [*plain, *ahead]:
        assert torch.equal(result, plain[0])


@looped("kind", (*SEPARABLE, fl.OneBitAdam), ids=lambda kind: str(kind.__name__))
def test_every_optimizer_gives_the_same_bits(kind: type[Optimizer]) -> None:
    def body(rank: int, overlap: bool) -> Tensor:
        model = make_model()
        make = onebit if kind is fl.OneBitAdam else kind
        train(model, optimizer := wrap(model, make, overlap), rank, range(STEPS if kind is SGD else 4))
        optimizer.synchronize() if overlap else None
        return weights(model)

    both(body)


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("world", [1, 3])
def test_schedules_groups_and_zeroing(world: int, set_to_none: bool) -> None:
    """The update uses the learning rate of its step, though the schedule has moved on when it is made."""

    def body(rank: int, overlap: bool) -> Tensor:
        model = make_model()

        def make(_: object) -> Optimizer:
            weights_, biases = (
                [p for n, p in model.named_parameters() if n.endswith(end)] for end in ("weight", "bias")
            )
            return AdamW([{"params": weights_, "lr": 0.02}, {"params": biases, "weight_decay": 0.0}], lr=0.1)

        optimizer = wrap(model, make, overlap)
        schedule = StepLR(optimizer, 1, 0.7)
        for step in range(STEPS):
            loss_of(model, rank, step).backward()
            optimizer.step()
            schedule.step()
            optimizer.zero_grad(set_to_none)
        model.state_dict()
        return weights(model)

    both(body, world)


def test_step_returns_before_the_results_are_there() -> None:
    gates = [threading.Event() for _ in range(WORLD)]

    def gated(x: Tensor, codec: object, transport: Any, **_: object) -> None:
        assert gates[transport.rank].wait(180)
        transport.all_reduce(x)

    def body(rank: int) -> None:
        model = make_model()
        optimizer = fl.DistributedOptimizer(
            momentum(model.parameters()), model.named_parameters(), algorithm="gated", overlap_forward=model
        )
        before = weights(model).clone()
        loss_of(model, rank, 0).backward()
        optimizer.step()
        assert torch.equal(weights(model), before)
        assert all(parameter.grad is None for parameter in model.parameters())
        gates[rank].set()
        loss_of(model, rank, 1)
        assert not any(
            torch.equal(new, old) for new, old in zip(weights(model).split(100), before.split(100), strict=True)
        )

    registry.add("gated", lambda: gated)
    try:
        local.run(body, WORLD)
    finally:
        registry.remove("gated")


@on_ranks(WORLD)
def test_each_module_waits_for_its_own_parameters_only(rank: int) -> None:
    model = make_model()
    optimizer = wrap(model)
    first, _, last = model
    train(model, optimizer, rank, [0])
    before = [parameter.detach().clone() for parameter in model.parameters()]
    first(torch.zeros(1, first.in_features))
    assert not torch.equal(first.weight, before[0]) and torch.equal(last.weight, before[2])
    optimizer.synchronize()
    assert not torch.equal(last.weight, before[2])
    after = weights(model).clone()
    optimizer.synchronize()
    assert torch.equal(weights(model), after), "an update was made twice"


def test_gradients_can_be_had_by_synchronize() -> None:
    def body(rank: int, overlap: bool) -> Tensor:
        model = make_model()
        optimizer = wrap(model, overlap=overlap)
        for step in range(STEPS):
            optimizer.zero_grad(set_to_none=step % 2 == 0)
            loss_of(model, rank, step).backward()
            if step % 3 == 0:
                optimizer.synchronize()
                assert nn.utils.clip_grad_norm_(model.parameters(), 0.1) > 0.1
                with optimizer.skip_synchronize():
                    optimizer.step()
            else:
                optimizer.step()
        model.state_dict()
        return weights(model)

    both(body)


def test_grad_scaler_and_closures_give_up_the_overlap() -> None:
    def body(rank: int, overlap: bool) -> Tensor:
        model = make_model()
        optimizer = wrap(model, overlap=overlap)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        for step in range(4):
            optimizer.zero_grad()
            scaler.scale(loss_of(model, rank, step)).backward()
            scaler.step(optimizer)
            scaler.update()

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, rank, 4)
            loss.backward()
            return loss

        optimizer.step(closure)
        return weights(model)

    both(body)


@pytest.mark.parametrize("make", [momentum, onebit])
def test_accumulated_and_missing_gradients(make: Callable[..., Optimizer]) -> None:
    """Two backward passes a step, and a branch that only some steps take."""

    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.common, self.rare = make_model(), nn.Linear(5, 5)
            fill(self.rare, 1)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.common(x)
            return y + self.rare(y) if self.take_rare else y

        take_rare = True

    def body(rank: int, overlap: bool) -> Tensor:
        model = Branches()
        optimizer = wrap(model, make, overlap, backward_passes_per_step=2)
        for step in range(STEPS):
            model.take_rare = (step + rank) % 3 == 0
            for part in range(2):
                loss_of(model, rank, 2 * step + part).backward()
            optimizer.step()
            optimizer.zero_grad()
        optimizer.state_dict()
        return weights(model)

    both(body)


def test_attention_uses_the_parameters_of_a_module_that_it_does_not_call() -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(24, 2, batch_first=True)
            self.out = nn.Linear(24, 5)
            fill(self)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.out(self.attention(*[x[None]] * 3, need_weights=False)[0][0])
            return y

    def body(rank: int, overlap: bool) -> Tensor:
        model = Attention()
        train(model, wrap(model, overlap=overlap), rank, range(4))
        model.state_dict()
        return weights(model)

    both(body)


@pytest.mark.parametrize("make", [momentum, onebit])
def test_saving_and_loading_see_the_updates(make: Callable[..., Optimizer]) -> None:
    def body(rank: int, overlap: bool) -> Tensor:
        model = make_model()
        optimizer = wrap(model, make, overlap)
        train(model, optimizer, rank, range(3))
        saved = {name: value.clone() for name, value in model.state_dict().items()}
        momenta = optimizer.state_dict()
        other = make_model()
        again = wrap(other, make, overlap)
        train(other, again, rank, [7])
        other.load_state_dict(saved)
        assert torch.equal(weights(other), weights(model)), "a pending update came after the loading"
        again.load_state_dict(momenta)
        train(other, again, rank, [3, 4])
        other.state_dict()
        return weights(other)

    both(body)


def test_the_last_update_outlives_the_users_reference_and_close() -> None:
    def body(rank: int, overlap: bool) -> Tensor:
        model = make_model()
        train(model, wrap(model, overlap=overlap), rank, range(2))
        gc.collect()
        model.state_dict()
        result = weights(model).clone()
        other = make_model()
        optimizer = wrap(other, overlap=overlap)
        train(other, optimizer, rank, range(2))
        optimizer.close()
        assert torch.equal(weights(other), result)
        return result

    both(body)


def test_model_and_optimizer_are_freed() -> None:
    def body(rank: int) -> None:
        model = make_model()
        optimizer = wrap(model)
        train(model, optimizer, rank, range(2))
        optimizer.synchronize()
        every.append((weakref.ref(optimizer), weakref.ref(model)))

    every: list[tuple[weakref.ref[Optimizer], weakref.ref[nn.Module]]] = []
    local.run(body, WORLD)
    gc.collect()
    assert len(every) == WORLD and all(optimizer() is None and model() is None for optimizer, model in every)


# ---- what cannot be -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("planner", ["wfbp", "horovod"])
def test_a_parameter_used_behind_its_modules_back_is_told(planner: str) -> None:
    """Whether or not another module of its bucket has brought the update."""

    class Behind(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = make_model()

        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.linear(torch.tanh(self.inner[0](x)), self.inner[2].weight)

    def body(rank: int) -> None:
        model = Behind()
        optimizer = wrap(model, planner=planner)
        train(model, optimizer, rank, [0])
        with pytest.raises(UsageError, match="'inner.2.weight' was used outside the forward of its module"):
            train(model, optimizer, rank, [1])

    local.run(body, WORLD)


class Coupled(SGD):
    """An optimizer of the user's own."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


@pytest.mark.parametrize(
    ("make", "model", "message"),
    [
        (Coupled, None, "known to be the same only for ASGD.*leave it out for Coupled"),
        (momentum, "model", "overlap_forward=str; expected the model"),
        (momentum, nn.Linear(2, 2), "parameter '0.weight' of the optimizer is none of the model's"),
    ],
)
def test_what_is_refused_at_once(make: Callable[..., Optimizer], model: Any, message: str) -> None:
    own = make_model()
    with pytest.raises(ConfigError, match=message):
        fl.DistributedOptimizer(
            make(own.parameters(), lr=0.1) if make is Coupled else make(own.parameters()),
            own.named_parameters(),
            overlap_forward=model or own,
        )


@on_ranks(WORLD)
def test_a_parameter_written_before_its_update_is_told(rank: int) -> None:
    model = make_model()
    optimizer = wrap(model)
    train(model, optimizer, rank, [0])
    optimizer.synchronize()
    with torch.no_grad():
        next(model.parameters()).mul_(0.9)  # after all updates
    train(model, optimizer, rank, [0])
    with torch.no_grad():
        next(model.parameters()).mul_(0.9)
    with pytest.raises(UsageError, match="was written after step.*call synchronize"):
        optimizer.synchronize()


@on_ranks(WORLD)
def test_step_hooks_are_refused(rank: int) -> None:
    model = make_model()
    optimizer = wrap(model)
    optimizer.register_step_post_hook(lambda *_: None)
    with pytest.raises(UsageError, match="step hooks of the optimizer would run once for each bucket"):
        train(model, optimizer, rank, [0])
