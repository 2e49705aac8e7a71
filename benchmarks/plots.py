"""Pictures of result files, each as PNG and SVG.

    python -m benchmarks.plots benchmarks/results/*.json --out benchmarks/results/plots

From results of ``benchmarks.training``: speed-up against bandwidth, what a step's time goes to, bytes sent. With
results of ``benchmarks.convergence`` beside them: validation loss against time. Other result files are passed over.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, StrMethodFormatter

from benchmarks.lab import Network
from benchmarks.training.methods import ALWAYS, BASELINE, COMPUTE, PEERS
from benchmarks.training.workloads import MODELS, Text
from benchmarks.variants import OVERLAP

__all__ = ["Setting", "breakdown", "bytes_sent", "draw", "main", "save", "settings_of", "speedup", "time_to_loss"]

Row = Mapping[str, Any]

# Okabe and Ito's colours, which people with any kind of colour vision can tell apart; yellow, hard to see on white, is
# left out. Where they repeat, markers and dashes differ.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = "os^Dvp*XPh<>"
COMPUTE_COLOUR, CODEC_COLOUR, WAIT_COLOUR = "#999999", "#E69F00", "#0072B2"

STYLE = {
    "axes.spines.right": False,
    "axes.spines.top": False,
    "figure.constrained_layout.use": True,
    "font.size": 9,
    "legend.frameon": False,
    "svg.hashsalt": "fusionlayer",
}


@dataclass(frozen=True, order=True)
class Setting:
    """What the rows of one picture have in common."""

    model: str
    hosts: int
    workers: int

    @property
    def title(self) -> str:
        """The setting in words."""
        each = f"{self.workers} worker{'s' if self.workers > 1 else ''}"
        return f"{self.model}: {self.hosts} host{'s' if self.hosts > 1 else ''} with {each} each"

    @property
    def stem(self) -> str:
        """The setting in a file name."""
        return f"{self.model}-{self.hosts}x{self.workers}"


def settings_of(rows: Iterable[Row]) -> dict[Setting, list[Row]]:
    """Return the rows of training results by setting, the slowest link first."""
    ordered = sorted(rows, key=lambda row: (_setting(row), _megabits(row)))
    return {setting: list(group) for setting, group in groupby(ordered, key=_setting)}


def _setting(row: Row) -> Setting:
    return Setting(row["model"], row["hosts"], row["workers"])


def _megabits(row: Row) -> float:
    rate = Network(2, row["rate"], allow_cpu_bound=True).bits_per_second
    return float("inf") if rate is None else rate / 1e6


def _link(row: Row) -> str:
    megabits = _megabits(row)
    if megabits == float("inf"):
        return "no limit"
    return f"{megabits:g} Mbit/s" if megabits < 1000 else f"{megabits / 1000:g} Gbit/s"


def _by_link(rows: Sequence[Row]) -> list[tuple[str, list[Row]]]:
    return [(link, list(group)) for link, group in groupby(rows, key=_link)]


def _line(method: str, methods: Sequence[str]) -> dict[str, Any]:
    """Return how a method's line looks: peers dashed and hollow, fusionlayer solid, dotted with overlap."""
    kin = dict.fromkeys(name.removesuffix(OVERLAP) for name in methods if (name in PEERS) == (method in PEERS))
    index = list(kin).index(method.removesuffix(OVERLAP))
    dashes = "--" if method in PEERS else ":" if method.endswith(OVERLAP) else "-"
    colour = COLOURS[index % len(COLOURS)]
    hollow = method in PEERS or method.endswith(OVERLAP)
    marker = MARKERS[(index + 3 * (method in PEERS)) % len(MARKERS)]
    return {"color": colour, "linestyle": dashes, "marker": marker, "markerfacecolor": "white" if hollow else colour}


def speedup(setting: Setting, rows: Sequence[Row]) -> Figure:
    """Return speed-up over DDP against bandwidth, with 95 % intervals; both axes are logarithmic."""
    methods = [row["method"] for row in _by_link(rows)[0][1] if row["method"] != BASELINE]
    figure = Figure(figsize=(7.5, max(4.2, 0.6 + 0.2 * len(methods))))  # the legend has a line for each
    axes = figure.subplots()
    limited = [row for row in rows if row["rate"]] or rows
    rates = {_link(row): _megabits(row) if row["rate"] else 1.0 for row in limited}
    for place, method in enumerate(methods):
        mine = [row for row in limited if row["method"] == method]
        shift = 1.012 ** (place - len(methods) / 2)  # side by side, so that intervals can be told apart
        x = [rates[_link(row)] * shift for row in mine]
        y = [row["speedup"]["median"] for row in mine]
        below = [row["speedup"]["median"] - row["speedup"]["low"] for row in mine]
        above = [row["speedup"]["high"] - row["speedup"]["median"] for row in mine]
        label = f"{method} (limit)" if method == COMPUTE else method
        axes.errorbar(
            x, y, yerr=(below, above), label=label, capsize=2, markersize=5, linewidth=1.2, **_line(method, methods)
        )
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set(title=setting.title, ylabel="steps per second, DDP = 1", xscale="log", yscale="log")
    axes.set_xlabel("bandwidth of each host")
    axes.set_xlim(min(rates.values()) / 1.4, max(rates.values()) * 1.4)
    axes.set_xticks(list(rates.values()), list(rates))
    axes.minorticks_off()
    top = max(row["speedup"]["high"] for row in limited)
    bottom = min(row["speedup"]["low"] for row in limited)
    axes.set_ylim(bottom / 1.2, top * 1.2)
    ticks = [2.0**power for power in range(-6, 10) if bottom / 1.2 <= 2.0**power <= top * 1.2]
    axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.grid(axis="y", linewidth=0.4, alpha=0.6)
    handles, labels = axes.get_legend_handles_labels()
    first = {row["method"]: row["speedup"]["median"] for row in reversed(limited)}
    order = sorted(range(len(labels)), key=lambda i: -first[methods[i]])
    axes.legend([handles[i] for i in order], [labels[i] for i in order], loc="center left", bbox_to_anchor=(1.01, 0.5))
    return figure


def breakdown(setting: Setting, rows: Sequence[Row]) -> Figure:
    """Return what the time of a step goes to, a panel for each bandwidth.

    Computing is what the step takes without communication; what is longer is time in which training waits for the
    network, some of it, but at most what codecs took, for codecs.
    """
    links = _by_link(rows)
    height = 1.1 + 0.24 * max(len(group) for _, group in links)
    figure = Figure(figsize=(1.6 + 3.2 * len(links), height))
    panels = figure.subplots(1, len(links), squeeze=False, sharey=True)
    for axes, (link, group) in zip(panels[0], links, strict=True):
        names = [row["method"] for row in group]
        steps = [1e3 * row["step_seconds"] for row in group]
        compute = [min(step, 1e3 * row["compute_seconds"]) for step, row in zip(steps, group, strict=True)]
        codec = [
            min(step - part, 1e3 * (row["codec_seconds"] or 0.0))
            for step, part, row in zip(steps, compute, group, strict=True)
        ]
        wait = [step - part - other for step, part, other in zip(steps, compute, codec, strict=True)]
        both = [part + other for part, other in zip(compute, codec, strict=True)]
        axes.barh(names, compute, color=COMPUTE_COLOUR, label="computing")
        axes.barh(names, codec, left=compute, color=CODEC_COLOUR, label="codec, at most")
        axes.barh(names, wait, left=both, color=WAIT_COLOUR, label="waiting for the network")
        _values(axes, steps, "{:.0f}")
        axes.set(title=link, xlabel="ms a step")
    panels[0][0].invert_yaxis()
    figure.suptitle(setting.title)
    figure.legend(*panels[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return figure


def bytes_sent(setting: Setting, rows: Sequence[Row]) -> Figure:
    """Return the bytes that a host sends in each step, as its network device has counted them."""
    link, group = _by_link(rows)[0]
    group = [row for row in group if row["method"] not in ALWAYS or row["method"] == BASELINE]
    names = [row["method"] for row in group]
    figure = Figure(figsize=(5.6, 0.9 + 0.24 * len(group)))
    axes = figure.subplots()
    colours = [WAIT_COLOUR if name not in PEERS else COMPUTE_COLOUR for name in names]
    megabytes = [row["bytes_per_step"] / 1e6 for row in group]
    axes.barh(names, megabytes, color=colours)
    _values(axes, megabytes, "{:.3g}")
    axes.set(title=setting.title, xlabel=f"MB sent by each host in a step (fusionlayer blue), {link}")
    axes.invert_yaxis()
    return figure


def _values(axes: Axes, values: Sequence[float], form: str) -> None:
    """Write each bar's value behind it."""
    room = max(values)
    for place, value in enumerate(values):
        axes.text(value + 0.02 * room, place, form.format(value), va="center", fontsize=8)
    axes.set_xlim(0, 1.2 * room)


def time_to_loss(setting: Setting, rows: Sequence[Row], curves: Mapping[str, Sequence[Row]]) -> Figure | None:
    """Return validation loss against time: losses of convergence runs, each step as long as training has measured.

    With ``overlap_forward`` the same values are computed, so the curve of the codec serves both. None if no method is
    in both results.

    Args:
        setting: of ``rows``.
        rows: training results of one setting.
        curves: method -> its convergence runs, one for each seed.
    """
    links = [
        (link, [row for row in group if row["method"].removesuffix(OVERLAP) in curves])
        for link, group in _by_link(rows)
    ]
    if not all(group for _, group in links):
        return None
    figure = Figure(figsize=(0.8 + 4.2 * len(links), 4.4))
    panels = figure.subplots(1, len(links), squeeze=False, sharey=True)
    used = {row["method"].removesuffix(OVERLAP) for _, group in links for row in group}
    goal = max(statistics.fmean(run["final"] for run in curves[method]) for method in used)
    for axes, (link, group) in zip(panels[0], links, strict=True):
        methods = [row["method"] for row in group]
        for row in group:
            minutes = row["step_seconds"] / 60
            steps, low, mean, high = _band(curves[row["method"].removesuffix(OVERLAP)])
            reached = next(step for step, loss in zip(steps, mean, strict=True) if loss <= goal) * minutes
            line = _line(row["method"], methods)
            x = [step * minutes for step in steps]
            label = f"{row['method']}: {reached:.3g} min"
            axes.plot(x, mean, label=label, linewidth=1.3, markersize=4, markevery=(0.1, 0.2), **line)
            axes.fill_between(x, low, high, color=line["color"], alpha=0.15, linewidth=0)
        axes.axhline(goal, color="black", linewidth=0.8)
        axes.set(title=link, xlabel="minutes of training", xscale="log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axes.minorticks_off()
        axes.grid(axis="y", linewidth=0.4, alpha=0.6)
        axes.legend(title=f"until loss {goal:.3f}", loc="upper right", fontsize=7)
    panels[0][0].set_ylabel("validation loss (mean and range over seeds)")
    figure.suptitle(setting.title)
    return figure


def _band(runs: Sequence[Row]) -> tuple[list[float], list[float], list[float], list[float]]:
    """Return steps above 0, and the lowest, mean and highest loss of all runs at each."""
    points: dict[float, list[float]] = {}
    for run in runs:
        for step, loss in run["losses"]:
            if step:
                points.setdefault(step, []).append(loss)
    whole = {step: losses for step, losses in sorted(points.items()) if len(losses) == len(runs)}
    losses = list(whole.values())
    return list(whole), [min(at) for at in losses], [statistics.fmean(at) for at in losses], [max(at) for at in losses]


def _same_training(setting: Setting, title: str) -> bool:
    """Return whether a convergence result of this title trains what ``setting`` does."""
    kind = MODELS.get(setting.model)
    if kind is None or not issubclass(kind, Text):
        return False
    model = f"width {kind.config.width}, {kind.config.layers} layers"
    workers = f"{setting.hosts * setting.workers} workers with batches of {kind.batch_size};"
    return model in title and workers in title and "of AdamW" in title


def draw(results: Sequence[Mapping[str, Any]], out: Path) -> list[Path]:
    """Write all pictures that the result files' contents give into ``out``; return the paths of the PNGs."""
    training = [row for result in results for row in result["rows"] if "speedup" in row]
    convergence = [result for result in results if all("losses" in row and "seed" in row for row in result["rows"])]
    written: list[Path] = []
    with rc_context(STYLE):  # type: ignore[arg-type]
        for setting, rows in settings_of(training).items():
            figures: dict[str, Figure | None] = {
                "speedup": speedup(setting, rows),
                "breakdown": breakdown(setting, rows),
                "bytes": bytes_sent(setting, rows),
            }
            same = [result for result in convergence if _same_training(setting, result["title"])]
            if same:
                curves: dict[str, list[Row]] = {}
                for row in same[-1]["rows"]:
                    curves.setdefault(row["method"], []).append(row)
                figures["time-to-loss"] = time_to_loss(setting, rows, curves)
            written += [
                save(figure, out / f"{name}_{setting.stem}") for name, figure in figures.items() if figure is not None
            ]
    return written


def save(figure: Figure, stem: Path) -> Path:
    """Write ``stem``.svg and ``stem``.png; return the latter."""
    stem.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(stem.with_suffix(".svg"), metadata={"Date": None})
    figure.savefig(stem.with_suffix(".png"), dpi=150)
    return stem.with_suffix(".png")


def main() -> int:
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.plots", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", type=Path, nargs="+", help="JSON result files; of one setting the last one counts")
    parser.add_argument("--out", type=Path, required=True, help="folder of the pictures")
    options = parser.parse_args()
    results = []
    for path in options.results:
        try:
            result = json.loads(path.read_text())
            results.append({"title": result["title"], "rows": result["rows"]})
        except (OSError, ValueError, KeyError, TypeError) as error:
            parser.error(f"{path} is no result file ({error}); give JSON files that a benchmark has written")
    written = draw(results, options.out)
    if not written:
        print("nothing to draw: none of the files is a result of benchmarks.training", file=sys.stderr)
        return 1
    print("\n".join(str(path) for path in written))
    return 0


if __name__ == "__main__":
    sys.exit(main())
