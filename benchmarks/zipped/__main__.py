"""Zipped collectives beside native ones on emulated networks, the switcher's choices, and late ranks.

    python -m benchmarks.zipped --out benchmarks/results
    python -m benchmarks.zipped --smoke

Elements are bf16, Gaussian. A size is what a worker sends in the native form. "native / zipped" is the median of the
rounds' ratios, above 1 where zipping is faster; "choice / best" is the median of what calls take that the switcher
decides, by the lesser median of the two forms. The second table has a rank that comes late (ZipCCL, figure 14): seconds
from its arrival until all workers are done, of both designs of the zipped all-to-all. "uneven" means that the others
have twice as much for each other as for the late one.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from benchmarks import driver
from benchmarks.arguments import comma_separated, count
from benchmarks.collective.cell import in_words
from benchmarks.lab import Network, launch, why_not
from benchmarks.quiet import pressure
from benchmarks.report import table
from fusionlayer.cli import drawing

from .worker import CALLS, Cell

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["designs", "line", "main", "ratios"]

KB, MB = 1 << 10, 1 << 20
RATES = ("100mbit", "1gbit")
SIZES = (16 * KB, 64 * KB, 256 * KB, MB, 4 * MB, 16 * MB)
LATE_HOSTS, LATE_RATE, LATE_SIZE = 4, "100mbit", 1536 * KB
DELAYS = (0.0, 0.05, 0.1, 0.15, 0.2, 0.3)

Row = dict[str, Any]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    parser = driver.make_parser("zipped", __doc__)
    parser.add_argument("--rates", type=comma_separated(str), default=RATES, help="comma-separated (100mbit,1gbit)")
    parser.add_argument("--rounds", type=count(), default=7, help="(7)")
    parser.add_argument("--timeout", type=float, default=400.0, help="seconds for one set of workers (400)")
    driver.add_options(parser, timed=True, smoke=True)
    options = parser.parse_args(arguments)
    if reason := why_not(Network()):
        print(f"no emulated networks: {reason}", file=sys.stderr)
        return 1
    environment = driver.begin(options, 2)
    rows, failed = [], []
    for cell in cells(options):
        found = list(run(cell, options.timeout))
        rows += [row | pressure() for row in found]
        if not found or found[-1].get("incomplete"):
            failed.append(f"{cell.rate}, {cell.hosts} hosts")
    rows = [row for row in rows if not row.get("incomplete")]
    if failed:
        print(f"not everything was measured: {'; '.join(failed)}", file=sys.stderr)
    if not rows:
        return 1
    compared, late = [row for row in rows if "call" in row], [row for row in rows if "split" in row]
    shown = [line(row) for row in compared]
    title = f"Zipped collectives beside native ones, 2 hosts, bf16, {rows[0]['rounds']} rounds"
    told = [late_line(row) for row in late]
    late_title = f"A rank that comes late, {LATE_HOSTS} hosts, {LATE_RATE}"
    late_table = table(late_title, told) if told else ""
    if not shown or not told:  # half of it, which is shown and not kept
        print(table(title, shown) if shown else late_table)
        return 1
    pictures = {"zipped": lambda: ratios(compared), "zipped-late": lambda: designs(late)}
    driver.finish(options, "zipped", title, environment, rows, shown, more=[late_table], pictures=pictures)
    return 1 if failed else 0


def cells(options: argparse.Namespace) -> Iterator[Cell]:
    """Yield what is measured: forms on each network, then designs with a late rank."""
    rounds = 2 if options.smoke else options.rounds
    for rate in options.rates:
        yield Cell(rate, 2, SIZES[1:2] if options.smoke else SIZES, rounds)
    delays = DELAYS[1:2] if options.smoke else DELAYS
    yield Cell(LATE_RATE, LATE_HOSTS, (LATE_SIZE // 16 if options.smoke else LATE_SIZE,), rounds, delays)


def run(cell: Cell, timeout: float) -> Iterator[Row]:
    """Yield the rows of a cell; one with ``incomplete`` if its workers failed, which stderr tells of."""
    command = [sys.executable, "-m", f"{__package__}.worker", json.dumps(asdict(cell))]
    with launch(command, Network(cell.hosts, cell.rate), timeout=timeout, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        for text in process.stdout:
            row = json.loads(text)
            what = f"{row['call']} of {in_words(row['size'])}" if "call" in row else f"{row['split']}, {row['delay']} s"
            print(f"{cell.rate}, {cell.hosts} hosts: {what} is measured", file=sys.stderr)
            yield row
        if process.wait():
            yield {"incomplete": True}


def line(row: Row) -> Row:
    """Return a line of the first table."""
    native, zipped, switched = (row["seconds"][form] for form in ("native", "zipped", "switched"))
    pairs = [a / b for a, b in zip(native, zipped, strict=True)]
    low, high = min(pairs), max(pairs)
    return {
        "rate": row["rate"],
        "collective": row["call"],
        "sent": in_words(row["size"]),
        "native, ms": f"{1e3 * statistics.median(native):.2f}",
        "zipped, ms": f"{1e3 * statistics.median(zipped):.2f}",
        "native / zipped": f"{statistics.median(pairs):.2f} [{low:.2f}..{high:.2f}]",
        "switcher": "zipped" if row["zips"] else "native",
        "choice, ms": f"{1e3 * statistics.median(switched):.2f}",
        "choice / best": f"{_over_best(row):.3f}",
    }


def _over_best(row: Row) -> float:
    medians = {form: statistics.median(seconds) for form, seconds in row["seconds"].items()}
    return float(medians["switched"] / min(medians["native"], medians["zipped"]))


def late_line(row: Row) -> Row:
    """Return a line of the second table."""
    medians = {form: statistics.median(seconds) for form, seconds in row["seconds"].items()}
    pairs = [a / b for a, b in zip(row["seconds"]["design 1"], row["seconds"]["design 2"], strict=True)]
    return {
        "split": row["split"],
        "late by, ms": f"{1e3 * row['delay']:.0f}",
        **{f"{form}, ms": f"{1e3 * seconds:.1f}" for form, seconds in medians.items()},
        "design 1 / design 2": f"{statistics.median(pairs):.2f} [{min(pairs):.2f}..{max(pairs):.2f}]",
    }


def ratios(rows: Sequence[Row]) -> Figure:
    """Return native over zipped time by size: a panel for each rate, a line for a collective, its choices as bars."""
    rates = list(dict.fromkeys(row["rate"] for row in rows))
    figure = drawing.figure(1.6 + 3.4 * len(rates), 3.2)
    for axes, rate in zip(figure.subplots(1, len(rates), sharey=True, squeeze=False)[0], rates, strict=True):
        for i, call in enumerate(CALLS):
            mine = [row for row in rows if (row["rate"], row["call"]) == (rate, call)]
            sizes = [row["size"] for row in mine]
            for form, dashes, label in (("zipped", "-", call), ("switched", ":", f"{call}, switcher")):
                middle = [
                    statistics.median(
                        a / b for a, b in zip(row["seconds"]["native"], row["seconds"][form], strict=True)
                    )
                    for row in mine
                ]
                axes.plot(sizes, middle, dashes, color=drawing.PALETTE[i], marker="os^"[i % 3], label=label)
        axes.axhline(1.0, color="black", linewidth=0.6)
        axes.set(title=rate, xlabel="size that a worker sends natively")
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(lambda size, _: in_words(int(size)))
        axes.grid(axis="y")
    figure.axes[0].set_ylim(bottom=0)  # of all panels, after all lines
    figure.axes[0].set_ylabel("times as fast as the native call")
    figure.axes[-1].legend(loc="center left", bbox_to_anchor=(1.01, 0.5))
    figure.suptitle("Zipped and switched collectives beside native ones", x=0.01, ha="left")
    return figure


def designs(rows: Sequence[Row]) -> Figure:
    """Return the time after a late rank's arrival by its delay: a panel for each split, a line for each form."""
    splits = list(dict.fromkeys(row["split"] for row in rows))
    figure = drawing.figure(1.2 + 3.4 * len(splits), 3.2)
    for axes, split in zip(figure.subplots(1, len(splits), sharey=True, squeeze=False)[0], splits, strict=True):
        mine = [row for row in rows if row["split"] == split]
        for i, form in enumerate(("native", "design 1", "design 2")):
            middle = [1e3 * statistics.median(row["seconds"][form]) for row in mine]
            delays = [1e3 * row["delay"] for row in mine]
            axes.plot(delays, middle, color=(drawing.GREY, *drawing.PALETTE)[i], marker="os^"[i], label=form)
        axes.set(title=f"{split} splits", xlabel="one rank is late by, ms")
        axes.grid(axis="y")
    figure.axes[0].set_ylim(bottom=0)
    figure.axes[0].set_ylabel("from its arrival to the end, ms")
    figure.suptitle("All-to-all when one rank is late", x=0.01, ha="left")
    for axes in figure.axes[-1:]:
        drawing.name_lines(axes)
    return figure


if __name__ == "__main__":
    driver.leave(main)
