"""The seam between an engine and what may give it another plan while training runs."""

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
    """What a step took on this rank, in seconds. It lasts from its first gradient to the first of the next step.

    Attributes:
        wall: of all of it: backward, waiting, update and the next forward, and pauses that training makes in between;
            what the plan controller itself took is left out.
        backward: from the first gradient to the last, what ``submit`` took left out.
        submitting: in ``submit``: above all what was encoded ahead of fusion.
        waiting: for results, by the thread that takes them.
        ready: seconds of ``backward`` after which each gradient was there, by name, in order of arrival.
        buckets: for which each bucket was under way on its lane, by its place in the plan; one that is under way still
            is not there.
    """

    wall: float
    backward: float
    submitting: float
    waiting: float
    ready: Mapping[str, float]
    buckets: Mapping[int, float]


class PlanController(ABC):
    """Watches steps and may give the engine another plan; all ranks hold one each and come to the same plan.

    An engine asks in this order, on every rank in the same steps:

    1. ``note_step`` at the first gradient of a step, about the step before;
    2. ``due`` when the step's last gradient has been submitted;
    3. if it is: ``next_plan`` when the step's buckets have travelled. The training thread waits for it.

    The plan is adopted when the next step begins, as by ``Engine.switch``; ranks compare it first. Error feedback goes
    along with the tensors.

    ``str`` is compared over ranks with each plan: two that steer otherwise must differ in it.
    """

    def __str__(self) -> str:
        return type(self).__name__

    @abstractmethod
    def note_step(self, engine: Engine, step: int, seconds: StepSeconds) -> None:
        """Learn what a step took on this rank. Called by the thread that submits: no messages, no waiting."""

    @abstractmethod
    def due(self, step: int) -> bool:
        """Return whether ``next_plan`` is to be asked after this step; the same on all ranks, whatever they measured.

        It may follow from the number of steps that were noted and from what ranks have agreed on, nothing else.
        """

    @abstractmethod
    def next_plan(self, transport: Transport) -> FusionPlan | None:
        """Return the same plan on all ranks, or None to go on with the present one.

        All ranks call it together, on a communication thread, while nothing else travels and training waits; what it
        raises is the engine's failure.
        """


class StepTimer:
    """Takes the times of an engine's steps.

    Submitting, ending and taking are one thread's after the other; ``note_bucket`` is called by the lanes.
    """

    def __init__(self) -> None:
        self._step = -1
        self._left_out = 0.0
        self._began = self._submitted = time.perf_counter()
        self._submitting = self._waiting = 0.0
        self._ready: dict[str, float] = {}
        self._buckets: dict[int, float] = {}

    def begin(self, step: int) -> StepSeconds | None:
        """Begin a step with its first gradient; return what the step before took, if there was one."""
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
        """Note that a gradient arrived at ``arrived`` and has just been submitted."""
        now = time.perf_counter()
        self._ready[name] = max(0.0, arrived - self._began - self._submitting)
        self._submitting += now - max(arrived, self._began)

    def note_bucket(self, step: int, index: int, seconds: float) -> None:
        """Note how long a bucket has been under way."""
        if step == self._step:
            self._buckets[index] = seconds

    def note_waiting(self, seconds: float) -> None:
        """Note a wait for results."""
        self._waiting += seconds

    def leave_out(self, seconds: float) -> None:
        """Do not count these seconds of the step."""
        self._left_out += seconds
