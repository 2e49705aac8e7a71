"""Steps of a tensor-parallel GPT by what its activations are sent as, beside torch's own f32 all-reduce over gloo.

    python -m benchmarks.tensor_parallel --out benchmarks/results

Two hosts with a rank each, links of 1 Gbit/s and of 100 Mbit/s. Every layer waits for four all-reduces of one
activation, forward and backward, 8 MiB by default. All variants take turns within each round, on one model; ratios are
of steps of the same round, shown is their median with its interval of 95 %. ``taco/256KiB`` sends pieces of that size
(bytes of the f32 activation), while others are encoded and decoded; without a size the activation goes as a whole.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import driver
from benchmarks.arguments import comma_separated, count
from benchmarks.lab import Network, launch, why_not
from benchmarks.quiet import pressure
from benchmarks.training.summary import interval
from fusionlayer.cli import drawing

from .model import Shape
from .variants import BASELINE, parse, variants
from .worker import Job, as_json

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["columns", "main", "picture", "rows"]

SECOND = "bf16"
"""What ratios are taken to as well."""


def rows(rate: str | None, measured: Mapping[str, Sequence[Mapping[str, float]]]) -> list[dict[str, Any]]:
    """Return a row for each variant, with its speed-up over ``BASELINE`` and over ``SECOND`` where that took part."""
    found = []
    for name, rounds in measured.items():
        variant = parse(name)
        row: dict[str, Any] = {
            "rate": rate,
            "variant": name,
            "codec": variant.codec,
            "piece": variant.piece,
            "seconds": statistics.median(each["seconds"] for each in rounds),
            "sent": statistics.median(each["sent"] for each in rounds),
            "rounds": list(rounds),
        }
        for other, key in ((BASELINE, "speedup"), (SECOND, f"over_{SECOND}"), (variant.codec, "over_whole")):
            if other in measured:
                ratios = [b["seconds"] / a["seconds"] for a, b in zip(rounds, measured[other], strict=True)]
                low, high = interval(ratios)
                row[key] = {"median": statistics.median(ratios), "low": low, "high": high}
        found.append(row)
    return found


def columns(row: Mapping[str, Any]) -> dict[str, str]:
    """Return the cells of a table for people."""

    def ratio(key: str) -> str:
        if key not in row:
            return ""
        return "{median:.2f} [{low:.2f}..{high:.2f}]".format(**row[key])

    return {
        "link": row["rate"] or "no limit",
        "activations": row["codec"],
        "pieces of": "whole" if row["piece"] is None else f"{row['piece'] >> 10} KiB",
        "step, ms": f"{1e3 * row['seconds']:.0f}",
        "MB sent": f"{row['sent'] / 1e6:.1f}" if row["sent"] else "",
        f"faster than {BASELINE} f32": ratio("speedup"),
        f"than {SECOND}": ratio(f"over_{SECOND}"),
        "than whole": "" if row["piece"] is None else ratio("over_whole"),
    }


def picture(found: Sequence[Mapping[str, Any]]) -> Figure:
    """Return speed-ups of whole activations as bars, and what pieces change of them as lines, a row for each rate."""
    rates = list(dict.fromkeys(row["rate"] for row in found))
    figure = drawing.figure(8.5, 2.6 * len(rates))
    figure.suptitle("Tensor parallelism: steps with compressed activations", x=0.01, ha="left")
    for (left, right), rate in zip(figure.subplots(len(rates), 2, squeeze=False), rates, strict=True):
        mine = [row for row in found if row["rate"] == rate]
        whole = sorted((row for row in mine if row["piece"] is None), key=lambda row: row["speedup"]["median"])
        ratios = [row["speedup"] for row in whole]
        errors = [[r["median"] - r["low"] for r in ratios], [r["high"] - r["median"] for r in ratios]]
        colours = [drawing.PALETTE[0] if row["codec"] != BASELINE else drawing.GREY for row in whole]
        middles = [ratio["median"] for ratio in ratios]
        left.barh([row["codec"] for row in whole], middles, 0.7, xerr=errors, color=colours, error_kw={"lw": 0.8})
        drawing.name_bars(left, [f"{middle:.2f}" for middle in middles], [ratio["high"] for ratio in ratios])
        left.axvline(1, color="black", linewidth=0.8)
        left.set(xlabel=f"steps per second, {BASELINE} f32 = 1", title=f"{rate or 'no limit'}: whole activations")
        cut = [codec for codec in dict.fromkeys(row["codec"] for row in mine if row["piece"])]
        for place, codec in enumerate(cut):
            line = sorted((row["piece"], row["over_whole"]) for row in mine if row["codec"] == codec and row["piece"])
            y = [ratio["median"] for _, ratio in line]
            bars = [[r["median"] - r["low"] for _, r in line], [r["high"] - r["median"] for _, r in line]]
            style: dict[str, Any] = {"color": drawing.PALETTE[place], "marker": "os^Dv"[place % 5]}
            right.errorbar([piece / 1024 for piece, _ in line], y, yerr=bars, label=codec, capsize=2, **style)
        right.axhline(1, color="black", linewidth=0.8)
        right.set(
            xlabel="size of a piece, KiB",
            ylabel="steps per second,\nwhole = 1",
            title=f"{rate or 'no limit'}: in pieces",
        )
        if cut:
            right.set_xscale("log", base=2)
            right.xaxis.set_major_formatter("{x:g}")
            right.legend()
    return figure


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    parser = driver.make_parser("tensor_parallel", __doc__)
    parser.add_argument(
        "--rates", type=comma_separated(str), default=("1gbit", "100mbit"), help="of the links (1gbit,100mbit)"
    )
    parser.add_argument(
        "--variants", type=comma_separated(_variant), help="such as bf16,taco,taco/256KiB; gloo is always one (all)"
    )
    parser.add_argument("--ranks", type=count(2), default=2, help="hosts with a rank each (2)")
    parser.add_argument("--rounds", type=count(), default=4, help="turns of each variant (4)")
    for name, value in asdict(Shape()).items():
        parser.add_argument(f"--{name}", type=count(), default=value, help=f"of the model or batch ({value})")
    driver.add_options(parser, timed=True)
    options = parser.parse_args(arguments)
    try:
        networks = [Network(options.ranks, rate) for rate in options.rates]
    except ValueError as error:
        parser.error(str(error))
    shape = Shape(**{name: getattr(options, name) for name in asdict(Shape())})
    if shape.heads % options.ranks or shape.width % (shape.heads * 32):
        given = f"--ranks {options.ranks}, --heads {shape.heads}, --width {shape.width}"
        parser.error(f"{given}: expected ranks that divide the heads, and a width that is a multiple of 32 heads")
    if obstacle := why_not(networks[0]):
        parser.error(f"needs network namespaces: {obstacle}")
    names = list(dict.fromkeys([BASELINE, *(options.variants or (each.name for each in variants()))]))
    job = Job(names, options.rounds, asdict(shape))
    environment = driver.begin(options, options.ranks)
    title = (
        f"Tensor-parallel step: {options.ranks} ranks, width {shape.width}, {shape.layers} layers, activations of "
        f"{shape.activation_bytes / (1 << 20):g} MiB, {options.rounds} rounds"
    )
    found: list[dict[str, Any]] = []
    for network in driver.follow("benchmarks.tensor_parallel", networks):
        before = pressure()
        measured = _measure(job, network)
        if measured is None:
            return 1
        busy = {"before": before, "after": pressure()}
        found += [{**row, "pressure": busy} for row in rows(network.rate, measured)]
    shown = [columns(row) for row in found]
    theme = f"tensor-parallel-{options.ranks}x1"
    pictures = {theme: lambda: picture(found)}
    driver.finish(options, theme, title, environment, found, shown, pictures=pictures)
    return 0


def _variant(name: str) -> str:
    try:
        return parse(name).name
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _measure(job: Job, network: Network) -> dict[str, list[dict[str, float]]] | None:
    """Return what the workers have measured; None if they failed, which they have said on stderr."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        worker = [sys.executable, "-m", "benchmarks.tensor_parallel.worker", as_json(job), str(result)]
        print(f"{network}: {len(job.variants)} variants", file=sys.stderr, flush=True)
        with launch(worker, network, timeout=3600, stdout=sys.stderr.fileno()) as process:
            if process.wait():
                return None
        measured: dict[str, list[dict[str, float]]] = json.loads(result.read_text())
        return measured


if __name__ == "__main__":
    driver.leave(main)
