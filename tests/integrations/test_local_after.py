"""Local steps after averaged gradients: post-local SGD, and 0/1 Adam. Plain loops in torch say what comes out."""

import copy
import math
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

import fusionlayer as fl
import fusionlayer.torch as hvd
from fusionlayer.transport import local
from tests.integrations.test_local import Oracle, adamw, load, make_pair, same, saved, sgd
from tests.integrations.training import loss_of, make_model, reference, train, weights
from tests.loops import looped
from tests.ranks import on_ranks

ADAM: dict[str, Any] = {"lr": 0.01, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}
FREEZE = 3


def one_bit_adam(parameters: Iterable[Any]) -> Optimizer:
    return fl.OneBitAdam(parameters, **ADAM, freeze_step=FREEZE)


def coarse(parameters: Iterable[Any]) -> Optimizer:
    return fl.OneBitAdam(parameters, **ADAM, freeze_step=FREEZE, warmup_codec="int8")


@looped("sync", [fl.Local(every=2, after=3), fl.Local.overlapped(every=2, after=3)], ids=["", "carried"])
@looped("make", [sgd, adamw])
@looped("world", [2, 3])
def test_gradients_are_averaged_first(world: int, make: Any, sync: fl.Local) -> None:
    """The bits of a loop that averages gradients, and from there on of one with local steps and the same states."""

    def rank_main(rank: int) -> list[Tensor]:
        model, optimizer = make_pair(make, sync=sync, groups=2, check_replicas=1)
        seen = []
        for step in range(9):
            train(model, optimizer, rank, [step])
            seen.append(weights(model))
        optimizer.synchronize()
        return seen

    found = local.run(rank_main, world)
    for step in range(3):
        expected = reference(world, step + 1, make)
        for rank in range(world):
            assert torch.equal(found[rank][step], expected), f"rank {rank} after step {step}"
    fragments = [[2, 3], [0, 1]] if sync.fragments == 2 else None
    oracle = Oracle(world, sync, make, fragments)
    warm = make_model()
    optimizer = make(warm.parameters())
    for step in range(3):
        means = [torch.zeros_like(p) for p in warm.parameters()]
        for rank in range(world):
            warm.zero_grad()
            loss_of(warm, rank, step).backward()
            for mean, p in zip(means, warm.parameters(), strict=True):
                mean += p.grad * (1 / world)
        for mean, p in zip(means, warm.parameters(), strict=True):
            p.grad = mean
        optimizer.step()
    for model, each in zip(oracle.models, oracle.optimizers, strict=True):
        model.load_state_dict(warm.state_dict())
        each.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    with torch.no_grad():
        for anchor, p in zip(oracle.anchors, warm.parameters(), strict=True):
            anchor.copy_(p)
    oracle.sent = 3  # fragments take turns by the number of the engine's step
    for step in range(3, 9):
        oracle.train([step])
        for rank, model in enumerate(oracle.models):
            assert torch.equal(found[rank][step], weights(model)), f"rank {rank} after step {step}"


class ZeroOneAdam:
    """Algorithm 1 of 0/1 Adam after the variance is frozen, for all ranks at once: momenta times rates add up."""

    def __init__(self, world: int, every: int, fragments: int, delay: int) -> None:
        self.model, self.world, self.every, self.fragments, self.delay = make_model(), world, every, fragments, delay
        self.warm = AdamW(self.model.parameters(), **ADAM, foreach=False)
        self.flights: list[Any] = []
        self.sent = FREEZE  # fragments take turns by the number of the engine's step

    def average(self, step: int) -> None:
        means = [torch.zeros_like(p) for p in self.model.parameters()]
        for rank in range(self.world):
            self.model.zero_grad()
            loss_of(self.model, rank, step).backward()
            for mean, p in zip(means, self.model.parameters(), strict=True):
                mean += p.grad / self.world
        for mean, p in zip(means, self.model.parameters(), strict=True):
            p.grad = mean
        self.warm.step()

    @torch.no_grad()
    def freeze(self) -> None:
        parameters = list(self.model.parameters())
        states = [self.warm.state[p] for p in parameters]
        variance = [s["exp_avg_sq"] / (1 - ADAM["betas"][1] ** FREEZE) for s in states]
        self.widths = [torch.where(v == 0, math.inf, v.sqrt() + ADAM["eps"]) for v in variance]
        self.x = [[p.detach().clone() for p in parameters] for _ in range(self.world)]
        self.m = [[s["exp_avg"].clone() for s in states] for _ in range(self.world)]
        self.u = [[torch.zeros_like(p) for p in parameters] for _ in range(self.world)]
        self.anchors = [p.detach().clone() for p in parameters]
        self.rates, self.kept = [0.0] * len(parameters), [1.0] * len(parameters)

    def step(self, step: int) -> None:
        beta, shrink = ADAM["betas"][0], 1 - ADAM["lr"] * ADAM["weight_decay"]
        rate = ADAM["lr"] / (1 - beta ** (step + 1))
        for rank in range(self.world):
            nn.utils.vector_to_parameters(torch.cat([x.flatten() for x in self.x[rank]]), self.model.parameters())
            self.model.zero_grad()
            loss_of(self.model, rank, step).backward()
            for i, p in enumerate(self.model.parameters()):
                self.m[rank][i] = beta * self.m[rank][i] + (1 - beta) * p.grad
                self.u[rank][i] = shrink * self.u[rank][i] + rate * self.m[rank][i]
                self.x[rank][i] = shrink * self.x[rank][i] - rate * self.m[rank][i] / self.widths[i]
        self.rates = [shrink * each + rate for each in self.rates]
        self.kept = [shrink * each for each in self.kept]
        for flight in [f for f in self.flights if f["lands"] == step]:
            self.flights.remove(flight)
            self.land(flight, beta**self.delay)
        made = (step - FREEZE) % self.every + 1
        for number in range(self.fragments):
            if made == (number + 1) * self.every // self.fragments:
                self.leave(self.sent % self.fragments, step)
                self.sent += 1

    def leave(self, number: int, step: int) -> None:
        count = len(self.anchors)
        ours = [i for i in reversed(range(count)) if (count - 1 - i) * self.fragments // count == number]
        flight: dict[str, Any] = {"lands": step + self.delay, "ours": {}}
        for i in ours:
            mean = sum(self.u[rank][i] for rank in range(self.world)) / self.world
            left = [(self.x[rank][i].clone(), self.m[rank][i].clone()) for rank in range(self.world)]
            flight["ours"][i] = mean, self.rates[i], self.kept[i], left
            self.rates[i], self.kept[i] = 0.0, 1.0
            for rank in range(self.world):
                self.u[rank][i] = torch.zeros_like(mean)
        if self.delay:
            self.flights.append(flight)
        else:
            self.land(flight, 1.0)

    def land(self, flight: Any, remaining: float) -> None:
        for i, (mean, rates, kept, left) in flight["ours"].items():
            self.anchors[i] = kept * self.anchors[i] - mean / self.widths[i]
            momentum = torch.where(self.widths[i] == math.inf, 0, mean / rates)
            for rank, (x, m) in enumerate(left):
                self.x[rank][i] = self.anchors[i] + (self.x[rank][i] - x)
                self.m[rank][i] = self.m[rank][i] + remaining * (momentum - m)


@pytest.mark.parametrize(
    ("sync", "codec"),
    [
        (fl.Local.averaging(every=3), "raw"),
        (fl.Local.overlapped(every=2), "raw"),
        (fl.Local.overlapped(every=4, fragments=2, delay=2), "raw"),
        (fl.Local.averaging(every=1), "raw"),
    ],
    ids=["averaging", "overlapped", "late", "each step"],
)
def test_onebit_adam_takes_local_steps_when_its_variance_is_frozen(sync: fl.Local, codec: str) -> None:
    def rank_main(rank: int) -> tuple[list[Tensor], Tensor]:
        model, optimizer = make_pair(one_bit_adam, sync=sync, codec=codec, check_replicas=1)
        seen = []
        for step in range(15):
            train(model, optimizer, rank, [step])
            seen.append(weights(model))
        with optimizer.anchored():
            anchors = weights(model)
        optimizer.synchronize()
        return seen, anchors

    found = local.run(rank_main, 2)
    same([anchors for _, anchors in found])
    oracle = ZeroOneAdam(2, sync.every, sync.fragments, sync.delay)
    for step in range(15):
        if step < FREEZE:
            oracle.average(step)
            expected = [weights(oracle.model)] * 2
        else:
            if step == FREEZE:
                oracle.freeze()
            oracle.step(step)
            expected = [torch.cat([x.flatten() for x in rank]) for rank in oracle.x]
        for rank in range(2):
            torch.testing.assert_close(found[rank][0][step], expected[rank], rtol=2e-4, atol=2e-5)
        apart = not torch.equal(found[0][0][step], found[1][0][step])
        assert apart == (step >= FREEZE and (bool(sync.delay) or (step + 1 - FREEZE) % sync.every != 0))


@looped("saved_after", [2, 3, 6], ids=["before", "at the change", "with a fragment under way"])
@looped("loads_into", ["a new one", "one that is ahead"])
@on_ranks(2)
def test_a_state_goes_on_from_either_side_of_the_change(rank: int, saved_after: int, loads_into: str) -> None:
    """To the bits of training without a break, also back from local steps to averaged gradients."""
    options = {"sync": fl.Local.overlapped(every=2), "codec": "int8", "error_feedback": True}
    model, optimizer = make_pair(coarse, **options)
    train(model, optimizer, rank, range(saved_after))
    checkpoint = saved(model, optimizer)
    kept = optimizer.state_dict()["fusionlayer"]["residuals"].values()
    assert any(map(Tensor.any, kept)) == (saved_after != FREEZE), "what was lost of gradients goes at the change"
    train(model, optimizer, rank, range(saved_after, 11))
    uninterrupted = weights(model)
    if loads_into == "a new one":
        optimizer.close()
        model, optimizer = make_pair(coarse, **options)
    load(checkpoint, model, optimizer)
    train(model, optimizer, rank, range(saved_after, 11))
    assert torch.equal(weights(model), uninterrupted)


@on_ranks(2)
def test_momentum_counts_the_steps_of_its_own_round(rank: int) -> None:
    """A state that others got by a broadcast begins a round: steps that were made before it belong to no difference."""
    model, optimizer = make_pair(one_bit_adam, sync=fl.Local.averaging(every=2))
    train(model, optimizer, rank, range(FREEZE + 1))
    state = optimizer.state_dict()
    del state["fusionlayer"]["local"]
    optimizer.load_state_dict(state)
    fl.broadcast_parameters(model.state_dict(), root_rank=0)
    before = [p.detach().clone() for p in model.parameters()]
    train(model, optimizer, rank, [4, 5])
    decay = 1 - ADAM["lr"] * ADAM["weight_decay"]
    rates = sum(ADAM["lr"] / (1 - ADAM["betas"][0] ** step) * decay ** (6 - step) for step in (5, 6))
    for p, anchor in zip(model.parameters(), before, strict=True):
        variance = optimizer.state[p]["exp_avg_sq"] / (1 - ADAM["betas"][1] ** FREEZE)
        led = (decay**2 * anchor - p.detach()) * (variance.sqrt() + ADAM["eps"]) / rates
        expected = torch.where(variance.isinf(), 0, led)
        torch.testing.assert_close(optimizer.state[p]["exp_avg"], expected, rtol=1e-3, atol=1e-5)


def test_a_rank_that_has_joined_follows_the_others_into_local_steps() -> None:
    """Rank 1 ends before the change, and rank 0 after it: zeros count for rank 1 in averages and in syncs."""

    def rank_main(rank: int) -> tuple[Tensor, int]:
        hvd.init()
        model = make_model()
        optimizer: Any = hvd.DistributedOptimizer(
            sgd(model.parameters()), model.named_parameters(), sync=fl.Local(every=2, after=3)
        )
        train(model, optimizer, rank, range(2 if rank else 7))
        steps = optimizer.reducer.engine.step
        hvd.join()
        hvd.shutdown()
        return weights(model), steps

    found = local.run(rank_main, 2)
    assert [steps for _, steps in found] == [5, 2], "three averages and two syncs; two averages"
    model = make_model()
    optimizer = sgd(model.parameters())
    for step in range(7):
        if step in (3, 5):
            anchor = weights(model)
        gradients = []
        for rank in range(2 if step < 2 else 1):
            optimizer.zero_grad()
            loss_of(model, rank, step).backward()
            gradients.append([p.grad.clone() for p in model.parameters()])
        for p, *given in zip(model.parameters(), *gradients, strict=True):
            p.grad = sum(given) / (2 if step < 3 else 1)
        optimizer.step()
        if step in (4, 6):
            nn.utils.vector_to_parameters((anchor + weights(model)) / 2, model.parameters())
    torch.testing.assert_close(found[0][0], weights(model))


class Clipped(SGD):
    """Sends its own, and does not follow syncs."""

    def sends(self) -> tuple[str, None]:
        return "clipped gradients", None

    def exchanged(self, parameter: Tensor) -> None:
        if parameter.grad is not None:
            parameter.grad.clamp_(-1, 1)


@looped(
    "make, options, told",
    [
        (one_bit_adam, {"sync": fl.Local(every=2, after=2)}, "OneBitAdam needs averaged gradients in its first 3"),
        (sgd, {"sync": fl.Local(every=2, after=1), "plan": "plan.yaml"}, "after=1 with a plan"),
        (sgd, {"sync": fl.Local(every=9, fragments=5, after=2)}, "at most 4 fragments"),
        (one_bit_adam, {"sync": fl.Local(every=2), "op": fl.Sum}, "op=SUM with sync"),
        (Clipped, {"sync": fl.Local(every=2)}, "Clipped with op=Average, sync=Local.*leave all three out"),
    ],
)
def test_what_does_not_fit_is_refused(make: Any, options: dict[str, Any], told: str) -> None:
    def rank_main(rank: int) -> None:
        with pytest.raises(fl.ConfigError, match=told):
            make_pair(make, **options)

    for world in (1, 2):
        local.run(rank_main, world)


def test_after_is_checked() -> None:
    with pytest.raises(fl.ConfigError, match="after=-1; expected a number of steps in which gradients are averaged"):
        fl.Local(every=2, after=-1)
