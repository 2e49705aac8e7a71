"""Measures steps on long and lossy ways, to be compared with projected ones."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from benchmarks.collective.options import Link
from benchmarks.lab import Network, why_not
from benchmarks.training.cell import Cell
from benchmarks.training.launching import run_cell

__all__ = ["measure_steps"]

TIMEOUT = 1800.0


def measure_steps(model: str, link: Link, methods: Sequence[str], rounds: int) -> list[dict[str, Any]]:
    """Return a row for each method, as ``read_cells`` reads them: of steps on two hosts that a link joins.

    ``step_seconds`` are means over all rounds, as projections are: few losses decide how long one step takes.

    Raises:
        SystemExit: there is no such network here, or a worker failed, which it has said on stderr.
    """
    way = {"delay": link.delay, "loss": link.loss, "congestion": link.congestion}
    network = Network(2, link.rate, **way)  # type: ignore[arg-type]
    if reason := why_not(network):
        raise SystemExit(f"no such network here: {reason}")
    cell = Cell(model, 2, 1, link.rate, tuple(methods), rounds, **way)  # type: ignore[arg-type]
    measured = run_cell(cell, network, TIMEOUT)
    if measured is None:
        raise SystemExit(1)
    place = {"model": model, "hosts": 2, "workers": 1, "rate": link.rate, "delay": link.delay}
    place |= {"frame_loss": link.loss, "congestion": link.congestion}
    return [
        {
            **place,
            "method": method,
            "step_seconds": statistics.fmean(turn.seconds for turn in one.rounds),
            "bytes_per_step": statistics.fmean(turn.sent for turn in one.rounds),
            "identical": one.identical,
            "steps_per_turn": one.steps,
            "rounds": [asdict(turn) for turn in one.rounds],
        }
        for method, one in measured.items()
    ]
