"""Has worker processes measure a cell."""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from benchmarks.lab import Network, launch

from .cell import Cell, Measured, Round

__all__ = ["run_cell"]


def run_cell(cell: Cell, network: Network, timeout: float) -> dict[str, Measured] | None:
    """Return what the workers of a cell have measured; None if they failed, which they have said on stderr.

    Args:
        cell: what is measured.
        network: where.
        timeout: seconds until the workers are ended.
    """
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        worker = [sys.executable, "-m", "benchmarks.training.worker", json.dumps(asdict(cell)), str(result)]
        with launch(worker, network, workers=cell.workers, timeout=timeout, stdout=sys.stderr.fileno()) as process:
            if process.wait():
                return None
        return {method: _measured(data) for method, data in json.loads(result.read_text()).items()}


def _measured(data: dict[str, Any]) -> Measured:
    plain = Measured(**data)
    turns = tuple(Round(**turn) for turn in data["rounds"])
    return replace(plain, rounds=turns, losses=tuple(plain.losses))
