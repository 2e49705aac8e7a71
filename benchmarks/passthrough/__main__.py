"""What the backend "fusionlayer" costs a training step whose calls all pass: beside plain gloo, over loopback.

    python -m benchmarks.passthrough --out benchmarks/results

The GPT of the examples trains by torch's DistributedDataParallel with small buckets, so that there are many calls. The
cost is the median of the rounds' ratios of step times over gloo's, less one, with its 95 % interval; "gloo again"
differs from gloo in nothing and says what the machine's noise is. "with rules" has rules that fit no call.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict

from benchmarks import driver
from benchmarks.arguments import count
from benchmarks.lab import Network, launch
from benchmarks.training.summary import interval

from .worker import FORMS, Cell

__all__ = ["line", "main"]

SMOKE = Cell(width=32, layers=1, steps=1, rounds=2)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    parser = driver.make_parser("passthrough", __doc__)
    parser.add_argument("--workers", type=count(2), default=2, help="(2)")
    parser.add_argument("--rounds", type=count(), default=Cell.rounds, help=f"({Cell.rounds})")
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds for all (900)")
    driver.add_options(parser, timed=True, smoke=True)
    options = parser.parse_args(arguments)
    environment = driver.begin(options, options.workers)
    cell = SMOKE if options.smoke else Cell(rounds=options.rounds)
    command = [sys.executable, "-m", f"{__package__}.worker", json.dumps(asdict(cell))]
    network = Network(1, isolated=False)
    with launch(command, network, workers=options.workers, timeout=options.timeout, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        text = process.stdout.read()
        if process.wait():
            return 1
    seconds: dict[str, list[float]] = json.loads(text)
    rows = [line(form, seconds) for form in FORMS]
    title = f"Calls that pass, GPT of width {cell.width}, {options.workers} workers, {cell.rounds} rounds"
    found = [{"form": form, "seconds": seconds[form], **asdict(cell)} for form in FORMS]
    driver.finish(options, "passthrough", title, environment, found, rows)
    return 0


def line(form: str, seconds: Mapping[str, Sequence[float]]) -> dict[str, str]:
    """Return the row of a form: its step, and what it costs over gloo's of the same round."""
    costs = [100 * (mine / theirs - 1) for mine, theirs in zip(seconds[form], seconds[FORMS[0]], strict=True)]
    low, high = interval(costs)
    cost = f"{statistics.median(costs):+.2f} [{low:+.2f}..{high:+.2f}]"
    return {"form": form, "step, ms": f"{1e3 * statistics.median(seconds[form]):.1f}", "cost over gloo, %": cost}


if __name__ == "__main__":
    driver.leave(main)
