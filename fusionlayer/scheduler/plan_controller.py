"""Plan controllers: the interface by which an engine gets another plan while training runs."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..plan import FusionPlan
from ..transport import Transport

if TYPE_CHECKING:
    from .engine import Engine

__all__ = ["StepSeconds", "StepTimer", "PlanController"]


@dataclass(frozen=True)
class StepSeconds:
    """Seconds of a step on this rank. A step lasts from its first gradient to the first gradient of the next step.

    Attributes:
        wall: of the whole step: backward, waiting, update, the next forward, and pauses of training in between. Seconds
            of the plan controller itself do not count.
        backward: from the first gradient to the last, without the seconds in ``submit``.
        submitting: in ``submit``; most of it is encoding ahead of fusion.
        waiting: for results, on the thread that takes them.
        ready: seconds of ``backward`` until each gradient arrived, by name, in order of arrival.
        buckets: seconds for which each bucket was under way on its lane, by its index in the plan; buckets that are
            still under way are missing.
    """

    wall: float
    backward: float
    submitting: float
    waiting: float
    ready: Mapping[str, float]
    buckets: Mapping[int, float]


class PlanController(ABC):
    """Watches steps and may give the engine another plan. Each rank has one, and all must come to the same plan.

    An engine calls it in this order, on every rank in the same steps:

    1. ``note_step`` at the first gradient of a step, about the step before;
    2. ``due`` when the step's last gradient has been submitted;
    3. if ``due`` returned true: ``next_plan``, when the step's buckets have travelled.

    The engine adopts the plan when the next step begins, as with ``Engine.switch``; ranks compare it first. Each tensor
    keeps its error feedback.

    Ranks compare ``str`` of their controllers with each plan, so controllers that decide differently must differ in it.
    """

    def __str__(self) -> str:
        return type(self).__name__

    @abstractmethod
    def note_step(self, engine: Engine, step: int, seconds: StepSeconds) -> None:
        """Take the seconds of a step on this rank.

        The thread that submits calls it during backward, with the engine's lock held: it must not send or wait.
        """

    @abstractmethod
    def due(self, step: int) -> bool:
        """Return whether the engine shall call ``next_plan`` after this step; the same on all ranks.

        It may depend on the number of noted steps and on what ranks have agreed on, but not on a rank's own
        measurements: a rank that called ``next_plan`` alone would wait for the others for ever.
        """

    @abstractmethod
    def next_plan(self, transport: Transport) -> FusionPlan | None:
        """Return the same plan on all ranks, or None to go on with the present one.

        All ranks call it together, on a communication thread. Meanwhile nothing else travels and the training thread
        waits. If it raises an error, the engine fails with that error.
        """


class StepTimer:
    """Measures the seconds of an engine's steps.

    Calls about submitting, ending and taking never overlap: the engine's lock and the order of a step see to that.
    Lanes call ``note_bucket`` at any time. Each lane stores other buckets, so no lock is needed.
    """

    def __init__(self) -> None:
        self._step = -1
        self._left_out = 0.0
        self._began = self._submitted = time.perf_counter()
        self._submitting = self._waiting = 0.0
        self._ready: dict[str, float] = {}
        self._buckets: dict[int, float] = {}

    def begin(self, step: int) -> StepSeconds | None:
        """Begin a step with its first gradient; return the seconds of the step before, if there was one."""
        now = time.perf_counter()
        seconds = None
        if self._step >= 0:
            seconds = StepSeconds(
                wall=now - self._began - self._left_out,
                backward=max(self._ready.values(), default=0.0),
                submitting=self._submitting,
                waiting=self._waiting,
                ready=self._ready,
                buckets=self._buckets,
            )
        self._step = step
        self._began = self._submitted = now
        self._left_out = self._submitting = self._waiting = 0.0
        self._ready, self._buckets = {}, {}
        return seconds

    def note_gradient(self, name: str, arrived: float) -> None:
        """Record that a gradient arrived at ``arrived`` and has been submitted just now."""
        now = time.perf_counter()
        self._ready[name] = max(0.0, arrived - self._began - self._submitting)
        self._submitting += now - max(arrived, self._began)

    def note_bucket(self, step: int, index: int, seconds: float) -> None:
        """Record for how many seconds a bucket was under way."""
        # A bucket may end after the next step has begun; its step's seconds have been handed out by then.
        if step == self._step:
            self._buckets[index] = seconds

    def note_waiting(self, seconds: float) -> None:
        """Add seconds of waiting for results."""
        self._waiting += seconds

    def leave_out(self, seconds: float) -> None:
        """Leave these seconds out of the step's ``wall``."""
        self._left_out += seconds
