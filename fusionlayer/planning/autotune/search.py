"""The search of autotuning, a generator: it yields windows of training under a plan and receives seconds per step.

It has no clock and sends no messages. So all ranks that send it the same seconds get the same plans.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Generator, Hashable, Iterable, Sequence
from dataclasses import dataclass

from .settings import Autotune
from .space import EVEN, Point, Space

__all__ = ["Search", "Trial", "Window", "typical"]

# A window lasts about so many seconds, but at least and at most so many steps.
WINDOW_SECONDS = 0.2
WINDOW_STEPS = (5, 20)

CLEARLY_SLOWER = 1.1
CLEARLY_FASTER = 0.8
WORTH_A_DUEL = 1.02
DUELS = 3
WORTH_A_SWITCH = 0.98
CHANCE = 0.05
MOST_PAIRS = 12

WARM_UP = 8
LOOK_STEPS = 100
LOOK_WINDOW = 20
PATIENCE = (3, 48)


@dataclass(frozen=True)
class Window:
    """The next steps of training, and the plan for them.

    Attributes:
        point: the plan to train with.
        settle: steps that do not count, at the beginning.
        steps: steps to measure after those. One more step follows, in which ranks agree on the next window.
    """

    point: Point
    settle: int
    steps: int

    @property
    def length(self) -> int:
        """Number of all steps of the window."""
        return self.settle + self.steps + 1


@dataclass(frozen=True)
class Trial:
    """A plan that was tried.

    Attributes:
        stage: "start", "walk", "near", "duel" or "look".
        point: the plan.
        seconds: of a step with it.
        ratio: of these seconds to those of the best plan so far, in the windows before and after.
        best: the best plan when this trial was over.
    """

    stage: str
    point: Point
    seconds: float
    ratio: float
    best: Point


class _OutOfSteps(Exception):
    """The search has used all steps that the user allows."""


Asking = Generator[Window, float, None]
Comparing = Generator[Window, float, float]


class Search:
    """Searches for the plan with the shortest steps, then watches whether they stay as short.

    Machines drift, so seconds are never compared across time. A challenger's window lies between two windows of the
    best plan so far, and only the ratio to their mean counts (A, B, A). A search goes like this:

    1. Walk: try twice as many buckets, four times and so on, then half as many, a quarter and so on, a window each.
       A direction ends when two in a row are slower by more than a tenth.
    2. Duel: the fastest of those compete with the best plan, one after the other, in as many windows as it takes. A
       challenger wins if a sign test gives chance at most 1 in 20 and the median gain is 2 % or more; or if it is a
       fifth faster twice. A challenger that falls behind is dropped at once.
    3. Near the best plan: try other shapes, and half an octave more or fewer buckets, a window each. Duels follow as
       before. Repeat around each new winner, until none wins. A plan has at most one such window and one duel in a
       search, so the search ends.
    4. Look: measure 20 steps in every 100. When several looks in a row are away from the level of the first three,
       another search begins from the best plan. Each search that finds nothing better doubles the number of looks that
       it takes, from 3 to at most 48. So a step time that goes up and down does not make training search for ever.

    Args:
        space: of plans.
        settings: of the user.
        settle: steps after each switch that do not count.
        report: called with each trial.

    Attributes:
        best: the best plan so far.
        gain: seconds of a step with it, as a share of those with the plan that training began with; the product of the
            duels' ratios.
        searching: a search is under way.
    """

    def __init__(
        self, space: Space, settings: Autotune, settle: int, report: Callable[[Trial], object] = lambda trial: None
    ) -> None:
        self.best = space.start
        self.gain = 1.0
        self.searching = True
        self._space = space
        self._settings = settings
        self._settle = settle
        self._report = report
        self._steps_taken = 0
        self._window_steps = WINDOW_STEPS[0]
        self._tried: set[Hashable] = set()
        self._before = 0.0

    def run(self) -> Asking:
        """Yield windows; send it the seconds of a step in each.

        It ends only when the user's steps are used up. Then ``best`` is the plan to train with.
        """
        patience = PATIENCE[0]
        try:
            while True:
                self.searching = True
                was = self.best
                yield from self._search()
                self.searching = False
                patience = min(2 * patience, PATIENCE[1]) if self.best == was else PATIENCE[0]
                yield from self._watch(patience)
        except _OutOfSteps:
            self.searching = False

    def _search(self) -> Asking:
        self._tried = {self._key(self.best)}
        first = yield from self._measure(self.best, WARM_UP)
        low, high = WINDOW_STEPS
        self._window_steps = min(max(math.ceil(WINDOW_SECONDS / first), low), high)
        yield from self._measure_best("start")
        ratios: dict[Point, float] = {}
        for factor in (2.0, 0.5):
            yield from self._walk(factor, ratios)
        while True:
            yield from self._duels(ratios)
            fresh = self._fresh(self._space.neighbours(self.best))
            if not fresh and not ratios:
                return
            for point in fresh:
                ratios[point] = yield from self._compare("near", point)

    def _walk(self, factor: float, ratios: dict[Point, float]) -> Asking:
        """Try more and more, or fewer and fewer buckets, until two in a row are clearly slower."""
        buckets, slower = float(self.best.buckets), 0
        while slower < 2 and self._space.clamp(buckets) != self._space.clamp(buckets * factor):
            buckets *= factor
            point = Point(EVEN, self._space.clamp(buckets))
            ratios[point] = yield from self._compare("walk", point)
            slower = slower + 1 if ratios[point] > CLEARLY_SLOWER else 0

    def _duels(self, ratios: dict[Point, float]) -> Asking:
        """Let the fastest points duel with the best until one wins; remove from ``ratios`` all that cannot win."""
        for challenger in sorted(ratios, key=lambda point: ratios[point])[:DUELS]:
            rough = ratios.pop(challenger)
            if rough > WORTH_A_DUEL:
                break
            ratio = yield from self._duel(challenger)
            if ratio < 1:
                self.best = challenger
                self.gain *= ratio
                # Ratios to the old best plan still hint at points that might beat the new one.
                rivals = {point: known / ratio for point, known in ratios.items() if known / ratio <= WORTH_A_DUEL}
                ratios.clear()
                ratios.update(rivals)
                yield from self._measure_best("start")
                return
        ratios.clear()

    def _duel(self, challenger: Point) -> Comparing:
        """Return the median ratio of a challenger that wins; 1 for one that does not."""
        self._tried.add(self._key(challenger))
        ratios: list[float] = []
        while len(ratios) < MOST_PAIRS:
            ratios.append((yield from self._compare("duel", challenger)))
            middle = statistics.median(ratios)
            if middle > CLEARLY_SLOWER or (len(ratios) >= 3 and middle >= 1):
                return 1.0
            if len(ratios) >= 6 and middle > WORTH_A_SWITCH:
                return 1.0
            if len(ratios) >= 2 and max(ratios) < CLEARLY_FASTER:
                return middle
            if middle <= WORTH_A_SWITCH and _by_chance(sum(ratio < 1 for ratio in ratios), len(ratios)) <= CHANCE:
                return middle
        return 1.0

    def _watch(self, patience: int) -> Asking:
        """Return when it is time for another search."""
        levels: list[float] = []
        away, taken = 0, 0
        while away < patience and (self._settings.every is None or taken < self._settings.every):
            seconds = yield from self._measure(self.best, LOOK_STEPS - LOOK_WINDOW - 1, LOOK_WINDOW)
            taken += LOOK_STEPS
            if len(levels) < 3:
                levels.append(seconds)
            level = statistics.median(levels)
            away = away + 1 if abs(seconds / level - 1) > self._settings.drift else 0
            self._report(Trial("look", self.best, seconds, seconds / level, self.best))

    def _compare(self, stage: str, challenger: Point) -> Comparing:
        """Return the ratio of a challenger's seconds to those of the best plan just before and after."""
        seconds = yield from self._measure(challenger)
        before = self._before
        self._before = yield from self._measure(self.best)
        ratio = 2 * seconds / (before + self._before)
        self._report(Trial(stage, challenger, seconds, ratio, self.best))
        return ratio

    def _measure_best(self, stage: str) -> Asking:
        self._before = yield from self._measure(self.best)
        self._report(Trial(stage, self.best, self._before, 1.0, self.best))

    def _measure(self, point: Point, settle: int | None = None, steps: int | None = None) -> Comparing:
        window = Window(point, self._settle if settle is None else settle, steps or self._window_steps)
        self._steps_taken += window.length
        if self._settings.steps is not None and self._steps_taken > self._settings.steps:
            raise _OutOfSteps
        return (yield window)

    def _fresh(self, points: Iterable[Point]) -> list[Point]:
        """Return the points whose plans have had neither a duel nor a window near the best plan; mark them as tried."""
        fresh = []
        for point in points:
            key = self._key(point)
            if key not in self._tried:
                self._tried.add(key)
                fresh.append(point)
        return fresh

    def _key(self, point: Point) -> Hashable:
        return tuple(bucket.names for bucket in self._space.plan(point).buckets)


def typical(seconds: Sequence[float]) -> float:
    """Return the median of steps without pauses: steps of over twice the median of all."""
    middle = statistics.median(seconds)
    return statistics.median(took for took in seconds if took <= 2 * middle)


def _by_chance(wins: int, pairs: int) -> float:
    """Return the probability of at least so many wins for two equal plans: the one-sided sign test."""
    return sum(math.comb(pairs, k) for k in range(wins, pairs + 1)) / float(2**pairs)
