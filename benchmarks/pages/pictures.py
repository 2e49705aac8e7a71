"""Pictures of README and docs, each drawn from result files without measuring anything."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields

from matplotlib.figure import Figure

from benchmarks import plots
from benchmarks.collective.cell import Cell, Row
from benchmarks.collective.picture import draw_shares
from benchmarks.faults import summary as faults
from benchmarks.pages.found import CONVERGENCE, RESULTS, SCOREBOARD, TRAINING, end, rows, speedup, the
from benchmarks.pages.tables import HEADLINE
from benchmarks.scoreboard.picture import picture as scoreboard
from fusionlayer.cli import drawing

__all__ = ["FOLDER", "PICTURES"]

FOLDER = RESULTS / "plots"


def headline() -> Figure:
    """Return steps per second of five methods at 100 Mbit/s, as bars, with their final losses."""
    rates = {method: 1 / the(TRAINING, rate="100mbit", method=method).step_seconds for method in HEADLINE}
    order = sorted(HEADLINE, key=rates.__getitem__, reverse=True)
    base = end("ddp")
    figure = drawing.figure(7.5, 2.5)
    axes = figure.subplots()
    colours = [drawing.PALETTE[0] if "fusionlayer" in HEADLINE[method] else drawing.GREY for method in order]
    axes.barh(range(len(order)), [rates[method] for method in order], color=colours)
    axes.set_yticks(range(len(order)), [HEADLINE[method] for method in order])
    texts = []
    for method in order:
        text = f"{rates[method]:.2f}" + (f" ({speedup(method, '100mbit'):.3g}x)" if method != "ddp" else "")
        if method != "ddp" and rows(CONVERGENCE, method=method):
            more = end(method) / base - 1
            text += f", loss {more:+.1%}" if abs(more) > 0.005 else ", same loss"
        texts.append(text)
    drawing.name_bars(axes, texts, [rates[method] for method in order])
    times = speedup("int4", "100mbit")
    axes.set(xlabel="training steps per second on a link of 100 Mbit/s", xticks=range(0, 4))
    figure.suptitle(f"int4 makes {times:.1f} times as many steps as DDP, and ends at the same loss", x=0.01, ha="left")
    return figure


def _training(draw: Callable[[plots.Setting, list[plots.Row]], Figure]) -> Figure:
    ((setting, found),) = plots.settings_of(rows(TRAINING)).items()
    return draw(setting, found)


def _links() -> Figure:
    names = {field.name for field in fields(Row)}
    found = [row for row in rows("links") if row.operation != "gloo all_reduce again"]
    first = found[0]
    link = {key: first[key] for key in ("rate", "hosts", "delay", "loss", "congestion")}
    cell = Cell(**link, workers=first.world // first.hosts, sizes=(), rounds=0, codecs=(), collectives=())
    return draw_shares([(cell, [Row(**{name: row[name] for name in names}) for row in found])])


TITLES = {
    "faults": "What is attacked tells so, and rightly, or trains on",
    "links": "One connection fills a tenth of a long link that loses packets, sixteen fill it",
}
"""What these pictures show, as the results of November 2026 are; read them again when there are newer ones."""


def _titled(name: str, figure: Figure) -> Figure:
    figure.suptitle(TITLES[name], x=0.01, ha="left")
    return figure


PICTURES: dict[str, Callable[[], Figure]] = {
    "headline": headline,
    "speedup_gpt-2x1": lambda: _training(plots.speedup),
    "breakdown_gpt-2x1": lambda: _training(plots.breakdown),
    "scoreboard-gpt-2x1-adamw": lambda: scoreboard(rows(SCOREBOARD, kind="score")),
    "faults": lambda: _titled("faults", faults.picture(rows("faults"))),
    "links": lambda: _titled("links", _links()),
}
"""The files of ``benchmarks/results/plots``, without their ending, and what draws them."""
