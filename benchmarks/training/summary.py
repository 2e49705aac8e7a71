"""From the turns of a cell to the rows of a table: medians, ratios with their intervals, limits."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from benchmarks.lab import Network
from benchmarks.variants import OVERLAP

from .cell import Cell, Measured
from .methods import ALWAYS, BASELINE, COMPUTE, NULL, about

__all__ = ["columns", "interval", "readings", "rows"]

CONFIDENCE = 0.95
RESAMPLES = 10_000
CLAIM_ROUNDS = 5
"""That all of fewer ratios lie above the true median is chance too often for an interval of 95 %."""
LOSS_STEPS = 5


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the bounds of the median's 95 % confidence interval, by the bootstrap with a fixed seed."""
    draws = np.random.default_rng(0).choice(np.asarray(values), (RESAMPLES, len(values)))
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(np.median(draws, axis=1), [tail, 1 - tail])
    return float(low), float(high)


def rows(cell: Cell, measured: Mapping[str, Measured], pressure: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return a result row for each method, with all that is known: seconds, bytes, ratios over ``ddp``, every round.

    ``speedup`` compares each round with the same round of the cell's baseline; ``faster`` is a claim: there are enough
    rounds, and all of the interval is above 1 and above that of the null row, which differs from ``ddp`` in nothing.
    ``bound_seconds`` is the time below which no overlap gets a step that sends these bytes: that of computing or that
    of sending, whichever is longer. The bytes are those of the network device, so headers are among them and the full
    rate of the link applies.

    Args:
        cell: what was measured.
        measured: method -> its turns.
        pressure: how busy the machine was, before and after.
    """
    compute = statistics.median(turn.seconds for turn in measured[COMPUTE].rounds)
    rate = Network(cell.hosts, cell.rate, isolated=cell.hosts > 1).bits_per_second
    null_high = interval(_ratios(measured, NULL, BASELINE))[1]
    steps = min(len(one.losses) for one in measured.values())
    found = []
    for method, one in measured.items():
        seconds = statistics.median(turn.seconds for turn in one.rounds)
        sent = statistics.median(turn.sent for turn in one.rounds)
        ratios = _ratios(measured, method, cell.baseline)
        low, high = interval(ratios)
        wire = sent * 8 / rate if rate else 0.0
        bound = max(compute, wire)
        waiting = [turn.waiting for turn in one.rounds if turn.waiting is not None]
        codec = [turn.codec for turn in one.rounds if turn.codec is not None]
        codec_cpu = [turn.codec_cpu for turn in one.rounds if turn.codec_cpu is not None]
        found.append(
            {
                "model": cell.model,
                "hosts": cell.hosts,
                "workers": cell.workers,
                "rate": cell.rate,
                "delay": cell.delay,
                "frame_loss": cell.loss,
                "congestion": cell.congestion,
                "method": method,
                "baseline": cell.baseline,
                "about": about(method),
                "note": one.note,
                "step_seconds": seconds,
                "speedup": {
                    "median": statistics.median(ratios),
                    "low": low,
                    "high": high,
                    "min": min(ratios),
                    "max": max(ratios),
                },
                "faster": method not in ALWAYS and len(ratios) >= CLAIM_ROUNDS and low > max(1.0, null_high),
                "bytes_per_step": sent,
                "waiting_seconds": statistics.median(waiting) if waiting else None,
                "cpu_seconds": statistics.median(turn.cpu for turn in one.rounds),
                "codec_seconds": statistics.median(codec) if codec else None,
                "codec_cpu_seconds": statistics.median(codec_cpu) if codec_cpu else None,
                "compute_seconds": compute,
                "wire_seconds": wire,
                "bound_seconds": bound,
                "bound_share": bound / seconds,
                "loss": statistics.fmean(one.losses[max(0, steps - LOSS_STEPS) : steps]),
                "loss_step": steps,
                "identical": one.identical,
                "steps_per_turn": one.steps,
                "seed": cell.seed,
                "pressure": dict(pressure),
                "rounds": [asdict(turn) for turn in one.rounds],
                "training_losses": list(one.losses),
            }
        )
    return found


def _ratios(measured: Mapping[str, Measured], method: str, baseline: str) -> list[float]:
    rounds = zip(measured[baseline].rounds, measured[method].rounds, strict=True)
    return [base.seconds / turn.seconds for base, turn in rounds]


def columns(row: Mapping[str, Any]) -> dict[str, str]:
    """Return the cells of a table for people from a result row."""
    speedup = row["speedup"]
    codec = row["codec_seconds"]
    return {
        "method": row["method"],
        "step, ms": f"{row['step_seconds'] * 1e3:.1f}",
        f"over {row['baseline']}": f"{speedup['median']:.2f}",
        "95 %": f"{speedup['low']:.2f}..{speedup['high']:.2f}",
        "faster": "yes" if row["faster"] else "",
        "MB sent": f"{row['bytes_per_step'] / 1e6:.3f}",
        "waiting, ms": "" if row["waiting_seconds"] is None else f"{row['waiting_seconds'] * 1e3:.1f}",
        "CPU, ms": f"{row['cpu_seconds'] * 1e3:.0f}",
        "codec, ms": "" if codec is None else f"{codec * 1e3:.1f}",
        "limit, ms": f"{row['bound_seconds'] * 1e3:.1f}",
        "of limit": f"{row['bound_share']:.0%}",
        "loss": f"{row['loss']:.4f}",
    }


def readings(found: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return what must be known to read the table of one cell, a line each."""
    by_method = {row["method"]: row for row in found}
    null, pressure = by_method[NULL]["speedup"], by_method[NULL]["pressure"]
    lines = [
        f"{NULL} is {BASELINE} once more: {null['low']:.2f}..{null['high']:.2f} is what no difference looks like here",
        f"loss: training, mean of {min(LOSS_STEPS, found[0]['loss_step'])} steps up to step {found[0]['loss_step']}, "
        "on the same data for every method",
        f"load of the last minute: {pressure['before']['load']:g} before, {pressure['after']['load']:g} after",
    ]
    if len(found[0]["rounds"]) < CLAIM_ROUNDS:
        lines.append(f"nothing is called faster after fewer than {CLAIM_ROUNDS} rounds")
    lines += [str(row["note"]) for row in found if row["note"]]
    lines += [
        f"{row['method']}: PARAMETERS DIFFER between workers, so its figures mean nothing"
        for row in found
        if not row["identical"] and row["method"] != COMPUTE
    ]
    for method, row in by_method.items():
        plain = by_method.get(method.removesuffix(OVERLAP))
        if plain is not None and _parted(plain["training_losses"], row["training_losses"]):
            lines.append(f"{method}: LOSSES DIFFER from those of {plain['method']}, which computes the same")
    return lines


def _parted(one: Sequence[float], other: Sequence[float]) -> bool:
    common = min(len(one), len(other))
    return one[:common] != other[:common]
