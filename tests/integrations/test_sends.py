"""An optimizer of a user's that says by itself what it sends, by the hook that ``OneBitAdam`` has."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fusionlayer as fl
from fusionlayer.transport import local
from tests.ranks import on_ranks


class Clipped(torch.optim.SGD):
    """Sends gradients in bf16 for two steps; then what it cuts off at 4, or 2 without a gradient, by another codec."""

    made = 0

    def sends(self) -> tuple[str, str | None]:
        return ("gradients", "bf16") if self.made < 2 else ("clipped gradients", None)

    def exchanged(self, parameter: Tensor) -> None:
        assert self.param_groups[0]["params"][0] is parameter  # to read them must not end the step
        if parameter.grad is None:
            parameter.grad = torch.full_like(parameter, 2.0)
        if self.made >= 2:
            parameter.grad.clamp_(-4, 4)

    def step(self, closure: Any = None) -> Any:
        self.made += 1
        return super().step(closure)


@on_ranks(2)
def test_an_optimizer_says_what_it_sends_and_by_which_codec(rank: int) -> None:
    parameter = nn.Parameter(torch.zeros(4))
    optimizer = fl.DistributedOptimizer(Clipped([parameter], lr=1.0), codec="raw")
    mine = torch.tensor([8.0, 1.0, -8.0, 2.0]) * (1 + rank)
    means = [[12, 1.5, -12, 3], [12, 1.5, -12, 3], [4, 1.5, -4, 3], [3, 1.5, -1, 2]]
    for step, mean in enumerate(means):
        optimizer.zero_grad()
        if step < 3 or rank == 0:
            (mine * parameter).sum().backward()
        before = parameter.detach().clone()
        optimizer.step()
        assert (before - parameter).tolist() == mean
        assert optimizer.fusion_plan is not None
        assert optimizer.fusion_plan.buckets[0].codec == ("bf16" if step < 2 else "raw")


def test_what_does_not_fit_is_refused() -> None:
    class Wordless(Clipped):
        def sends(self) -> Any:
            return "gradients"

    def rank_main(rank: int) -> None:
        for kind, options, message in (
            (Clipped, {"op": fl.Sum}, "Clipped with op=Sum.*leave all three out"),
            (Clipped, {"codec": "rawr"}, "unknown codec 'rawr'"),
            (Wordless, {}, r"Wordless.sends\(\) returned 'gradients'; expected"),
        ):
            with pytest.raises(fl.ConfigError, match=message):
                fl.DistributedOptimizer(kind([nn.Parameter(torch.zeros(2))], lr=1.0), **options)

    local.run(rank_main, 1)
