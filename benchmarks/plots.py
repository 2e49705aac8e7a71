"""Pictures of result files, as SVG.

    python -m benchmarks.plots benchmarks/results/*.json --out benchmarks/results/plots

From results of ``benchmarks.training``: speed-up by bandwidth, and what a step's time goes to. Other result files are
passed over.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import drawing
from benchmarks.lab import Network
from benchmarks.pages.found import load
from benchmarks.training.methods import ALWAYS, BASELINE, COMPUTE, NULL, PEERS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["Setting", "breakdown", "draw", "main", "save", "settings_of", "speedup"]

Row = Mapping[str, Any]

COMPUTE_COLOUR, CODEC_COLOUR, WAIT_COLOUR = drawing.GREY, drawing.PALETTE[4], drawing.PALETTE[0]
OURS, THEIRS, LIMIT = drawing.PALETTE[0], drawing.GREY, "#B8B8B8"


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


def _colour(method: str) -> str:
    """Return fusionlayer's colour or that of what it is compared with."""
    return LIMIT if method == COMPUTE else THEIRS if method in PEERS or method in ALWAYS else OURS


def speedup(setting: Setting, rows: Sequence[Row]) -> Figure:
    """Return speed-up over DDP with 95 % intervals: a panel for each bandwidth, a bar for each method, sorted."""
    links = _by_link([row for row in rows if row["rate"]] or rows)
    methods = [row["method"] for row in sorted(links[0][1], key=_median) if row["method"] not in (BASELINE, NULL)]
    figure = drawing.figure(max(6.8, 1.8 + 3.1 * len(links)), 1.2 + 0.2 * len(methods))
    panels = figure.subplots(1, len(links), squeeze=False, sharey=True)[0]
    for axes, (link, group) in zip(panels, links, strict=True):
        found = {row["method"]: row["speedup"] for row in group}
        medians = [found[method]["median"] for method in methods]
        below = [found[method]["median"] - found[method]["low"] for method in methods]
        above = [found[method]["high"] - found[method]["median"] for method in methods]
        names = [f"{method} (limit)" if method == COMPUTE else method for method in methods]
        axes.barh(names, medians, xerr=[below, above], color=list(map(_colour, methods)), error_kw={"lw": 0.8})
        ends = [found[method]["high"] for method in methods]
        drawing.name_bars(axes, [f"{median:#.3g}" for median in medians], ends)
        axes.axvline(1, color="black", linewidth=0.8)
        axes.set(title=link, xlabel="steps per second, DDP = 1")
    panels[0].set_ylabel("method")
    figure.suptitle(_statement(setting, links[0]), x=0.01, ha="left")
    _key(figure, {"fusionlayer": OURS, "torch and Horovod": THEIRS, "no communication": LIMIT})
    return figure


def _median(row: Row) -> float:
    median: float = row["speedup"]["median"]
    return median


def _statement(setting: Setting, link: tuple[str, Sequence[Row]]) -> str:
    """Return what fusionlayer's plainest codec gains, in words."""
    gains = [row["speedup"]["median"] for row in link[1] if row["method"] == "int4"]
    return f"{setting.title}" + (f": int4 makes {gains[0]:.1f} times as many steps at {link[0]}" if gains else "")


def _key(figure: Figure, colours: Mapping[str, str]) -> None:
    """Say below the panels which colour is what."""
    from matplotlib.patches import Patch

    handles = [Patch(color=colour, label=label) for label, colour in colours.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles))


def breakdown(setting: Setting, rows: Sequence[Row]) -> Figure:
    """Return what the time of a step goes to: a panel for each bandwidth, a bar for each method without variations.

    Computing is what the step takes without communication; what is longer is time in which training waits for the
    network, some of it, but at most what codecs took, for codecs.
    """
    links = _by_link([row for row in rows if "+" not in row["method"] and row["method"] != NULL])
    order = [row["method"] for row in sorted(links[0][1], key=lambda row: -row["step_seconds"])]
    figure = drawing.figure(max(6.8, 1.8 + 3.1 * len(links)), 1.2 + 0.2 * len(order))
    panels = figure.subplots(1, len(links), squeeze=False, sharey=True)[0]
    for axes, (link, group) in zip(panels, links, strict=True):
        group = sorted(group, key=lambda row: order.index(row["method"]))
        steps = [1e3 * row["step_seconds"] for row in group]
        compute = [min(step, 1e3 * row["compute_seconds"]) for step, row in zip(steps, group, strict=True)]
        codec = [
            min(step - part, 1e3 * (row["codec_seconds"] or 0.0))
            for step, part, row in zip(steps, compute, group, strict=True)
        ]
        wait = [step - part - other for step, part, other in zip(steps, compute, codec, strict=True)]
        both = [part + other for part, other in zip(compute, codec, strict=True)]
        axes.barh(order, compute, color=COMPUTE_COLOUR)
        axes.barh(order, codec, left=compute, color=CODEC_COLOUR)
        axes.barh(order, wait, left=both, color=WAIT_COLOUR)
        drawing.name_bars(axes, [f"{step:.0f}" for step in steps], steps)
        axes.set(title=link, xlabel="time of a step, ms")
    panels[0].set_ylabel("method")
    figure.suptitle(f"{setting.title}: what a step's time goes to", x=0.01, ha="left")
    _key(figure, {"computing": COMPUTE_COLOUR, "codec, at most": CODEC_COLOUR, "waiting for the network": WAIT_COLOUR})
    return figure


def draw(results: Sequence[Mapping[str, Any]], out: Path) -> list[Path]:
    """Write all pictures that the result files' contents give into ``out``; return their paths."""
    training = [row for result in results for row in result["rows"] if "speedup" in row]
    with drawing.style():
        return [
            save(figure(setting, rows), out / f"{figure.__name__}_{setting.stem}")
            for setting, rows in settings_of(training).items()
            for figure in (speedup, breakdown)
        ]


def save(figure: Figure, stem: Path) -> Path:
    """Write ``stem``.svg; return its path. Call it within ``drawing.style()``."""
    stem.parent.mkdir(parents=True, exist_ok=True)
    path = stem.with_name(f"{stem.name}.svg")
    drawing.save(figure, path)
    return path


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
            result = load(path)
            results.append({"title": result.title, "rows": result.rows})
        except (OSError, ValueError, AttributeError) as error:
            parser.error(f"{path} is no result file ({error}); give JSON files that a benchmark has written")
    written = draw(results, options.out)
    if not written:
        print("nothing to draw: none of the files is a result of benchmarks.training", file=sys.stderr)
        return 1
    print("\n".join(str(path) for path in written))
    return 0


if __name__ == "__main__":
    sys.exit(main())
