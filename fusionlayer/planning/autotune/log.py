"""Reports what a search has tried: rows of a CSV file, and lines of the log."""

from __future__ import annotations

import csv
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ...errors import ConfigError
from .search import Search, Trial

__all__ = ["COLUMNS", "TrialLog", "TrialRow", "read_log"]

COLUMNS = ("step", "stage", "shape", "buckets", "seconds", "ratio", "best_shape", "best_buckets")

_logger = logging.getLogger("fusionlayer")


@dataclass(frozen=True)
class TrialRow:
    """A row of the CSV file.

    Attributes:
        step: of training.
        stage: of the search, such as "walk"; "look" between two searches.
        shape: of the plan that was tried.
        buckets: of that plan.
        seconds: of its step.
        ratio: of that to the best plan's step; of a look to the steps of the first looks.
        best_shape: of the best plan so far.
        best_buckets: of that plan.
    """

    step: int
    stage: str
    shape: str
    buckets: int
    seconds: float
    ratio: float
    best_shape: str
    best_buckets: int

    @property
    def plan(self) -> tuple[str, int]:
        """Shape and buckets of the plan that was tried."""
        return self.shape, self.buckets

    @property
    def best(self) -> tuple[str, int]:
        """Shape and buckets of the best plan."""
        return self.best_shape, self.best_buckets

    @property
    def is_best(self) -> bool:
        """Whether the plan that was tried was the best already."""
        return self.plan == self.best


def read_log(path: str | Path) -> list[TrialRow]:
    """Return the rows of a file that ``TrialLog`` has written; a row that is not complete ends them.

    Raises:
        ConfigError: the file cannot be read, or is no such log.
    """
    try:
        with Path(path).open(newline="") as file:
            lines = list(csv.reader(file))
    except OSError as error:
        raise ConfigError(f"log {path} cannot be read: {error.strerror}") from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"{path} is no log of autotuning: it is no CSV") from error
    if not lines or tuple(lines[0]) != COLUMNS:
        raise ConfigError(f"{path} is no log of autotuning; expected the columns {','.join(COLUMNS)}")
    rows: list[TrialRow] = []
    for number, cells in enumerate(lines[1:], 2):
        try:
            step, stage, shape, buckets, seconds, ratio, best_shape, best_buckets = cells
            times = float(seconds), float(ratio)
            rows.append(TrialRow(int(step), stage, shape, int(buckets), *times, best_shape, int(best_buckets)))
        except ValueError:
            if number == len(lines):  # training goes on, or has ended while it wrote
                break
            raise ConfigError(f"{path}, line {number}: {','.join(cells)}; expected {','.join(COLUMNS)}") from None
    return rows


class TrialLog:
    """Writes a row for each trial, and lines to the logger "fusionlayer".

    A line tells that the best plan has changed, or that a search has begun or ended.

    Args:
        path: the CSV file, written anew; None: no file.

    Raises:
        ConfigError: the file cannot be written.
    """

    def __init__(self, path: str | None) -> None:
        self._path = None if path is None else Path(path)
        self._was: tuple[object, bool] | None = None
        try:
            self._write(COLUMNS, "w")
        except OSError as error:
            raise ConfigError(f"autotune: log={path!r} cannot be written: {error}; name another file") from error

    def note_trial(self, step: int, trial: Trial) -> None:
        """Write a row. If that fails, warn and write no more rows: a full disk must not end training."""
        times = (f"{trial.seconds:.6f}", f"{trial.ratio:.4f}")
        _logger.debug("autotune, step %d, %s: %s: %s s, ratio %s", step, trial.stage, trial.point, *times)
        points = [(point.shape, point.buckets) for point in (trial.point, trial.best)]
        try:
            self._write((step, trial.stage, *points[0], *times, *points[1]), "a")
        except OSError as error:
            _logger.warning("autotune: log %s cannot be written any more: %s", self._path, error)
            self._path = None

    def note_progress(self, step: int, search: Search) -> None:
        """Log what has changed since the last call."""
        was, self._was = self._was, (search.best, search.searching)
        if was is None or was == self._was:
            return
        if was[0] != search.best:
            _logger.info("autotune, step %d: faster than %s: %s", step, was[0], search.best)
        if was[1] and not search.searching:
            share = f"{search.gain:.2f} of the step time that training began with"
            _logger.info("autotune, step %d: the search is over; best: %s; %s", step, search.best, share)
        elif not was[1] and search.searching:
            _logger.info("autotune, step %d: another search begins from %s", step, search.best)

    def _write(self, row: Sequence[object], mode: str) -> None:
        if self._path is not None:
            with self._path.open(mode, newline="") as file:
                csv.writer(file).writerow(row)
