"""Plan controllers: the interface for replacing an engine's plan during training."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ..base.plan import FusionPlan
from ..process.clock import HOST, Clock, Stamp
from ..transport import Transport
from .compression_error import ErrorProbe


@dataclass(frozen=True)
class StepSeconds:
    """Seconds of a step on this rank, by the clock of the device that has its gradients.

    A step lasts from its first gradient to the first gradient of the next step.

    Attributes:
        wall: the seconds of the whole step: backward, waiting, update, the next forward, and pauses of training in
            between. Seconds of the plan controller itself do not count.
        backward: from the first gradient to the last, without the seconds in ``submit``.
        submitting: in ``submit``; most of it is encoding ahead of fusion.
        waiting: for results, on the thread that takes them.
        ready: seconds of ``backward`` until each gradient arrived, by name, in order of arrival.
        buckets: seconds for which each bucket was in flight on its lane, by its index in the plan; buckets that still
            are in flight are missing.
        late: steps that have ended since this one; 0 by the host's clock, at least 1 by a device's.
    """

    wall: float
    backward: float
    submitting: float
    waiting: float
    ready: Mapping[str, float]
    buckets: Mapping[int, float]
    late: int = 0


class PlanController(ABC):
    """Watches steps and may give the engine another plan. Each rank has one, and all must come to the same plan.

    An engine calls it in this order, on every rank in the same steps:

    1. ``note_step`` at the first gradient of a step, once for each step before it;
    2. ``due`` when the step's last gradient has been submitted;
    3. if ``due`` returned true: ``next_plan``, when the step's buckets are summed.

    The engine adopts the plan when the next step begins, as with ``Engine.switch``; ranks compare it first. Each tensor
    keeps its error feedback.

    Ranks compare ``str`` of their controllers with each plan, so controllers that decide differently must differ in it.
    """

    def __str__(self) -> str:
        return type(self).__name__

    @abstractmethod
    def note_step(self, plan: FusionPlan | None, step: int, seconds: StepSeconds | None) -> None:
        """Take note that ``step`` has ended, and the seconds of a step on this rank.

        The thread that submits calls it during backward, with the engine's lock held: it must not send or wait.

        Args:
            plan: the plan of the step.
            step: its number.
            seconds: the seconds of step ``step - seconds.late``. None: a device has finished no other step since the
                last call. Ranks may differ in that, so their common actions must not depend on it.
        """

    @abstractmethod
    def due(self, step: int) -> bool:
        """Return whether the engine shall call ``next_plan`` after this step; the same on all ranks.

        It may depend on the number of noted steps and on agreements of ranks, but not on a rank's own
        measurements: a rank that called ``next_plan`` alone would wait for the others for ever.
        """

    def note_errors(  # noqa: B027 - most plan by time alone
        self, plan: FusionPlan, probes: Sequence[ErrorProbe | None]
    ) -> None:
        """Note, just before ``next_plan``, the present plan and the probe of its buckets' errors."""

    @abstractmethod
    def next_plan(self, transport: Transport) -> FusionPlan | None:
        """Return the same plan on all ranks, or None to continue with the present one.

        All ranks call it together, on a communication thread. Meanwhile nothing else is sent and the training thread
        waits. If it raises an error, the engine fails with that error.
        """


_UNREAD = 8
"""Steps whose stamps are kept until the device has reached them."""


@dataclass
class _Stamps:
    """The moments of a step by its clock; pairs are beginning and end."""

    step: int
    began: Stamp
    ended: Stamp = None
    gradients: list[tuple[str, Stamp, Stamp]] = field(default_factory=list)
    waits: list[tuple[Stamp, Stamp]] = field(default_factory=list)
    left_out: list[tuple[Stamp, Stamp]] = field(default_factory=list)
    buckets: dict[int, tuple[Stamp, Stamp]] = field(default_factory=dict)


class StepTimer:
    """Measures the seconds of an engine's steps, without ever waiting for the device that works on them.

    The host only marks moments. ``read`` turns a step's moments into seconds when the device has reached them, which is
    a step later or more. By the host's clock it is complete at once.

    Calls about submitting, ending and taking never overlap: the engine's lock and the order of a step see to that.
    Lanes call ``note_bucket`` at any time.
    """

    def __init__(self, clock: Clock = HOST) -> None:
        self._clock = clock
        self._now: _Stamps | None = None
        self._unread: deque[_Stamps] = deque(maxlen=_UNREAD)
        self._lock = threading.Lock()  # guards which steps these two are, and the stamps of their buckets

    def begin(self, step: int) -> bool:
        """Begin a step with its first gradient; return whether a step has ended with that."""
        with self._lock:
            last, self._now = self._now, _Stamps(step, self._clock.stamp())
            if last is not None:
                last.ended = self._now.began
                self._unread.append(last)
        return last is not None

    def read(self) -> StepSeconds | None:
        """Return the seconds of the latest step that is over and was not read before; None if there is none.

        Steps before it that were not read are dropped: of a device that catches up only the last step is reported.
        """
        for place in reversed(range(len(self._unread))):
            seconds = self._seconds(self._unread[place], late=len(self._unread) - 1 - place)
            if seconds is not None:
                with self._lock:
                    for _ in range(place + 1):
                        self._unread.popleft()
                return seconds
        return None

    def note_gradient(self, name: str, arrived: Stamp) -> None:
        """Record that a gradient arrived at ``arrived`` and has been submitted just now."""
        assert self._now is not None
        # The step begins with its first gradient, though that has arrived a moment before ``begin``.
        arrived = arrived if self._now.gradients else self._now.began
        self._now.gradients.append((name, arrived, self._clock.stamp()))

    def note_bucket(self, step: int, index: int, start: Stamp, end: Stamp) -> None:
        """Record from when to when a bucket was in flight."""
        # A bucket may end after the next step has begun. Its step's seconds have been handed out by then, or its
        # stamps wait for the device.
        with self._lock:
            for each in (self._now, *self._unread):
                if each is not None and each.step == step:
                    each.buckets[index] = (start, end)

    def note_waiting(self, start: Stamp) -> None:
        """Record that results were waited for from ``start`` until now."""
        if self._now is not None:
            self._now.waits.append((start, self._clock.stamp()))

    def leave_out(self, start: Stamp) -> None:
        """Leave the time from ``start`` until now out of the step's ``wall``."""
        if self._now is not None:
            self._now.left_out.append((start, self._clock.stamp()))

    def _seconds(self, stamps: _Stamps, late: int) -> StepSeconds | None:
        """Return the seconds of a step; None if the device has not reached all its moments, except those of buckets."""
        clock, began = self._clock, stamps.began
        wall = clock.seconds(began, stamps.ended)
        if wall is None:
            return None
        pairs = [(began, arrived) for _, arrived, _ in stamps.gradients]
        pairs += [(arrived, submitted) for _, arrived, submitted in stamps.gradients]
        pairs += [*stamps.waits, *stamps.left_out]
        found: list[float] = []
        for start, end in pairs:
            seconds = clock.seconds(start, end)
            if seconds is None:
                return None
            found.append(seconds)
        count, waits = len(stamps.gradients), len(stamps.waits)
        ready: dict[str, float] = {}
        submitting = 0.0
        for (name, _, _), at, spent in zip(stamps.gradients, found[:count], found[count : 2 * count], strict=True):
            ready[name] = max(0.0, at - submitting)
            submitting += spent + min(at, 0.0)  # a gradient of another thread may arrive just before the first one
        with self._lock:
            stamped = list(stamps.buckets.items())
        buckets = {index: clock.seconds(start, end) for index, (start, end) in stamped}
        return StepSeconds(
            wall=wall - sum(found[2 * count + waits :]),
            backward=max(ready.values(), default=0.0),
            submitting=submitting,
            waiting=sum(found[2 * count : 2 * count + waits]),
            ready=ready,
            buckets={index: seconds for index, seconds in buckets.items() if seconds is not None},
            late=late,
        )
