"""``Local(every="auto")``: how many local steps ranks make follows what they measure, the same on all ranks."""

import pytest
import torch
from torch import Tensor

import fusionlayer as fl
from fusionlayer.base.errors import ConfigError
from fusionlayer.planning.local_steps import EveryRules
from fusionlayer.process.clock import HostClock
from fusionlayer.training import optimizer as fronts
from fusionlayer.training.policies.gradient_noise import GradientNoise, norm_of
from fusionlayer.training.policies.pace import Pace
from fusionlayer.transport import local
from tests.integrations.training import train, weights
from tests.loops import looped

from .test_local import make_pair, same


class Scripted(HostClock):
    """Each moment is so many seconds after the one before it, in turn: a sync takes one of them, a round the other."""

    def __init__(self, syncing: float, training: float) -> None:
        self._now = 0.0
        self._seconds = [training, syncing]

    def stamp(self) -> float:
        self._now += self._seconds[0]
        self._seconds.reverse()
        return self._now


def follow(clocks: list[Scripted], moves: list[list[Tensor]], syncs: int) -> list[int]:
    """Return the numbers of local steps after each sync, which are the same for all ranks."""
    paces, noises = [Pace(clock, EveryRules(most=8)) for clock in clocks], [GradientNoise() for _ in clocks]
    average = [torch.stack(each).mean(0) for each in zip(*moves, strict=True)]
    found = []
    for _ in range(syncs):
        reports = [[*noise.report(False), pace.report(False)] for pace, noise in zip(paces, noises, strict=True)]
        for pace, noise, move in zip(paces, noises, moves, strict=True):
            drift = noise.arrive(norm_of(move), average, reports)
            pace.arrive(drift, [waited for *_, waited in reports], says=False)
        (every,) = {pace.state for pace in paces}
        found.append(every.every)
    return found


def test_all_ranks_follow_what_all_have_measured() -> None:
    alike = [[torch.ones(3), torch.arange(4.0)]] * 2
    apart = [[torch.tensor([1.0, 0.0])], [torch.tensor([-0.5, 1.0])]]
    slow, fast = (0.5, 0.5), (0.001, 1.0)
    # The first sync has nothing before it to report, and the second reports one without a round before it.
    assert follow([Scripted(*slow), Scripted(*slow)], alike, 9) == [1, 1, 1, 1, 2, 2, 2, 4, 4]
    assert follow([Scripted(*slow), Scripted(*fast)], alike, 5)[-1] == 2, "the mean over ranks counts"
    assert follow([Scripted(*fast), Scripted(*fast)], alike, 9) == [1] * 9
    assert follow([Scripted(*slow), Scripted(*slow)], apart, 9) == [1] * 9, "replicas that drift apart sync often"
    assert follow([Scripted(*slow), Scripted(*slow)], alike, 99)[-1] == 8


def test_a_rank_that_has_joined_tells_nothing_and_then_the_number_stays() -> None:
    pace = Pace(Scripted(1.0, 1.0))
    for _ in range(9):
        pace.arrive(0.0, [1.0, 1.0, 1.0, pace.report(joined=True)], says=False)
    assert pace.state.every == 1


@pytest.mark.parametrize("stop", [None, 9])
def test_training_syncs_seldom_where_the_network_is_slow(monkeypatch: pytest.MonkeyPatch, stop: int | None) -> None:
    """And goes on so after a checkpoint."""
    steps = 16
    monkeypatch.setattr(fronts, "clock_of", lambda device: Scripted(1.0, 1.0))

    def body(rank: int) -> tuple[list[int], Tensor]:
        model, optimizer = make_pair(sync=fl.Local.averaging("auto"), codec="raw")
        numbers = []
        for step in range(steps):
            if step == stop:
                saved = optimizer.state_dict(), model.state_dict()
                model, optimizer = make_pair(sync=fl.Local.averaging("auto"), codec="raw")
                optimizer.load_state_dict(saved[0])
                model.load_state_dict(saved[1])
            train(model, optimizer, 0, [step])
            numbers.append(optimizer.reducer.policy.local.every)
        optimizer.synchronize()
        optimizer.close()
        return numbers, weights(model)

    found = local.run(body, 2)
    for numbers, _ in found:
        assert numbers == [1] * 4 + ([2] * 6 + [4] * 6 if stop is None else [2] * 10 + [4] * 2)
    same([values for _, values in found])


def test_frozen_parameters_rest_and_a_sync_of_nothing_is_possible() -> None:
    """All parameters may be frozen for a while: nothing travels, and ranks go on with those that come back."""

    def body(rank: int) -> Tensor:
        model, optimizer = make_pair(sync=fl.Local.averaging("auto"), codec="raw")
        train(model, optimizer, rank, range(2))
        kept = weights(model).clone()
        model.requires_grad_(False)
        for _ in range(2):
            optimizer.step()
        assert torch.equal(weights(model), kept)
        model.requires_grad_(True)
        train(model, optimizer, rank, range(2))
        optimizer.synchronize()
        optimizer.close()
        return weights(model)

    same(local.run(body, 2))


@looped("option", [{"fragments": 2}, {"delay": 1}])
def test_fragments_and_delays_have_a_number_of_steps(option: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="every='auto' with fragments or a delay; give a number of steps, such as e"):
        fl.Local("auto", **option)  # type: ignore[arg-type]
