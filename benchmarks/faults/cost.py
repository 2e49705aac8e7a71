"""What is checked by default, and what that costs a training step: messages with checksums, replicas that are compared.

    python -m benchmarks.faults.cost --out benchmarks/results

Each codec trains twice in the same processes, with the defaults and with nothing checked, in turns whose order is
shuffled in every round. The cost is the median of the rounds' ratios, less one, with its 95 % interval; two copies of
DDP that differ in nothing say what the machine's noise is. On loopback all ranks are of one node, where messages carry
no checksum by default.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from benchmarks import driver
from benchmarks.arguments import comma_separated, count
from benchmarks.lab import Network, why_not
from benchmarks.training.cell import Cell, Measured
from benchmarks.training.launching import run_cell
from benchmarks.training.methods import ALWAYS, BASELINE, NULL
from benchmarks.training.summary import interval
from benchmarks.variants import SEPARATOR

__all__ = ["UNCHECKED", "lines", "main"]

UNCHECKED = SEPARATOR + "unchecked"
LOOPBACK = "loopback"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    parser = driver.make_parser("faults.cost", __doc__)
    parser.add_argument("--model", default="gpt", help="(gpt)")
    parser.add_argument(
        "--rates", type=comma_separated(str), default=("100mbit", "1gbit", LOOPBACK), help="(100mbit,1gbit,loopback)"
    )
    parser.add_argument("--codecs", type=comma_separated(str), default=("raw", "int8", "topk"), help="(raw,int8,topk)")
    parser.add_argument("--rounds", type=count(2), default=11, help="(11)")
    parser.add_argument("--timeout", type=float, default=3600.0, help="seconds for one rate (3600)")
    driver.add_options(parser, timed=True, smoke=True)
    options = parser.parse_args(arguments)
    if options.smoke:
        options.model, options.rates, options.codecs, options.rounds = "gpt-small", (LOOPBACK,), ("int8",), 2
    if any(rate != LOOPBACK for rate in options.rates) and (obstacle := why_not(Network(2))):
        parser.error(f"{obstacle}: measure --rates {LOOPBACK}, which needs no network namespaces")
    environment = driver.begin(options, ranks=2)
    methods = (*ALWAYS, *(name for codec in options.codecs for name in (codec, codec + UNCHECKED)))
    rows: list[dict[str, Any]] = []
    shown: list[dict[str, str]] = []
    for rate in options.rates:
        alone = rate == LOOPBACK
        network = Network(1, isolated=False) if alone else Network(2, rate)
        hosts, workers = (1, 2) if alone else (2, 1)
        cell = Cell(options.model, hosts, workers, network.rate, methods, options.rounds)
        print(f"{cell}: {len(methods)} methods, {cell.rounds} rounds", file=sys.stderr, flush=True)
        measured = run_cell(cell, network, options.timeout)
        if measured is None:
            return 1
        shown += lines(rate, options.codecs, measured)
        rows += [{"link": rate, "method": method, **asdict(one)} for method, one in measured.items()]
    title = f"What is checked by default, and its cost: {options.model}, 2 workers, {options.rounds} rounds"
    driver.finish(options, "faults-cost", title, environment, rows, shown)
    return 0


def lines(link: str, codecs: Sequence[str], measured: Mapping[str, Measured]) -> list[dict[str, str]]:
    """Return a row for each codec, and one for DDP beside itself: steps, and what one costs more than the other."""
    pairs = [(codec, codec, codec + UNCHECKED) for codec in codecs]
    pairs.append((f"{BASELINE}, twice the same", NULL, BASELINE))
    found = []
    for name, checked, bare in pairs:
        mine, theirs = ([turn.seconds for turn in measured[method].rounds] for method in (checked, bare))
        costs = [100 * (one / other - 1) for one, other in zip(mine, theirs, strict=True)]
        low, high = interval(costs)
        found.append(
            {
                "link": link,
                "codec": name,
                "step, ms": f"{1e3 * statistics.median(mine):.1f}",
                "unchecked, ms": f"{1e3 * statistics.median(theirs):.1f}",
                "cost, %": f"{statistics.median(costs):+.2f} [{low:+.2f}..{high:+.2f}]",
            }
        )
    return found


if __name__ == "__main__":
    driver.leave(main)
