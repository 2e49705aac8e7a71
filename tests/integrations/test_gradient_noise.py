"""``inner_lr_scale``: a learning rate moves a model as far with local steps as without, by noisy gradients too."""

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

import fusionlayer as fl
from fusionlayer.training.policies.gradient_noise import NOTHING, GradientNoise
from fusionlayer.transport import local
from tests.loops import looped

RANKS, SIZE, STEPS = 4, 2000, 80


def progress(make: Any, noise: float, **options: Any) -> float:
    """Return how far training comes along the gradient that all ranks share, ones, each with noise of its own."""

    def rank_main(rank: int) -> Tensor:
        model = nn.Linear(SIZE, 1, bias=False)
        nn.init.zeros_(model.weight)
        optimizer: Any = fl.DistributedOptimizer(make(model.parameters()), model, codec="raw", **options)
        data = torch.Generator().manual_seed(rank)
        for _ in range(STEPS):
            optimizer.zero_grad()
            model(1 + noise * torch.randn(1, SIZE, generator=data)).sum().backward()
            optimizer.step()
        if "sync" in options:
            optimizer.synchronize()
        return model.weight.detach()

    first, *others = local.run(rank_main, RANKS)
    assert all(torch.equal(first, other) for other in others)
    return -float(first.mean())


def adamw(parameters: Iterable[Any]) -> Optimizer:
    return AdamW(parameters, lr=0.01)


def sgd(parameters: Iterable[Any]) -> Optimizer:
    return SGD(parameters, lr=0.01, momentum=0.9)


@looped("noise", [0.0, 1.0, 10.0])
def test_a_learning_rate_means_the_same_with_local_steps(noise: float) -> None:
    averaged = progress(adamw, noise)
    for sync in (fl.Local.averaging(4), fl.Local.overlapped(4, fragments=1), fl.Local.averaging(4, after=40)):
        assert progress(adamw, noise, sync=sync) == pytest.approx(averaged, rel=0.12), sync


def test_without_a_factor_noise_slows_adam_down_and_no_other() -> None:
    averaging = fl.Local.averaging(4)
    assert progress(adamw, 10.0, sync=fl.Local.averaging(4, inner_lr_scale=1)) < 0.6 * progress(adamw, 10.0)
    assert progress(sgd, 10.0, sync=averaging) == pytest.approx(progress(sgd, 10.0), rel=1e-4)
    twice = progress(sgd, 0.0, sync=fl.Local.averaging(4, inner_lr_scale=2))
    assert twice == pytest.approx(2 * progress(sgd, 0.0, sync=averaging), rel=1e-4)


class SignedSteps(Optimizer):
    """Steps by signs of momenta, as Lion: noise makes them no smaller."""

    def __init__(self, parameters: Iterable[Any]) -> None:
        super().__init__(parameters, {"lr": 0.01, "betas": (0.9, 0.99)})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            momentum = self.state[parameter].setdefault("exp_avg", torch.zeros_like(parameter))
            parameter.sub_(momentum.lerp_(parameter.grad, 0.1).sign(), alpha=self.param_groups[0]["lr"])


def test_only_optimizers_that_divide_by_second_moments_get_a_factor() -> None:
    at_all, without = (
        progress(SignedSteps, 3.0, sync=fl.Local.averaging(4, inner_lr_scale=scale)) for scale in ("auto", 1.0)
    )
    assert at_all == without


def test_a_learning_rate_changed_within_a_scaled_step_is_refused() -> None:
    def hooked(parameters: Iterable[Any]) -> Optimizer:
        made = adamw(parameters)
        schedule = torch.optim.lr_scheduler.ExponentialLR(made, 0.9)
        made.register_step_post_hook(lambda *_: schedule.step())
        return made

    with pytest.raises(fl.UsageError, match=r"call the scheduler after step\(\), or set inner_lr_scale=1"):
        progress(hooked, 10.0, sync=fl.Local.averaging(4))
    assert progress(hooked, 10.0, sync=fl.Local.averaging(4, inner_lr_scale=1)) > 0


def test_a_sync_that_a_rank_has_nothing_to_report_of_is_passed_over() -> None:
    noise = GradientNoise()
    for reports in ([[1.0, 0.6], [1.0, 0.6]], [[1.0, 0.6], [NOTHING] * 2], [[1.0, 0.6], [float("nan"), 0.6]], []):
        noise.arrive(1.0, [torch.ones(1)], reports)
    alone = GradientNoise()
    alone.arrive(1.0, [torch.ones(1)], [[1.0, 0.6], [1.0, 0.6]])
    assert noise.factor(2, 4, (0.9, 0.999), 0) == alone.factor(2, 4, (0.9, 0.999), 0) > 1.3
    assert noise.factor(1, 4, (0.9, 0.999), 0) == 1
    noise.arrive(1.0, [torch.ones(1)], [])
    assert noise.report(joined=False) == [NOTHING] * 2
    noise.arrive(2.0, [torch.full((4,), 0.5)], [[1.0, 0.6]])
    saved = noise.state_dict()
    other = GradientNoise()
    other.load_state_dict(saved)
    assert other.state_dict() == saved
