"""The table of final losses: every method beside the baseline of the same seeds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

__all__ = ["BASELINE", "summarize"]

BASELINE = "ddp"
"""The method that all others are compared with: f32 gradients, averaged by torch."""


def summarize(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a line of the table for each method of ``rows``, which have a method, a seed and a final loss each.

    A difference is that to the baseline of the same seed. It is outside the spread when its mean is larger than the
    standard deviation of the baseline over seeds: by less than that, training differs with any other seed, too.
    """
    finals: dict[str, dict[int, float]] = {}
    for row in rows:
        finals.setdefault(row["method"], {})[row["seed"]] = row["final"]
    baseline = finals.get(BASELINE, {})
    return [_line(method, losses, baseline) for method, losses in finals.items()]


def _line(method: str, losses: dict[int, float], baseline: dict[int, float]) -> dict[str, Any]:
    spread = f" ± {_deviation(losses):.4f}" if len(losses) > 1 else ""
    line: dict[str, Any] = {
        "method": method,
        "seeds": len(losses),
        "final loss": f"{np.mean(list(losses.values())):.4f}{spread}",
        f"difference to {BASELINE}": "",
        "min..max": "",
        "outside the spread": "",
    }
    paired = [loss - baseline[seed] for seed, loss in losses.items() if seed in baseline]
    if method == BASELINE or not paired:
        return line
    mean = np.mean(paired)
    line[f"difference to {BASELINE}"] = f"{mean:+.4f}"
    line["min..max"] = f"{min(paired):+.4f}..{max(paired):+.4f}"
    if len(baseline) > 1:
        # Written so that a loss that is not a number lies outside.
        inside = abs(mean) <= _deviation(baseline)
        line["outside the spread"] = "no" if inside else ("yes, better" if mean < 0 else "yes, worse")
    return line


def _deviation(losses: dict[int, float]) -> float:
    return float(np.std(list(losses.values()), ddof=1))
