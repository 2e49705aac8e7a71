"""Autotuning's space of plans, and its search on made-up step times."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusionlayer.errors import ConfigError
from fusionlayer.plan import FusionPlan, TensorInfo
from fusionlayer.planning.autotune import Autotune
from fusionlayer.planning.autotune.search import LOOK_STEPS, Search, Trial, Window, typical
from fusionlayer.planning.autotune.space import EVEN, SHAPES, Point, Space, cut
from fusionlayer.scheduler import planners
from tests.loops import looped
from tests.scheduler.steps import tensors_of

pytestmark = pytest.mark.short

MODEL = tensors_of([1000 * (1 + i % 7) for i in range(96)])

StepTime = Callable[[FusionPlan, int], float]


@cache
def space_of(planner: str) -> Space:
    """Return the space around a planner's plan for ``MODEL``; it remembers its plans."""
    return Space(FusionPlan.build(planners.get(planner)(MODEL), 2, "raw", {}, "dense", 128), MODEL)


# ---- the space ------------------------------------------------------------------------------------------------------


@given(
    st.lists(st.sampled_from([0, 1, 10, 1000, 100_000]), min_size=1, max_size=40), st.sampled_from(SHAPES), st.data()
)
def test_cut_gives_every_tensor_to_one_of_so_many_runs(sizes: list[int], shape: str, data: st.DataObject) -> None:
    tensors = tensors_of(sizes)
    buckets = data.draw(st.integers(1, len(tensors)))
    runs = cut(tensors, shape, buckets)
    assert len(runs) == buckets and all(runs)
    assert [tensor for run in runs for tensor in run] == tensors


def test_shapes() -> None:
    tensors = tensors_of([5] * 8 + [20] * 8)

    def sizes(shape: str, buckets: int) -> list[int]:
        return [sum(tensor.numel for tensor in run) for run in cut(tensors, shape, buckets)]

    assert sizes(EVEN, 5) == [40] * 5
    assert sizes("tensors", 4) == [20, 20, 80, 80]
    assert [len(run) for run in cut(tensors_of([1] * 46), "tapered", 8)] == [2, 3, 6, 12, 12, 6, 3, 2]


@looped("shape", SHAPES)
def test_codecs_element_types_and_groups_stay_apart(shape: str) -> None:
    own = {4: 7, 5: 7}
    tensors = [TensorInfo(f"t{i}", 100, *(("bfloat16", 2), ("float32", 4))[i % 3 > 0], own.get(i)) for i in range(12)]
    sparse = [TensorInfo(f"s{i}", 9, "float32", 4) for i in range(3)]
    dense = FusionPlan.build(planners.get("single")(tensors), 2, "raw", {}, "dense", 128)
    ahead = FusionPlan.build([sparse], 2, "topk", {"density": 0.1}, "gather", 1, True)
    plan = FusionPlan((*dense.buckets, *ahead.buckets), 2)
    way = {name: replace(bucket, slots=(), numel=0) for bucket in plan.buckets for name in bucket.names}
    space = Space(plan, [*tensors, *sparse])
    assert space.plan(space.start) == plan
    assert space.start.buckets == 3 and space.most == 13
    for buckets in range(1, 16):
        tried = space.plan(Point(shape, buckets))
        tried.check([*tensors, *sparse], 2)
        for bucket in tried.buckets:
            assert all(way[name] == replace(bucket, slots=(), numel=0) for name in bucket.names)
        assert ("t4", "t5") in [bucket.names for bucket in tried.buckets]


# ---- the search -----------------------------------------------------------------------------------------------------


@dataclass
class Run:
    """Training with steps of made-up seconds, which autotuning watches."""

    step_time: StepTime
    noise: float = 0.0
    pauses: int = 0
    planner: str = "wfbp"
    settings: Autotune = field(default_factory=Autotune)
    seed: int = 0

    def __post_init__(self) -> None:
        self.space = space_of(self.planner)
        self.trials: list[Trial] = []
        self.search = Search(self.space, self.settings, 2, self.trials.append)
        self.asking = self.search.run()
        first = next(self.asking, None)
        self.ended = first is None
        self.window = first or Window(self.space.start, 0, 1)
        self.random = random.Random(self.seed)
        self.step = 0
        self.switches: list[int] = []

    def seconds(self, plan: FusionPlan) -> float:
        """Return what a step takes just now: log-normal noise, and now and then a checkpoint."""
        took = self.step_time(plan, self.step) * math.exp(self.random.gauss(0, self.noise))
        self.step += 1
        return took + (10.0 if self.pauses and self.step % self.pauses == 0 else 0.0)

    def advance(self) -> None:
        """Train for one window."""
        plan = self.space.plan(self.window.point)
        taken = [self.seconds(plan) for _ in range(self.window.length)]
        last = self.window.point
        try:
            measured = taken[self.window.settle : self.window.settle + self.window.steps]
            self.window = self.asking.send(typical(measured))
        except StopIteration:
            self.ended = True
        if self.window.point != last:
            self.switches.append(self.step)

    def until_found(self) -> Point:
        """Train until the search is over and return what it found."""
        while self.search.searching:
            self.advance()
            assert self.step < 6000, "the search does not end"
        return self.search.best

    def for_steps(self, steps: int) -> None:
        """Train on."""
        end = self.step + steps
        while self.step < end and not self.ended:
            self.advance()

    def excess(self) -> float:
        """Return the share by which the plan that was found is slower than the best there is."""
        every = [self.space.start, *(Point(s, n) for s in SHAPES for n in range(1, self.space.most + 1))]
        best = min(self.step_time(self.space.plan(point), self.step) for point in every)
        return self.step_time(self.space.plan(self.search.best), self.step) / best - 1


def valley(best: float) -> StepTime:
    """Return a step time with one minimum over the logarithm of the number of buckets."""
    return lambda plan, step: 0.03 * (1 + 0.1 * math.log2(len(plan.buckets) / best) ** 2)


def overlapped(startup: float, rate: float) -> StepTime:
    """Return the step time of one communication thread beside backward: predicted by no formula of the search."""

    def seconds(plan: FusionPlan, step: int) -> float:
        free = now = 0.0
        for bucket in plan.buckets:
            now += 1e-8 * sum(slot.numel for slot in bucket.slots)
            free = max(free, now) + startup + bucket.numel / rate
        return 0.01 + max(now, free)

    return seconds


def two_valleys(plan: FusionPlan, step: int) -> float:
    """Return a step time with a ridge between a good and a better number of buckets."""
    octaves = math.log2(len(plan.buckets))
    return 0.02 * (1 + min(0.15 + 0.15 * (octaves - 5) ** 2, 0.15 * (octaves - 3) ** 2))


def flat(plan: FusionPlan, step: int) -> float:
    return 0.02


@looped("noise", [0.0, 0.05, 0.1])
@looped("planner", ["wfbp", "single", "tapered"])
@looped(
    "step_time",
    [valley(1), valley(5), valley(30), overlapped(1e-4, 1e8), overlapped(2e-5, 1e9), overlapped(1e-6, 2e7)],
    ids=["few", "some", "many", "slow net", "fast net", "bandwidth"],
)
def test_finds_what_is_within_a_tenth_of_the_best(step_time: StepTime, planner: str, noise: float) -> None:
    run = Run(step_time, noise, planner=planner)
    run.until_found()
    assert run.excess() < 0.1, (run.search.best, run.step)
    assert run.step < 2500


def test_goes_over_a_ridge() -> None:
    for seed in range(5):
        run = Run(two_valleys, 0.03, seed=seed)
        run.until_found()
        assert run.excess() < 0.1


def test_pauses_are_not_scored() -> None:
    with_pauses, without = Run(valley(5), 0.03, pauses=6), Run(valley(5), 0.03)
    with_pauses.until_found()
    without.until_found()
    assert with_pauses.excess() < 0.1
    assert all(trial.seconds < 1 for trial in with_pauses.trials)


def test_steady_steps_are_left_alone() -> None:
    """Nothing is gained: the plan stays, and in steady training there is nothing but looks."""
    for seed in range(5):
        run = Run(flat, 0.05, seed=seed)
        run.until_found()
        assert run.search.gain > 0.9
        switches = len(run.switches)
        run.for_steps(20_000)
        assert len(run.switches) == switches
        assert {trial.stage for trial in run.trials[-150:]} == {"look"}
        assert run.window.length == LOOK_STEPS


def test_without_gain_there_is_no_switch() -> None:
    run = Run(flat)
    assert run.until_found() == run.space.start and run.search.gain == 1


def test_looks_again_when_steps_drift() -> None:
    """The network becomes slow for good: the best plan is another one, and is found; then there is peace."""

    def network(plan: FusionPlan, step: int) -> float:
        return valley(32 if step < 3000 else 2)(plan, step)

    run = Run(network, 0.03)
    run.until_found()
    before = run.search.best.buckets
    run.for_steps(3000 - run.step)
    assert not run.search.searching and run.search.best.buckets == before
    run.for_steps(3000)
    assert run.excess() < 0.1 and run.search.best.buckets < before
    switches = len(run.switches)
    run.for_steps(5000)
    assert len(run.switches) == switches


def test_a_step_time_that_comes_and_goes_is_searched_ever_more_rarely() -> None:
    def tides(plan: FusionPlan, step: int) -> float:
        return 0.02 * (1.5 if step // 2000 % 2 else 1.0)

    run = Run(tides, 0.02)
    searching = 0
    for _ in range(2000):
        was = run.search.searching
        run.advance()
        searching += not was and run.search.searching
    assert 1 <= searching <= 6
    assert run.search.best == run.space.start


def test_searches_again_after_so_many_steps() -> None:
    run = Run(flat, settings=Autotune(every=300))
    run.until_found()
    begun = run.step
    while not run.search.searching:
        run.advance()
    assert run.step - begun == 300


@looped("steps", [1, 10, 60, 200, 100_000])
def test_ends_with_the_steps_it_was_given(steps: int) -> None:
    run = Run(valley(5), settings=Autotune(steps=steps))
    while not run.ended and run.step < 2000:
        run.advance()
    assert run.step <= steps
    assert run.ended == (steps <= 2000) and not (run.ended and run.search.searching)


def test_what_ends_early_keeps_the_best_so_far() -> None:
    """Never the challenger of the moment."""
    for steps in range(50, 400, 37):
        run = Run(valley(5), settings=Autotune(steps=steps))
        while not run.ended:
            run.advance()
        assert valley(5)(run.space.plan(run.search.best), 0) <= valley(5)(run.space.plan(run.space.start), 0)


def test_same_seconds_same_plans() -> None:
    runs = [Run(valley(5), 0.1, seed=3) for _ in range(2)]
    for run in runs:
        run.for_steps(2000)
    assert runs[0].trials == runs[1].trials and runs[0].switches == runs[1].switches


def test_typical() -> None:
    assert typical([1.0, 1.2, 30.0, 1.1, 0.9, 1.0]) == 1.0
    assert typical([2.0]) == 2.0


@looped(
    "options, words",
    [
        ({"steps": 0}, "autotune: steps=0; expected a whole number"),
        ({"steps": True}, "steps=True"),
        ({"every": 1.5}, "every=1.5"),
        ({"drift": 0}, "autotune: drift=0.0; expected a share"),
        ({"log": 3}, "autotune: log=3; expected a text or null"),
        ({"stps": 3}, "autotune: unknown key 'stps'; did you mean 'steps'"),
    ],
)
def test_settings_that_have_no_meaning(options: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Autotune.of(options)
