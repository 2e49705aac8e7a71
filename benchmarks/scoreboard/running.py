"""Runs one method with one seed, in processes of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict
from typing import NamedTuple

from benchmarks.lab import Network, launch

from .settings import Settings

__all__ = ["Point", "train"]

START_SECONDS, STEP_SECONDS = 300.0, 10.0
"""What a run may take: to start, and for each step. Far more than it does, so that only what hangs is ended."""


class Point(NamedTuple):
    """A look at the loss: after how many steps, the loss on held-out data, and the seconds of training until then."""

    step: int
    loss: float
    seconds: float


def train(
    method: str,
    seed: int,
    settings: Settings,
    label: str,
    network: Network | None = None,
    step_seconds: float = STEP_SECONDS,
) -> list[Point] | None:
    """Return the looks at the loss of one run, in order of steps; None if it failed, which stderr tells of.

    Args:
        method: a name of ``benchmarks.peers``, or one that ``Variant`` reads.
        seed: of weights and data.
        settings: what is trained.
        label: what progress is told under, on stderr.
        network: where the workers run; None: where they are as fast as they can be. Losses do not depend on it.
        step_seconds: after as many for each step, the run is ended.
    """
    worker = [sys.executable, "-m", f"{__package__}.worker", method, str(seed), json.dumps(asdict(settings))]
    # Hosts that share nothing but a network are namespaces. Where each has one worker, losses need none.
    where = network or (Network(settings.hosts) if settings.hosts else Network(hosts=1, isolated=False))
    timeout = START_SECONDS + step_seconds * settings.steps
    found: list[Point] = []
    workers = settings.workers // where.hosts
    with launch(worker, where, workers=workers, timeout=timeout, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        for line in process.stdout:
            point = Point(*json.loads(line))
            found.append(point)
            print(f"{label}: step {point.step}/{settings.steps}, loss {point.loss:.4f}", file=sys.stderr, flush=True)
        return found if process.wait() == 0 else None
