"""Steps of a sharded GPT by what its weights and gradients travel as, beside torch's own FSDP2 over gloo.

    python -m benchmarks.sharded --out benchmarks/results

Two nodes of two ranks, a link of 100 Mbit/s between the nodes. All variants take turns within each round, each with a
model of its own; ratios are of steps of the same round, shown is their median with its interval of 95 %. What left a
node is read from its device, frames and their headers included, and stands beside what counting messages gives:
in two levels both halves together send the model's message once, without them once for each rank of a node.

"FSDP2, kept" does not drop weights after forward, so it gathers them once a step, as differences ("qwd") always do, at
the same price in memory. "optimizer: ..." is ``fl.ShardedOptimizer``, without FSDP.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import driver
from benchmarks.arguments import count
from benchmarks.lab import Network, launch, why_not
from benchmarks.quiet import pressure
from benchmarks.training.summary import interval
from examples.gpt import Config
from fusionlayer.cli import drawing

from .variants import BASELINE, DTYPES, VARIANTS, counted, parts_of
from .worker import Job, as_json

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["columns", "main", "picture", "rows"]

SECOND = "int4, flat"
"""What ratios are taken to as well."""


def rows(
    measured: Mapping[str, Sequence[Mapping[str, float]]], config: Config, nodes: int, per_node: int, dtype: str = "f32"
) -> list[dict[str, Any]]:
    """Return a row for each variant: speed-ups over ``BASELINE`` and ``SECOND``, and bytes beside those counted."""
    parts, found = parts_of(config, nodes * per_node), []
    for name, rounds in measured.items():
        variant = VARIANTS[name]
        row: dict[str, Any] = {
            "variant": name,
            "seconds": statistics.median(each["seconds"] for each in rounds),
            "sent": statistics.median(each["sent"] for each in rounds),
            "payload": statistics.median(each["payload"] for each in rounds),
            "rounds": list(rounds),
        }
        if variant.weights is not None:
            row["counted"], row["message"] = counted(variant, parts, nodes, per_node, DTYPES[dtype])
        for other, key in ((BASELINE, "speedup"), (SECOND, "over_flat")):
            if other in measured:
                ratios = [b["seconds"] / a["seconds"] for a, b in zip(rounds, measured[other], strict=True)]
                low, high = interval(ratios)
                row[key] = {"median": statistics.median(ratios), "low": low, "high": high}
        found.append(row)
    return found


def columns(row: Mapping[str, Any]) -> dict[str, str]:
    """Return the cells of a table for people."""

    def ratio(key: str) -> str:
        return "{median:.2f} [{low:.2f}..{high:.2f}]".format(**row[key]) if key in row else ""

    known = "counted" in row
    return {
        "weights, gradients": row["variant"],
        "step, ms": f"{1e3 * row['seconds']:.0f}",
        "MB leave a node": f"{row['sent'] / 1e6:.2f}",
        "MB counted": f"{row['counted'] / 1e6:.2f}" if known else "",
        "of the message, counted": f"{row['counted'] / row['message']:.2f}" if known else "",
        "on the device": f"{row['sent'] / row['message']:.2f}" if known else "",
        "MB a rank sent": f"{row['payload'] / 1e6:.2f}" if known else "",
        f"faster than {BASELINE}": ratio("speedup"),
        f"than {SECOND}": ratio("over_flat"),
        "loss": f"{row['rounds'][-1]['loss']:.3f}",
    }


def picture(found: Sequence[Mapping[str, Any]]) -> Figure:
    """Return speed-ups and bytes as bars."""
    figure = drawing.figure(8.5, 1.1 + 0.26 * len(found))
    left, right = figure.subplots(1, 2, sharey=True)
    mine = list(found)[::-1]
    names = [row["variant"] for row in mine]
    colours = [drawing.GREY if VARIANTS[name].weights is None else drawing.PALETTE[0] for name in names]
    ratios = [row["speedup"] for row in mine]
    middles = [ratio["median"] for ratio in ratios]
    errors = [[r["median"] - r["low"] for r in ratios], [r["high"] - r["median"] for r in ratios]]
    left.barh(names, middles, 0.7, xerr=errors, color=colours, error_kw={"lw": 0.8})
    drawing.name_bars(left, [f"{middle:#.3g}" for middle in middles], [ratio["high"] for ratio in ratios])
    left.axvline(1, color="black", linewidth=0.8)
    left.set(xlabel=f"steps per second, {BASELINE} = 1")
    megabytes = [row["sent"] / 1e6 for row in mine]
    right.barh(names, megabytes, 0.7, color=colours)
    drawing.name_bars(right, [f"{value:.3g}" for value in megabytes], megabytes)
    right.set(xlabel="what leaves a node in a step, MB")
    figure.suptitle("Sharded training: steps, and what leaves a node", x=0.01, ha="left")
    return figure


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    parser = driver.make_parser("sharded", __doc__)
    parser.add_argument("--rate", default="100mbit", help="of each node's link (100mbit)")
    parser.add_argument("--nodes", type=count(2), default=2, help="nodes (2)")
    parser.add_argument("--ranks", type=count(), default=2, help="ranks of a node (2)")
    parser.add_argument("--variants", nargs="*", choices=list(VARIANTS), help=f"{BASELINE} is always one (all)")
    parser.add_argument("--rounds", type=count(), default=6, help="turns of each variant that count (6)")
    shape = {"width": 384, "layers": 6, "heads": 6, "context": 128}
    for name, value in shape.items():
        parser.add_argument(f"--{name}", type=count(), default=value, help=f"of the model ({value})")
    parser.add_argument("--batch", type=count(), default=2, help="pieces of text in a rank's step (2)")
    parser.add_argument("--dtype", choices=list(DTYPES), default="f32", help="of FSDP2's weights in transit (f32)")
    parser.add_argument("--lr", type=float, default=1e-3, help="learning rate (1e-3)")
    driver.add_options(parser, timed=True)
    options = parser.parse_args(arguments)
    try:
        network = Network(options.nodes, options.rate)
        config = Config(**{name: getattr(options, name) for name in shape}, tied=False)
    except ValueError as error:
        parser.error(str(error))
    if obstacle := why_not(network):
        parser.error(f"needs network namespaces: {obstacle}")
    environment = driver.begin(options, options.nodes * options.ranks)
    names = list(dict.fromkeys([BASELINE, *(VARIANTS if options.variants is None else options.variants)]))
    before = pressure()
    job = Job(names, options.rounds, asdict(config), options.batch, options.dtype, options.lr)
    measured = _measure(job, network, options.ranks)
    if measured is None:
        return 1
    busy = {"before": before, "after": pressure()}
    made = rows(measured, config, options.nodes, options.ranks, options.dtype)
    found = [{**row, "pressure": busy} for row in made]
    shown = [columns(row) for row in found]
    size = options.nodes * options.ranks
    elements = size * sum(part.shard for part in parts_of(config, size))
    title = (
        f"Sharded step: {options.nodes} nodes of {options.ranks} ranks, {network.rate} between nodes, GPT of "
        f"{elements / 1e6:.1f} M weights that travel in {options.dtype}, learning rate {options.lr:g}, "
        f"{options.rounds} rounds"
    )
    name = f"sharded-{options.nodes}x{options.ranks}"
    if options.dtype != "f32":
        name += f"-{options.dtype}-{options.rate}"
    driver.finish(options, name, title, environment, found, shown, pictures={name: lambda: picture(found)})
    return 0


def _measure(job: Job, network: Network, per_node: int) -> dict[str, list[dict[str, float]]] | None:
    """Return what the workers have measured; None if they failed, which they have said on stderr."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        worker = [sys.executable, "-m", "benchmarks.sharded.worker", as_json(job), str(result)]
        print(f"{network}, {per_node} ranks each: {len(job.variants)} variants", file=sys.stderr, flush=True)
        with launch(worker, network, workers=per_node, timeout=3600, stdout=sys.stderr.fileno()) as process:
            if process.wait():
                return None
        measured: dict[str, list[dict[str, float]]] = json.loads(result.read_text())
        return measured


if __name__ == "__main__":
    driver.leave(main)
