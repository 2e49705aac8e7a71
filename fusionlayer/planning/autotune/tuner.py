"""The search at work: it watches an engine's steps, ranks agree on what they took, and the engine gets the plan."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

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

# A plan's first step makes its buffers, the second is the first to touch them again.
SETTLE = 2
SETTLE_WITH_ORDER = WARM_UP + MEASURED + 1


class Autotuner(PlanController):
    """Hands the engine the plan with the shortest measured steps of those of a ``Space``; see ``Search``.

    A step is as long as its slowest rank says. Ranks tell each other the seconds of a window's steps in one message of
    8 bytes a step, when the window is over: every 8 to 23 steps during a search, every 100 after it. In between, and
    with ``settings.steps`` for ever after those, nothing is sent.

    Args:
        tensors: of the engine.
        settings: of the user.
        rank: this rank; rank 0 keeps the log.
        device: of the gradients. On a GPU the training thread waits for it once in each measured step.
        overlap_forward: as the engine has it: a plan then gets its final order after some steps only.
        first: brings the plan to start from when it is due for the first time, and is not asked again; None: the
            engine's own plan is that.

    Attributes:
        first: as given.
    """

    def __init__(
        self,
        tensors: Iterable[TensorInfo],
        settings: Autotune,
        rank: int,
        device: torch.device,
        overlap_forward: bool = False,
        first: PlanController | None = None,
    ) -> None:
        # No lock guards what follows. The thread that submits writes it in ``note_step``, a communication thread in
        # ``next_plan``; the engine lets the first thread wait until that has returned.
        self.first = first
        self._waits_for = first
        self._tensors = list(tensors)
        self._settings = settings
        self._settle = SETTLE_WITH_ORDER if overlap_forward else SETTLE
        self._device = device
        self._log = TrialLog(settings.log) if rank == 0 else None
        self._windows: _Windows | None = None
        self._step = 0

    def __str__(self) -> str:
        return f"{replace(self._settings, log=None)} {self.first}"

    def note_step(self, engine: Engine, step: int, seconds: StepSeconds) -> None:
        """Learn what a step took; the first one brings the plan to start from."""
        self._step = step
        if self._waits_for is not None:
            self._waits_for.note_step(engine, step, seconds)
        elif self._windows is None:
            assert engine.plan is not None
            space = Space(engine.plan, self._tensors)
            self._windows = _Windows(space, Search(space, self._settings, self._settle, self._note_trial))
        else:
            if self._device.type == "cuda" and self._windows.measuring:
                # Kernels are only queued when the host gets here; without this a step would seem to take no time.
                torch.cuda.current_stream(self._device).synchronize()
            self._windows.note(seconds.wall)

    def due(self, step: int) -> bool:
        """Return whether the window is over."""
        # A window ends after a number of steps, never after a time: ranks with clocks of their own would ask in
        # different steps, and the first to ask would wait for the others for ever.
        if self._waits_for is not None:
            return self._waits_for.due(step)
        return self._windows is not None and self._windows.over

    def next_plan(self, transport: Transport) -> FusionPlan | None:
        """Agree on the window's seconds; return the plan of the next window if it is another one."""
        if self._waits_for is not None:
            first, self._waits_for = self._waits_for, None
            return first.next_plan(transport)
        assert self._windows is not None
        # Every rank's search is told the same seconds, so every rank's search asks for the same next plan.
        plan = self._windows.end(_slowest(self._windows.seconds, transport))
        if self._log is not None:
            self._log.note_progress(self._step, self._windows.search)
        return plan

    def _note_trial(self, trial: Trial) -> None:
        if self._log is not None:
            self._log.note_trial(self._step, trial)


class _Windows:
    """The windows of a search, one after the other, counted in steps."""

    def __init__(self, space: Space, search: Search) -> None:
        self.search = search
        self._space = space
        self._asking: Asking = search.run()
        self._window: Window | None = next(self._asking, None)
        self._to_skip = 0 if self._window is None else self._window.settle
        self.seconds: list[float] = []

    @property
    def measuring(self) -> bool:
        """Whether the step that begins counts, or the one that ends does."""
        return self._window is not None and self._to_skip <= 1

    @property
    def over(self) -> bool:
        """Whether the present window is over."""
        return self._window is not None and len(self.seconds) == self._window.steps

    def note(self, seconds: float) -> None:
        """Count a step of the present window."""
        if self._to_skip:
            self._to_skip -= 1
        elif self._window is not None:
            self.seconds.append(seconds)

    def end(self, seconds: float) -> FusionPlan | None:
        """End the window, whose steps took so long; return the next one's plan if it is another one."""
        assert self._window is not None
        last = self._window.point
        try:
            self._window = self._asking.send(seconds)
            point = self._window.point
            self._to_skip = self._window.settle + 1  # the present step is still to be noted
        except StopIteration:
            self._window, point = None, self.search.best
        self.seconds.clear()
        return None if point == last else self._space.plan(point)


def _slowest(seconds: Sequence[float], transport: Transport) -> float:
    """Return what a step takes where each of ``seconds``, equally many on all ranks, is its slowest rank's."""
    mine = torch.tensor(seconds, dtype=torch.float64)
    every = torch.empty(transport.size, len(seconds), dtype=torch.float64)
    transport.all_gather(mine.view(torch.uint8), every.view(torch.uint8))
    return typical(every.amax(0).tolist())
