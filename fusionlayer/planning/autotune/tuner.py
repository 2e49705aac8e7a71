"""The plan controller of autotuning: ranks agree on measured steps, and the engine gets the search's plans."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from ...clock import Clock
from ...plan import FusionPlan, TensorInfo
from ...scheduler.order import MEASURED, WARM_UP
from ...scheduler.plan_controller import PlanController, StepSeconds
from ...transport import Transport
from .log import TrialLog
from .search import Asking, Search, Trial, Window, typical
from .settings import Autotune
from .space import Space

if TYPE_CHECKING:
    from ...scheduler.engine import Engine

__all__ = ["Autotuner"]

# Steps after a switch that do not count: the first makes the buffers, the second uses them again for the first time.
SETTLE = 2
SETTLE_WITH_ORDER = WARM_UP + MEASURED + 1


class Autotuner(PlanController):
    """Gives the engine the plan of a ``Space`` with the shortest measured steps; see ``Search``.

    A step counts as long as on its slowest rank, if the devices of all ranks have told by the end of its window. At the
    end of a window, ranks exchange the seconds of its steps in one message of 8 bytes a step: every 8 to 23 steps
    during a search, every 100 after it. Nothing is sent in between, and with ``settings.steps`` nothing after those.

    Args:
        tensors: of the engine.
        settings: of the user.
        rank: this rank; rank 0 keeps the log.
        clock: of the gradients' device.
        overlap_forward: as in the engine: a plan then gets its final order only after some steps.
        first: gives the plan to start from, the first time that it is due, and is not asked again. None: start from the
            engine's own plan.

    Attributes:
        first: as given.
    """

    def __init__(
        self,
        tensors: Iterable[TensorInfo],
        settings: Autotune,
        rank: int,
        clock: Clock,
        overlap_forward: bool = False,
        first: PlanController | None = None,
    ) -> None:
        # The fields below need no lock. The thread that submits writes them in ``note_step``, a communication thread in
        # ``next_plan``; meanwhile the engine lets the first thread wait.
        self.first = first
        self._waits_for = first
        self._tensors = list(tensors)
        self._settings = settings
        self._settle = SETTLE_WITH_ORDER if overlap_forward else SETTLE
        self._clock = clock
        self._log = TrialLog(settings.log) if rank == 0 else None
        self._windows: _Windows | None = None
        self._step = 0

    def __str__(self) -> str:
        return f"{replace(self._settings, log=None)} {self.first}"

    def note_step(self, engine: Engine, step: int, seconds: StepSeconds | None) -> None:
        """Count a step; the first step shows the plan to start from."""
        self._step = step
        if self._waits_for is not None:
            self._waits_for.note_step(engine, step, seconds)
        elif self._windows is None:
            assert engine.plan is not None
            space = Space(engine.plan, self._tensors)
            self._windows = _Windows(space, Search(space, self._settings, self._settle, self._note_trial))
        else:
            self._windows.note(step, seconds)

    def due(self, step: int) -> bool:
        """Return whether the window is over."""
        # A window ends after a number of steps, never after a time. Each rank has its own clock, so ranks would ask in
        # different steps, and the first would wait for the others for ever.
        if self._waits_for is not None:
            return self._waits_for.due(step)
        return self._windows is not None and self._windows.over

    def next_plan(self, transport: Transport) -> FusionPlan | None:
        """Agree on the window's seconds; return the next window's plan, or None if it stays the same."""
        if self._waits_for is not None:
            first, self._waits_for = self._waits_for, None
            return first.next_plan(transport)
        assert self._windows is not None
        # Every rank's search gets the same seconds, so it yields the same next plan.
        slowest = _slowest(self._windows.seconds, transport)
        if slowest is None:
            self._clock.finish()  # so it tells at once of the steps that it has in hand
            self._windows.again()
            return None
        plan = self._windows.end(slowest)
        if self._log is not None:
            self._log.note_progress(self._step, self._windows.search)
        return plan

    def _note_trial(self, trial: Trial) -> None:
        if self._log is not None:
            self._log.note_trial(self._step, trial)


class _Windows:
    """The windows of a search, one after the other, counted in steps.

    Attributes:
        search: the search.
        seconds: of the steps of the present window that have ended; NaN where a device has not told them.
    """

    def __init__(self, space: Space, search: Search) -> None:
        self.search = search
        self._space = space
        self._asking: Asking = search.run()
        self._window: Window | None = next(self._asking, None)
        self._to_skip = 0 if self._window is None else self._window.settle
        self._first = 0  # step of the window that counts
        self.seconds: list[float] = []

    @property
    def over(self) -> bool:
        """Whether the present window is over."""
        return self._window is not None and len(self.seconds) == self._window.steps

    def note(self, step: int, seconds: StepSeconds | None) -> None:
        """Count a step of the present window, and keep the seconds if they are of this window."""
        if self._to_skip:
            self._to_skip -= 1
            self._first = step + 1
            return
        if self._window is None:
            return
        self.seconds.append(math.nan)
        if seconds is not None and step - seconds.late >= self._first:
            self.seconds[step - seconds.late - self._first] = seconds.wall

    def again(self) -> None:
        """Begin the present window once more, without a switch."""
        self._first += len(self.seconds)
        self.seconds.clear()

    def end(self, seconds: float) -> FusionPlan | None:
        """End the window with its ``seconds`` per step; return the next window's plan, or None if it stays the same."""
        assert self._window is not None
        last = self._window.point
        try:
            self._window = self._asking.send(seconds)
            point = self._window.point
            self._to_skip = self._window.settle + 1  # one more: the present step has not been noted yet
        except StopIteration:
            self._window, point = None, self.search.best
        self.seconds.clear()
        return None if point == last else self._space.plan(point)


def _slowest(seconds: Sequence[float], transport: Transport) -> float | None:
    """Return the typical seconds of a step, each step as long as on its slowest rank; None if no step counts.

    Steps that are NaN on a rank do not count. All ranks call it together, with equally many ``seconds``.
    """
    mine = torch.tensor(seconds, dtype=torch.float64, device="cpu")
    every = torch.empty(transport.size, len(seconds), dtype=torch.float64, device="cpu")
    transport.all_gather(mine.view(torch.uint8), every.view(torch.uint8))
    slowest = [each for each in every.amax(0).tolist() if not math.isnan(each)]
    return typical(slowest) if slowest else None
