"""``OneBitAdam``: the arithmetic of its paper, over any codec; checkpoints; what it refuses."""

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW

import fusionlayer as fl
from fusionlayer.transport import local
from tests.integrations.training import loss_of, make_model, weights
from tests.loops import looped
from tests.ranks import on_ranks

FREEZE, STEPS, WORLD = 3, 8, 2
OPTIONS: dict[str, Any] = {"lr": 0.01, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}


def step_of(model: nn.Module, optimizer: Any, rank: int, step: int) -> None:
    optimizer.zero_grad()
    loss_of(model, rank, step).backward()
    optimizer.step()


def make(codec: str = "onebit", warmup_codec: str = "raw", **options: Any) -> tuple[nn.Module, Any]:
    model = make_model()
    optimizer = fl.OneBitAdam(model.parameters(), **OPTIONS, freeze_step=FREEZE, warmup_codec=warmup_codec)
    return model, fl.DistributedOptimizer(optimizer, model, codec=codec, **options)


def signs_of(x: Tensor, group: int) -> Tensor:
    """Return signs times the mean magnitude of each group of ``x`` (n,), with zeros up to a whole group."""
    rows = nn.functional.pad(x, (0, -len(x) % group)).view(-1, group)
    return (torch.where(rows < 0, -1.0, 1.0) * rows.abs().mean(1, keepdim=True)).flatten()[: len(x)]


class Oracle:
    """Algorithm 1 of 1-bit Adam for all ranks at once, on one flat tensor for each parameter, without fusionlayer."""

    def __init__(self, group: int | None) -> None:
        self.model = make_model()
        self.group = group
        self.warm = AdamW(self.model.parameters(), **OPTIONS, foreach=False)
        self.lost: dict[tuple[int, Tensor], Tensor] = {}

    def step(self, step: int) -> None:
        gradients = []
        for rank in range(WORLD):
            self.model.zero_grad()
            loss_of(self.model, rank, step).backward()
            gradients.append([p.grad.clone() for p in self.model.parameters()])
        for i, p in enumerate(self.model.parameters()):
            mine = [each[i] for each in gradients]
            if step < FREEZE:
                p.grad = sum(mine) / WORLD
            else:
                self._send_momentum(p, mine, step)
        if step < FREEZE:
            self.warm.step()

    @torch.no_grad()
    def _send_momentum(self, p: Tensor, gradients: list[Tensor], step: int) -> None:
        (beta1, beta2), rate = OPTIONS["betas"], OPTIONS["lr"]
        momentum, variance = (self.warm.state[p][key] for key in ("exp_avg", "exp_avg_sq"))
        sent = []
        for rank, gradient in enumerate(gradients):
            own = (beta1 * momentum + (1 - beta1) * gradient).flatten() / WORLD
            if self.group is not None:
                own = own + self.lost.get((rank, p), 0)
                self.lost[rank, p] = own - signs_of(own, self.group)
                own = own - self.lost[rank, p]
            sent.append(own)
        momentum.copy_(sum(sent).view_as(p))
        width = (variance / (1 - beta2**FREEZE)).sqrt() + OPTIONS["eps"]
        p.mul_(1 - rate * OPTIONS["weight_decay"])
        p.sub_(rate / (1 - beta1 ** (step + 1)) * torch.where(variance == 0, 0, momentum / width))


@looped("codec, group", [("raw", None), ("onebit", 32)])
def test_it_takes_the_steps_of_the_paper(codec: str, group: int | None) -> None:
    """Gradients and AdamW at first; then momenta, and what a codec loses is sent later. Replicas are equal."""
    oracle = Oracle(group)
    expected = []
    for step in range(STEPS):
        oracle.step(step)
        expected.append(weights(oracle.model))

    def rank_main(rank: int) -> list[Tensor]:
        options = {"group_size": group, "groups": 1} if group else {}
        model, optimizer = make(codec, **options)
        reached = []
        for step in range(STEPS):
            assert optimizer.frozen == (step >= FREEZE)
            step_of(model, optimizer, rank, step)
            (used,) = {bucket.codec for bucket in optimizer.fusion_plan.buckets}
            assert used == ("raw" if step < FREEZE else codec)
            reached.append(weights(model))
        return reached

    first, second = local.run(rank_main, WORLD)
    for step in range(STEPS):
        assert torch.equal(first[step], second[step])
        torch.testing.assert_close(first[step], expected[step], rtol=1e-4, atol=1e-5)


def test_alone_it_is_its_own_oracle_and_an_element_without_variance_rests() -> None:
    oracle, model = Oracle(None), make_model()
    optimizer = fl.OneBitAdam(model.parameters(), **OPTIONS, freeze_step=FREEZE)
    for step in range(STEPS):
        oracle.step(step)
        optimizer.zero_grad()
        (sum(loss_of(model, rank, step) for rank in range(WORLD)) / WORLD).backward()
        optimizer.step()
        torch.testing.assert_close(weights(model), weights(oracle.model), rtol=1e-4, atol=1e-5)
    still = nn.Parameter(torch.ones(2))
    optimizer = fl.OneBitAdam([still], weight_decay=0.0, freeze_step=1)
    for gradient in ([1.0, 0.0], [1.0, 1.0]):
        still.grad = torch.tensor(gradient)
        optimizer.step()
    assert still[0] < 1 and still[1] == 1


def test_a_variance_that_is_loaded_takes_the_place_of_the_one_before() -> None:
    """What divides momenta is kept between steps."""

    def step_with(optimizer: fl.OneBitAdam, parameter: Tensor) -> None:
        parameter.grad = torch.tensor([1.0, -2.0])
        optimizer.step()

    parameters = [nn.Parameter(torch.zeros(2)) for _ in range(2)]
    used, fresh = (fl.OneBitAdam([p], **OPTIONS, freeze_step=1) for p in parameters)
    for _ in range(2):
        step_with(used, parameters[0])
    saved = copy.deepcopy(used.state_dict())
    saved["state"][0]["exp_avg_sq"] *= 4
    for optimizer, parameter in zip((used, fresh), parameters, strict=True):
        optimizer.load_state_dict(copy.deepcopy(saved))
        parameter.data.zero_()
        step_with(optimizer, parameter)
    assert torch.equal(*parameters) and parameters[0].any()


@on_ranks(WORLD)
def test_a_rank_without_a_gradient_sends_what_is_left_of_the_momentum(rank: int) -> None:
    parameter = nn.Parameter(torch.zeros(4))
    optimizer: Any = fl.OneBitAdam([parameter], freeze_step=1, betas=(0.5, 0.9))
    optimizer = fl.DistributedOptimizer(optimizer, codec="raw")
    for step in range(2):
        optimizer.zero_grad()
        if step == 0 or rank == 0:
            (8 * parameter).sum().backward()
        optimizer.step()
    # 0.5 * 8 after the first step; then 0.5 * 4 + 0.5 * 8 and 0.5 * 4.
    assert optimizer.state[parameter]["exp_avg"].tolist() == [4.0] * 4


class Late(nn.Module):
    """Three layers; the second takes part from step ``first`` on, by a call or by being unfrozen."""

    def __init__(self, first: int, unfrozen: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4).double() for _ in range(3))
        for i, p in enumerate(self.parameters()):
            p.data = torch.randn(p.shape, generator=torch.Generator().manual_seed(i), dtype=torch.float64)
        self.first, self.unfrozen = first, unfrozen

    def backward(self, rank: int, step: int) -> None:
        calls = self.unfrozen or step >= self.first
        self.layers[1].requires_grad_(not self.unfrozen or step >= self.first)
        x = torch.randn(5, 4, generator=torch.Generator().manual_seed(100 * rank + step), dtype=torch.float64)
        for layer in self.layers if calls else (self.layers[0], self.layers[2]):
            x = layer(x).tanh()
        x.square().mean().backward()


def late_oracle(first: int, unfrozen: bool, world: int, steps: int) -> tuple[list[Tensor], list[bool]]:
    """Return weights and whether the variance is frozen after each step: Adam with counts of each parameter's own."""
    model, (beta1, beta2) = Late(first, unfrozen), OPTIONS["betas"]
    moments: dict[Tensor, list[Any]] = {p: [torch.zeros_like(p), torch.zeros_like(p), 0, 0] for p in model.parameters()}
    reached, frozen = [], [False]
    for step in range(steps):
        model.zero_grad()
        for rank in range(world):
            model.backward(rank, step)
        with torch.no_grad():
            for p, kept in moments.items():
                if p.grad is None:
                    continue
                kept[0] = beta1 * kept[0] + (1 - beta1) * p.grad / world
                kept[2] += 1
                if not frozen[-1]:
                    kept[1] = beta2 * kept[1] + (1 - beta2) * (p.grad / world) ** 2
                    kept[3] += 1
                width = (kept[1] / (1 - beta2 ** kept[3])).sqrt() + OPTIONS["eps"]
                p.mul_(1 - OPTIONS["lr"] * OPTIONS["weight_decay"])
                p.sub_(OPTIONS["lr"] / (1 - beta1 ** kept[2]) * kept[0] / width)
        reached.append(weights(model))
        frozen.append(all(kept[2] >= FREEZE for kept in moments.values() if kept[2]))
    return reached, frozen[1:]


@looped("unfrozen", [False, True], ids=["first called", "unfrozen"])
@looped(
    "how, first",
    [("alone", 0), ("alone", 1), *((how, FREEZE - 1) for how in ("alone", "zeros", "two ranks", "ahead", "resumed"))],
)
def test_each_parameter_counts_its_own_steps(unfrozen: bool, first: int, how: str) -> None:
    """AdamW's corrections for a layer that comes late; the warm-up goes on until that layer has taken its steps."""
    steps, world = 2 * FREEZE + 3, 1 if how in ("alone", "zeros") else 2
    expected, frozen = late_oracle(first, unfrozen, world, steps)
    assert frozen.index(True) == FREEZE - 1 + first

    def rank_main(rank: int) -> None:
        model = Late(first, unfrozen)

        def make() -> Any:
            optimizer: Any = fl.OneBitAdam(model.parameters(), **OPTIONS, freeze_step=FREEZE)
            if how in ("alone", "zeros"):
                return optimizer
            ahead = model if how == "ahead" else None
            return fl.DistributedOptimizer(
                optimizer, model.named_parameters(), codec="zip", planner="wfbp", overlap_forward=ahead
            )

        optimizer = make()
        for step in range(steps):
            optimizer.zero_grad()
            if how == "zeros":
                for p in model.parameters():
                    p.grad = torch.zeros_like(p)
            model.backward(rank, step)
            optimizer.step()
            if how == "ahead":
                optimizer.synchronize()
            assert optimizer.frozen == frozen[step]
            torch.testing.assert_close(weights(model), expected[step], rtol=1e-5, atol=1e-6)
            if how == "resumed":
                saved = copy.deepcopy(optimizer.state_dict())
                optimizer.close()
                optimizer = make()
                optimizer.load_state_dict(saved)

    local.run(rank_main, world)


@looped("saved_after", [1, FREEZE - 1, FREEZE, FREEZE + 2])
def test_a_state_with_one_count_for_all_parameters_is_loaded(saved_after: int) -> None:
    """As saved before parameters had counts of their own."""
    parameters = [nn.Parameter(torch.ones(3)) for _ in range(2)]
    first, second = (fl.OneBitAdam([p], **OPTIONS, freeze_step=FREEZE) for p in parameters)

    def step_with(optimizer: fl.OneBitAdam, parameter: Tensor, step: int) -> None:
        parameter.grad = torch.tensor([1.0, -2.0, 0.5]) * (step + 1)
        optimizer.step()

    for step in range(saved_after):
        step_with(first, parameters[0], step)
    saved = copy.deepcopy(first.state_dict())
    saved["param_groups"][0]["steps"] = saved_after
    for key in ("step", "variance_step"):
        del saved["state"][0][key]
    second.load_state_dict(saved)
    parameters[1].data.copy_(parameters[0])
    for step in range(saved_after, STEPS):
        assert first.frozen == second.frozen == (step >= FREEZE)
        for optimizer, parameter in zip((first, second), parameters, strict=True):
            step_with(optimizer, parameter, step)
    assert torch.equal(*parameters) and first.state_dict()["param_groups"] == second.state_dict()["param_groups"]


def test_local_steps_do_not_begin_in_the_warm_up(caplog: pytest.LogCaptureFixture) -> None:
    def rank_main(rank: int) -> None:
        model = Late(1, unfrozen=True)
        optimizer: Any = fl.OneBitAdam(model.parameters(), freeze_step=FREEZE)
        optimizer = fl.DistributedOptimizer(optimizer, model, sync=fl.Local.averaging(every=2))
        with pytest.raises(fl.UsageError, match=f"has taken {FREEZE - 1} of freeze_step={FREEZE} .* larger after"):
            for step in range(FREEZE + 2):
                optimizer.zero_grad()
                model.backward(rank, step)
                optimizer.step()
        assert step == FREEZE

    with caplog.at_level("INFO", "fusionlayer"):
        local.run(rank_main, WORLD)
    assert "2 of 6 parameters in use have taken fewer than freeze_step=3 steps, one of them 2" in caplog.text


def test_what_does_not_fit_is_refused() -> None:
    def wrap(**options: Any) -> None:
        make(**options)

    def rank_main(rank: int) -> None:
        for options, message in (
            ({"op": fl.Sum}, "OneBitAdam with op=Sum"),
            ({"plan": fl.FusionPlan((), WORLD)}, "no plan says"),
            ({"warmup_codec": "rawr"}, "unknown codec 'rawr'; did you mean 'raw'"),
            ({"codec": "onebitt"}, "unknown codec 'onebitt'; did you mean 'onebit'"),
        ):
            with pytest.raises(fl.ConfigError, match=message):
                wrap(**options)

    local.run(rank_main, WORLD)
    parameter = nn.Parameter(torch.zeros(2))
    for wrong in ({"freeze_step": 0}, {"freeze_step": 1.5}, {"freeze_step": 1, "lr": math.nan}):
        with pytest.raises(fl.ConfigError, match="OneBitAdam: .*expected"):
            fl.OneBitAdam([parameter], **wrong)
    optimizer = fl.OneBitAdam([parameter], freeze_step=1)
    parameter.grad = torch.ones(2)
    optimizer.step()
    late = nn.Parameter(torch.ones(3), requires_grad=True)
    late.grad = torch.ones(3)
    optimizer.add_param_group({"params": [late]})
    with pytest.raises(fl.UsageError, match=r"shape \(3,\), which is first used after the warm-up"):
        optimizer.step()
    scaler = torch.amp.GradScaler("cpu")
    optimizer = fl.OneBitAdam([parameter], freeze_step=1)
    scaler.scale(parameter.sum()).backward()
    with pytest.raises(fl.UsageError, match="GradScaler"):
        scaler.step(optimizer)
