"""What was measured so far: a small file for each run, so that a campaign can be interrupted and go on.

A record has the form of a result file: a title, the environment, and rows. Two kinds of rows are known: the losses of
one method with one seed, and the steps of one method on one link, as ``benchmarks.training`` writes them.
"""

from __future__ import annotations

import fcntl
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.pages.found import load
from benchmarks.report import Environment

from .settings import Settings

__all__ = ["Found", "Records", "read"]

Row = dict[str, Any]

WITHOUT = ("training_losses", "about", "pressure")
"""Columns of the training benchmark that no score needs; with them a result would be three times as long."""


class Found:
    """Rows of one kind of training, the newest of each run.

    Args:
        settings: what was trained; rows of other trainings are passed over.

    Attributes:
        losses: (method, seed) -> row.
        steps: (link, method) -> row.
        measured: (method, link, seed) -> row, of runs that were timed as a whole.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.losses: dict[tuple[str, int], Row] = {}
        self.steps: dict[tuple[str, str], Row] = {}
        self.measured: dict[tuple[str, str, int], Row] = {}

    def take(self, title: str, environment: Mapping[str, Any], rows: Iterable[Mapping[str, Any]]) -> int:
        """Take the rows that are of this training; return how many those are."""
        before = len(self)
        for found in rows:
            row: Row = {key: value for key, value in found.items() if key not in WITHOUT}
            row.setdefault("hardware", environment.get("hardware"))
            row.setdefault("commit", environment.get("commit"))
            row.setdefault("torch", environment.get("torch"))
            if "losses" in row and row.setdefault("training", title) == self._settings.title:
                if "link" in row:
                    self.measured[row["method"], row["link"], row["seed"]] = {"kind": "measured", **row}
                else:
                    self.losses[row["method"], row["seed"]] = {"kind": "losses", **row}
            elif "rounds" in row and self._is_mine(row) and row.get("rtt"):
                self.steps[f"{row['rate']}/{row['rtt']}", row["method"]] = {"kind": "steps", **row}
        return len(self) - before

    def _is_mine(self, row: Row) -> bool:
        layout = f"{row['hosts']}x{row['workers']}"
        return bool(row["model"] == self._settings.model and layout == self._settings.layout)

    def __len__(self) -> int:
        return len(self.losses) + len(self.steps) + len(self.measured)

    def rows(self) -> list[Row]:
        """Return all rows, as a result file has them."""
        return [*self.losses.values(), *self.steps.values(), *self.measured.values()]

    def machines(self) -> set[str]:
        """Return the machines on which steps were timed: times of two cannot be compared."""
        return {row["hardware"] for row in [*self.steps.values(), *self.measured.values()]}


def read(paths: Iterable[Path], found: Found, *, losses_alone: bool = False) -> None:
    """Let ``found`` take the rows of files, and of the records in folders; later ones replace earlier ones.

    With ``losses_alone`` what depends on the machine stays out: steps, and runs that were timed as a whole.

    Raises:
        ValueError: a file is none that a benchmark has written, or nothing in it is of this training.
    """
    for path in paths:
        files = sorted(path.glob("*.json"), key=lambda file: file.stat().st_mtime) if path.is_dir() else [path]
        taken = 0
        for file in files:
            try:
                data = load(file)
                before = len(found)
                rows = [row for row in data.rows if row.get("kind") == "losses"] if losses_alone else data.rows
                found.take(data.title, data.environment, rows)
                taken += len(found) - before
            except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
                raise ValueError(
                    f"{file} is no result file ({error}); give files that a benchmark has written"
                ) from None
        if not taken and not path.is_dir():
            raise ValueError(f"{path} has nothing of this training; give the same --model, --hosts and --steps")


class Records:
    """A folder of records, which several processes may write to.

    Args:
        folder: is made if it is not there.
        title: of the training.
        environment: of this process.

    Attributes:
        folder: as given.
        environment: as a record has it.
    """

    def __init__(self, folder: Path, title: str, environment: Environment) -> None:
        self.folder = folder
        self.environment = asdict(environment)
        self._title = title
        folder.mkdir(parents=True, exist_ok=True)

    @contextmanager
    def claim(self, *key: object) -> Iterator[Path | None]:
        """Yield the path of a record that is to be made, which is this process's until the end of the block.

        None is yielded if it is there already, or if another process makes it. A process that dies gives it up.
        """
        name = "_".join(re.sub(r"[^\w.=+-]+", "-", str(part)) for part in key)
        path = self.folder / f"{name}.json"
        with path.with_suffix(".lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                yield None
                return
            try:
                yield None if path.exists() else path
            finally:
                path.with_suffix(".lock").unlink(missing_ok=True)

    def write(self, path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
        """Write a record as a whole."""
        data = {"title": self._title, "environment": self.environment, "rows": list(rows)}
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(data) + "\n")
        partial.replace(path)
