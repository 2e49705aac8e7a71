"""How often replicas exchange: the predicted mean step, and how a period follows what is measured."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fusionlayer import codecs
from fusionlayer.base.errors import ConfigError
from fusionlayer.planning.cluster import Scenario
from fusionlayer.planning.collective_phases import Phase
from fusionlayer.planning.local_steps import EveryRules, EveryState, divergence
from fusionlayer.planning.plans import make_plan
from fusionlayer.planning.prediction import predict_local_steps
from fusionlayer.planning.profile import Profile
from fusionlayer.planning.simulation import Compute, Load, Resources, run_local_steps
from fusionlayer.scheduler import planners
from tests.loops import looped

from .profiles import write_example

COMPUTE = Compute(forward=1.0, backward=2.0, optimizer=0.5)


def load(seconds: float, made_in: float = 0.0) -> Load:
    return Load(made_in, 0.0, 1.0, [Phase(seconds, 0.0, "between", 8.0)])


# ---- the mean step --------------------------------------------------------------------------------------------------


@looped(
    "loads, leaving, delay, seconds",
    [
        ([load(2)], [(), (), (), (0,)], 0, 3.5 + 2 / 4),
        ([load(2, made_in=1)], [(), (), (), (0,)], 0, 3.5 + 3 / 4),
        ([load(3)], [(), (0,)], 1, 3.5),
        ([load(5)], [(), (0,)], 1, 3.5 + (5 - 3.5) / 2),
        ([load(5), load(3)], [(0,), (1,)], 1, 3.5 + 0.5 * (5 - 3.5)),
        ([load(5), load(5)], [(0, 1), ()], 1, 3.5 + 0.5 * (10 - 3.5)),
        ([load(9), load(9)], [(0,), (), (1,), ()], 3, (9 + 9) / 4),
        ([load(1)], [(0,)], 0, 4.5),
    ],
)
def test_a_mean_step_by_hand(loads: list[Load], leaving: list[tuple[int, ...]], delay: int, seconds: float) -> None:
    step = run_local_steps(COMPUTE, loads, leaving, delay=delay)
    assert step.seconds == pytest.approx(seconds) and step.alone == 3.5 and step.spans == ()
    sends = sum(map(len, leaving))
    assert step.sent == 8 * sends / len(leaving)
    assert step.communication == sum(loads[i].phases[0].seconds for due in leaving for i in due) / len(leaving)


@given(
    st.lists(st.sampled_from([0.1, 1.0, 3.0, 20.0]), min_size=1, max_size=4),
    st.integers(1, 6),
    st.integers(0, 7),
    st.integers(1, 2),
)
def test_a_mean_step_is_never_shorter_than_computing_or_the_link_and_waiting_later_makes_none_longer(
    sizes: list[float], every: int, delay: int, lanes: int
) -> None:
    loads = [load(seconds) for seconds in sizes]
    leaving = [tuple(i for i in range(len(loads)) if i % every == step) for step in range(every)]
    now, later = (
        run_local_steps(COMPUTE, loads, leaving, Resources(lanes=lanes), delay=some) for some in (delay, delay + 1)
    )
    assert max(now.alone, now.communication) - 1e-9 <= now.seconds <= now.alone + now.communication + 1e-9
    assert lanes > 1 or later.seconds <= now.seconds + 1e-9


def test_a_plan_of_local_steps_is_predicted_by_its_buckets_costs(tmp_path: Path) -> None:
    profile = Profile.from_yaml(write_example(tmp_path))
    always = make_plan(profile, planners.get("wfbp"), codecs.get("raw"), Scenario("100mbit"), 4)
    once = predict_local_steps(profile, always, Scenario("100mbit"), 1)
    assert once.alone == pytest.approx(profile.model.forward + profile.model.backward + profile.model.optimizer)
    for every in (2, 4):
        found = predict_local_steps(profile, always, Scenario("100mbit"), every)
        assert found.waiting == pytest.approx(once.waiting / every)
        assert found.sent == pytest.approx(once.sent / every)
        hidden = predict_local_steps(profile, always, Scenario("100mbit"), every, delay=1, resources=Resources(lanes=2))
        assert hidden.seconds < found.seconds


# ---- a period that follows what is measured -------------------------------------------------------------------------


@looped("ranks", [2, 3, 5])
@looped("shared, told", [(1.0, 0.0), (0.0, 1.0), (0.6, None), (-1.0, 2.0)])
def test_divergence_is_one_less_the_mean_cosine(ranks: int, shared: float, told: float | None) -> None:
    torch.manual_seed(ranks)
    common, *own = torch.randn(ranks + 1, 4096, dtype=torch.float64)
    moves = [shared * common + (1 - abs(shared)) * each for each in own]
    if shared < 0:  # half of the replicas go back
        moves = [common, -common]
    pairs = [(a, b) for a in range(len(moves)) for b in range(len(moves)) if a != b]
    lengths = [float(move.norm()) for move in moves]
    cosine = sum(float(moves[a] @ moves[b]) for a, b in pairs) / sum(lengths[a] * lengths[b] for a, b in pairs)
    found = divergence(float(torch.stack(moves).mean(0).norm()), lengths)
    assert found == pytest.approx(1 - cosine, abs=1e-9)
    assert told is None or found == pytest.approx(told, abs=0.05)


def test_divergence_of_replicas_that_stood_still_or_overflowed() -> None:
    assert divergence(0.0, [0.0, 0.0]) == 0.0
    assert math.isnan(divergence(math.nan, [1.0, math.nan]))


RULES = EveryRules(least=2, most=64, apart=0.9, waiting=0.05, syncs=3, rest=4)
CALM, APART, WAITS = (0.5, 0.0), (0.95, 0.0), (0.5, 0.3)


@looped(
    "start, seen, expected",
    [
        (8, [CALM] * 9, 8),
        (8, [WAITS] * 2, 8),
        (8, [WAITS] * 3, 16),
        (8, [WAITS] * 9, 64),
        (8, [WAITS] * 99, 64),
        (8, [WAITS, WAITS, CALM, WAITS, WAITS], 8),
        (8, [APART] * 3, 4),
        (8, [APART] * 99, 2),
        (8, [APART, APART, CALM, APART, APART], 8),
        (8, [(0.95, 0.3)] * 3, 4),
        (8, [(math.nan, 0.3)] * 3, 4),
        (8, [(0.5, math.nan)] * 3, 8),
        (8, [APART] * 3 + [WAITS] * 3, 4),
        (8, [APART] * 3 + [WAITS] * 4, 8),
        (3, [APART] * 3, 2),
        (48, [WAITS] * 3, 64),
    ],
)
def test_a_period_follows_divergence_first_and_waiting_second(
    start: int, seen: list[tuple[float, float]], expected: int
) -> None:
    state = EveryState(start)
    for drift, waiting in seen:
        state = state.after(drift, waiting, RULES)
    assert state.every == expected


def test_rules_that_contradict_are_refused() -> None:
    with pytest.raises(ConfigError, match="least=8, most=4; expected 1 <= least <= most"):
        replace(RULES, least=8, most=4)
    with pytest.raises(ConfigError, match="syncs=0, rest=4; expected at least 1"):
        replace(RULES, syncs=0)
