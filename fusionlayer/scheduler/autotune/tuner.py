"""The search at work: it watches an engine's steps, ranks agree on what they took, and the engine gets the plan."""

from __future__ import annotations

import csv
import logging
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ...errors import ConfigError
from ...plan import FusionPlan, TensorInfo
from ...transport import Transport
from ..order import MEASURED, WARM_UP
from ..steering import Steering, StepSeconds
from .search import Asking, Search, Trial, Window, typical
from .settings import Autotune
from .space import Space

if TYPE_CHECKING:
    from ..engine import Engine

__all__ = ["Autotuner"]

_logger = logging.getLogger("fusionlayer")

COLUMNS = ("step", "stage", "shape", "buckets", "seconds", "ratio", "best_shape", "best_buckets")

# A plan's first step makes its buffers, the second is the first to touch them again.
SETTLE = 2
SETTLE_WITH_ORDER = WARM_UP + MEASURED + 1


class Autotuner(Steering):
    """Hands the engine the plan with the shortest measured steps of those of a ``Space``; see ``Search``.

    A step is as long as its slowest rank says. Ranks tell each other the seconds of a window's steps in one message of
    8 bytes a step, when the window is over: every 5 to 20 steps during a search, every 100 after it. In between, and
    with ``settings.steps`` for ever after, nothing is sent.

    Args:
        tensors: of the engine.
        settings: of the user.
        rank: this rank; rank 0 logs.
        device: of the gradients. On a GPU the training thread waits for it once in each measured step.
        overlap_forward: as the engine has it: a plan then gets its final order after some steps only.
    """

    def __init__(
        self,
        tensors: Iterable[TensorInfo],
        settings: Autotune,
        rank: int,
        device: torch.device,
        overlap_forward: bool = False,
    ) -> None:
        self._tensors = list(tensors)
        self._settings = settings
        self._settle = SETTLE_WITH_ORDER if overlap_forward else SETTLE
        self._device = device
        self._logs = rank == 0
        self._log = Path(settings.log) if settings.log and rank == 0 else None
        self._write(COLUMNS, "w")
        self._step = 0
        self._space: Space | None = None
        self._search: Search | None = None
        self._asking: Asking | None = None
        self._window: Window | None = None
        self._to_skip = 0
        self._seconds: list[float] = []

    def __str__(self) -> str:
        """Return what must be the same on all ranks."""
        return str(replace(self._settings, log=None))

    def note_step(self, engine: Engine, step: int, seconds: StepSeconds) -> None:
        """Learn what a step took; the first one brings the plan to start from."""
        self._step = step
        if self._search is None:
            assert engine.plan is not None
            self._space = Space(engine.plan, self._tensors)
            self._search = Search(self._space, self._settings, self._settle, self._note_trial)
            self._asking = self._search.run()
            self._window = next(self._asking, None)
            self._to_skip = self._window.settle if self._window else 0
        if self._window is None:
            return
        if self._device.type == "cuda" and self._to_skip <= 1:
            torch.cuda.current_stream(self._device).synchronize()
        if self._to_skip:
            self._to_skip -= 1
        else:
            self._seconds.append(seconds.wall)

    def due(self, step: int) -> bool:
        """Return whether the window is over."""
        return self._window is not None and len(self._seconds) == self._window.steps

    def next_plan(self, transport: Transport) -> FusionPlan | None:
        """Agree on the window's seconds; return the plan of the next window if it is another one."""
        assert self._window is not None and self._search is not None and self._asking is not None
        assert self._space is not None
        every = _gather(self._seconds, transport)
        seconds = typical([max(ranks) for ranks in zip(*every, strict=True)])
        last, was_best, searched = self._window.point, self._search.best, self._search.searching
        try:
            self._window = self._asking.send(seconds)
            point = self._window.point
            self._to_skip = self._window.settle + 1  # this step's own note is still to come
        except StopIteration:
            self._window, point = None, self._search.best
        self._seconds.clear()
        if self._logs:
            self._tell(was_best, searched)
        return None if point == last else self._space.plan(point)

    def _tell(self, was_best: object, searched: bool) -> None:
        assert self._search is not None
        best = self._search.best
        if best != was_best:
            _logger.info("autotune, step %d: %s are faster than %s", self._step, best, was_best)
        if searched and not self._search.searching:
            gain = f"{self._search.gain:.2f} of the steps of the plan that training began with"
            _logger.info("autotune, step %d: search is over: %s, %s", self._step, best, gain)
        if not searched and self._search.searching:
            _logger.info("autotune, step %d: step time has changed, or it is time: another search begins", self._step)

    def _note_trial(self, trial: Trial) -> None:
        if not self._logs:
            return
        _logger.debug(
            "autotune, step %d, %s: %s: %.6f s, ratio %.3f", self._step, trial.stage, trial.point, trial.seconds, trial.ratio
        )
        point, best = trial.point, trial.best
        times = (f"{trial.seconds:.6f}", f"{trial.ratio:.4f}")
        self._write((self._step, trial.stage, point.shape, point.buckets, *times, best.shape, best.buckets), "a")

    def _write(self, row: Sequence[object], mode: str) -> None:
        if self._log is None:
            return
        try:
            with self._log.open(mode, newline="") as file:
                csv.writer(file).writerow(row)
        except OSError as error:
            raise ConfigError(f"autotune: log={str(self._log)!r} cannot be written: {error}; name another file") from error


def _gather(seconds: Sequence[float], transport: Transport) -> list[list[float]]:
    """Return every rank's ``seconds``, equally many on each, in rank order."""
    mine = torch.tensor(seconds, dtype=torch.float64)
    every = torch.empty(transport.size, len(seconds), dtype=torch.float64)
    transport.all_gather(mine.view(torch.uint8), every.view(torch.uint8))
    rows: list[list[float]] = every.tolist()
    return rows
