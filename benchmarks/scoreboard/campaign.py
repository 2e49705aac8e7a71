"""What a scoreboard needs that is not there yet: what it is, how long it takes, and doing it."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from benchmarks import driver
from benchmarks.lab import Network, why_not
from benchmarks.quiet import pressure, refuse_if_busy
from benchmarks.training.cell import Cell
from benchmarks.training.launching import run_cell
from benchmarks.training.methods import select
from benchmarks.training.summary import readings, rows
from benchmarks.training.workloads import MODELS, make_workload

from .links import Link
from .methods import losses_of, phases
from .records import Found, Records
from .running import Point, train
from .settings import Settings

__all__ = ["SETUPS", "Setup", "cells", "expected_seconds", "measure", "run_losses", "run_steps", "runs"]

TIMEOUT = 3600.0
"""Seconds for the steps of one link."""


@dataclass(frozen=True)
class Setup:
    """What is trained, for steps and for losses, and how.

    Attributes:
        parameters: of the model.
        optimizer: of ``METHODS``.
        steps: by default.
        learning_rate: at the end of its warm-up.
        every: steps between two looks at the loss: a twelfth of all, so that looks cost a tenth of the training.
    """

    parameters: int
    optimizer: str
    steps: int
    learning_rate: float
    every: int

    def settings(
        self, model: str, hosts: int, workers: int, steps: int | None = None, learning_rate: float | None = None
    ) -> Settings:
        """Return what is to be trained for its losses.

        Args:
            model: its name.
            hosts: number of hosts.
            workers: on each host.
            steps: None for as many as by default.
            learning_rate: None for the default one.
        """
        return Settings(
            model,
            hosts * workers,
            MODELS[model].batch_size,
            steps or self.steps,
            learning_rate or self.learning_rate,
            self.every if steps is None else max(1, steps * self.every // self.steps),
            self.optimizer,
            hosts if workers > 1 else None,
        )


SETUPS = {
    "gpt": Setup(10_893_312, "AdamW", 600, 1e-3, 50),
    "gpt-small": Setup(834_304, "AdamW", 600, 1e-3, 50),
    "resnet": Setup(1_226_442, "SGD", 300, 0.02, 25),
}
"""By the model's name."""


def runs(methods: Iterable[str], seeds: Iterable[int], found: Found) -> list[tuple[str, int]]:
    """Return (method, seed) of the losses that are missing: all methods of a seed before the next seed."""
    names = dict.fromkeys(map(losses_of, methods))
    return [(name, seed) for seed in seeds for name in names if (name, seed) not in found.losses]


def cells(methods: Iterable[str], links: Iterable[Link], found: Found) -> list[tuple[Link, list[str]]]:
    """Return the links with the methods whose steps are missing there; DDP is timed beside them again."""
    names = dict.fromkeys(timed for name in methods for _, timed in phases(name))
    lacking = [(link, [name for name in names if (str(link), name) not in found.steps]) for link in links]
    return [(link, missing) for link, missing in lacking if missing]


def expected_seconds(
    losses: Sequence[tuple[str, int]], steps: Sequence[tuple[Link, list[str]]], settings: Settings, rounds: int
) -> tuple[float, float]:
    """Return about how long losses and steps take on this machine, from the time of a few steps of computing.

    A run is its steps of computing, on as many cores as there are, and as much again for messages, codecs and looks. A
    step on a link takes at most what sending all gradients in f32 takes, which is taken for a fourth of the methods.
    """
    step, cores = _computing(settings), len(os.sched_getaffinity(0))
    crowd = max(1.0, settings.workers / cores)
    run = 15 + 2.0 * settings.steps * step * crowd
    timed = 0.0
    setup = SETUPS[settings.model]
    for link, names in steps:
        dense = 8 * 4 * setup.parameters * 2 * (settings.workers - 1) / settings.workers / (link.megabits * 1e6)
        each = max(1.0, step * crowd)
        timed += 60 + (rounds + 3) * (2 * dense + len(names) * (each + dense / 4))
    return run * len(losses), timed


def _computing(settings: Settings) -> float:
    """Return the seconds of one step of computing, the shortest of three."""
    workload = make_workload(settings.model, 0, 0)
    network, data, threads = workload.model(), torch.Generator().manual_seed(0), torch.get_num_threads()
    torch.set_num_threads(1)  # as each worker has
    took = []
    for _ in range(3):
        inputs, targets = workload.sample(settings.batch_size, data)
        start = time.perf_counter()
        network(inputs, targets).backward()
        took.append(time.perf_counter() - start)
    torch.set_num_threads(threads)
    return min(took)


def run_losses(todo: Sequence[tuple[str, int]], settings: Settings, records: Records, found: Found) -> list[str]:
    """Train each method with each seed, and leave a record of each; return the runs that failed, in words."""
    failed = []
    network = _fastest(settings)
    for number, (method, seed) in enumerate(driver.follow("losses", todo, "{0[0]}, seed {0[1]}".format), 1):
        with records.claim("losses", method, seed) as path:
            if path is None:
                continue  # another process has done it, or is at it
            label = f"[{number}/{len(todo)}] {method}, seed {seed}"
            points = train(method, seed, settings, label, network)
            if points is None:
                failed.append(f"{method}, seed {seed}")
                continue
            row = _row(method, seed, points, settings)
            records.write(path, [row])
            found.take(settings.title, records.environment, [row])
    return failed


def _fastest(settings: Settings) -> Network | None:
    """Return hosts without a limit, where the layout of ranks is as it is on a link; None if they cannot be made."""
    hosts = Network(settings.hosts or settings.workers)
    return None if why_not(hosts) else hosts


def _row(method: str, seed: int, points: Sequence[Point], settings: Settings) -> dict[str, object]:
    losses = [[point.step, point.loss] for point in points]
    return {"method": method, "seed": seed, "training": settings.title, "final": points[-1].loss, "losses": losses}


def run_steps(
    todo: Sequence[tuple[Link, list[str]]],
    settings: Settings,
    records: Records,
    found: Found,
    *,
    rounds: int,
    at_once: int,
    busy_ok: bool,
) -> list[str]:
    """Time the steps of all methods on each link, and leave a record of each set; return what failed, in words.

    Args:
        todo: links with methods.
        settings: what is trained.
        records: where they lie.
        found: takes the rows.
        rounds: turns of each method.
        at_once: methods in one set of processes: each is a copy of the model in every worker.
        busy_ok: measure while other work goes on.
    """
    failed = []
    hosts = settings.hosts or settings.workers
    parts = [(link, names[at : at + at_once]) for link, names in todo for at in range(0, len(names), at_once)]
    for link, names in driver.follow("steps", parts, "{0[0]}".format):
        with records.claim("steps", link, *names[:1], len(names)) as path:
            if path is None:
                continue
            methods, _ = select(names)
            cell = Cell(
                *(settings.model, hosts, settings.workers // hosts, link.rate, tuple(methods), rounds), delay=link.delay
            )
            refuse_if_busy(busy_ok, settings.workers)
            before = pressure()
            measured = run_cell(cell, link.network(hosts), TIMEOUT)
            if measured is None:
                failed.append(f"steps at {link.words}")
                continue
            timed = rows(cell, measured, {"before": before, "after": pressure()})
            print("\n".join(readings(timed)), file=sys.stderr)
            kept = [{**row, "rtt": link.rtt} for row in timed if row["method"] in names or row["method"] == "alone"]
            records.write(path, kept)
            found.take(settings.title, records.environment, kept)
    return failed


def measure(
    todo: Sequence[tuple[str, Link]], seed: int, settings: Settings, records: Records, found: Found, busy_ok: bool
) -> list[str]:
    """Train for real on links, timed as a whole, and leave a record of each; return what failed, in words."""
    failed = []
    for method, link in todo:
        with records.claim("measured", method, link, seed) as path:
            if path is None:
                continue
            refuse_if_busy(busy_ok, settings.workers)
            network = link.network(settings.hosts or settings.workers)
            points = train(method, seed, settings, f"{method} at {link.words}", network, 60.0)
            if points is None:
                failed.append(f"{method} at {link.words}")
                continue
            seconds = [[point.step, point.seconds] for point in points]
            row = {**_row(method, seed, points, settings), "link": str(link), "seconds": seconds}
            records.write(path, [row])
            found.take(settings.title, records.environment, [row])
    return failed
