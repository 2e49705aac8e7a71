"""Train with every method beside DDP on an emulated network: step times, ratios, bytes, CPU seconds, limits.

    python -m benchmarks.training --rate 100mbit --hosts 2 --methods ddp,fp16,ddp-powersgd,powersgd,int8,int4
    python -m benchmarks.training --rates 100mbit,1gbit --hosts 4 --model resnet --out benchmarks/results

All methods train in one set of processes, each its own copy of the model, in turns whose order is shuffled in every
round; a ratio compares turns of one round. benchmarks/README.md says how to read the table.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from benchmarks import driver
from benchmarks.arguments import comma_separated, count
from benchmarks.lab import Network, why_not
from benchmarks.quiet import pressure, refuse_if_busy
from benchmarks.report import table, write

from .cell import Cell
from .launching import run_cell
from .methods import BASELINE, all_methods, select
from .summary import columns, readings, rows
from .workloads import MODELS


def main() -> int:
    """Run the command line; return the exit status."""
    parser, options = _parse()
    try:
        methods, absent = select([*(options.methods or ("all",)), options.baseline])
        if options.baseline not in methods:
            parser.error(f"--baseline {options.baseline}: it is not among the methods")
        link = {"delay": options.delay, "loss": options.frame_loss, "congestion": options.congestion}
        networks = [Network(options.hosts, rate, **link) for rate in options.rates]
    except ValueError as error:
        parser.error(str(error))
    for method, reason in absent.items():
        _say(f"{method} is left out: {reason}")
    hosts, workers = options.hosts, options.workers
    if obstacle := why_not(networks[0]):
        networks = [Network(1, isolated=False)]
        hosts, workers = 1, hosts * workers
        _say(f"no network namespaces here ({obstacle}): {workers} workers on loopback, at no given rate")
    environment = driver.begin(options)
    title = f"Training {options.model}, {hosts} x {workers} workers, {options.rounds} rounds"
    found: list[dict[str, Any]] = []
    for network in driver.follow("benchmarks.training", networks):
        cell = Cell(
            *(options.model, hosts, workers, network.rate, tuple(methods), options.rounds, options.seed),
            delay=network.delay,
            loss=network.loss,
            congestion=options.congestion,
            baseline=options.baseline,
        )
        refuse_if_busy(options.busy_ok, hosts * workers)
        _say(f"{cell}: {len(methods)} methods, {cell.rounds} rounds")
        before = pressure()
        measured = run_cell(cell, network, options.timeout)
        if measured is None:
            return 1
        cell_rows = rows(cell, measured, {"before": before, "after": pressure()})
        found += cell_rows
        print(table(str(cell), [columns(row) for row in cell_rows]))
        print("\n".join(readings(cell_rows)), end="\n\n", flush=True)
        if options.out:
            shown = [{"link": row["rate"] or "no limit", **columns(row)} for row in found]
            theme = options.theme or f"training-{options.model}-{hosts}x{workers}"
            _say(f"wrote {write(options.out, theme, title, environment, found, shown)}")
    return 0


def _parse() -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    methods = "\n".join(f"  {name:14} {about}" for name, about in all_methods().items())
    sharded = "fsdp, fsdp:WEIGHTS/GRADIENTS+bf16+flat, hsdp, hsdp:CODEC and zero:WEIGHTS/GRADIENTS: sharded training"
    parser = driver.make_parser(
        "training", __doc__, epilog=f"methods, and the words all, peers, codecs and overlap:\n{methods}\n  {sharded}"
    )
    parser.add_argument("--model", choices=MODELS, default="gpt", help="what is trained (default gpt)")
    parser.add_argument("--hosts", type=count(), default=2, help="number of hosts (default 2)")
    parser.add_argument("--workers", type=count(), default=1, help="workers on each host (default 1)")
    parser.add_argument(
        "--rates",
        "--rate",
        type=comma_separated(_rate),
        default=("100mbit",),
        help="of each host's link, comma-separated; none for no limit (default 100mbit)",
    )
    parser.add_argument(
        "--delay", help="of every frame between hosts, half of a round trip, such as 25ms (default: none)"
    )
    parser.add_argument(
        "--frame-loss", type=float, default=0.0, help="chance of a frame to be lost, such as 0.0005 (default 0)"
    )
    parser.add_argument("--congestion", default="reno", help="control of TCP, such as bbr (default reno)")
    parser.add_argument("--theme", help="first part of the result files' names (default: training, model and hosts)")
    parser.add_argument("--methods", type=comma_separated(str), help="comma-separated (default: all)")
    parser.add_argument("--baseline", default=BASELINE, help=f"the method that others are compared with ({BASELINE})")
    parser.add_argument("--rounds", type=count(), default=8, help="turns of each method (default 8)")
    parser.add_argument("--seed", type=int, default=0, help="of weights, data and order (default 0)")
    driver.add_options(parser, timed=True)
    parser.add_argument("--timeout", type=float, default=3600.0, help="seconds for one rate (default 3600)")
    return parser, parser.parse_args()


def _rate(text: str) -> str | None:
    return None if text == "none" else text


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    driver.leave(main)
