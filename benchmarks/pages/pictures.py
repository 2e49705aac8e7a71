"""Pictures of README and docs, each drawn from result files without measuring anything."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields

from matplotlib.figure import Figure

from benchmarks import drawing, plots
from benchmarks.collective.cell import Cell, Row
from benchmarks.collective.picture import draw_shares
from benchmarks.pages import overview
from benchmarks.pages.found import CONVERGENCE, RESULTS, SCOREBOARD, TRAINING, end, rows, speedup, the
from benchmarks.pages.tables import HEADLINE
from benchmarks.scoreboard.picture import picture as scoreboard

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
    axes.set(xlabel="training steps per second at 100 Mbit/s: 2 workers, 10.9 M parameters, CPU", ylabel="method")
    axes.set_xticks(range(4))
    figure.suptitle(f"int4 makes {times:.1f} times as many steps as DDP, and ends at the same loss", x=0.01, ha="left")
    return figure


SHOWN = ("alone", "ddp", "ddp-bf16", "ddp-powersgd", "horovod", "int8", "int4", "dgc")
"""Methods of the pictures of training. The table on the page of results has all."""


def _training(draw: Callable[[plots.Setting, list[plots.Row]], Figure]) -> Figure:
    ((setting, found),) = plots.settings_of(rows(TRAINING)).items()
    return draw(setting, [row for row in found if row["method"] in SHOWN])


def _links() -> Figure:
    """Return the share of a long link that all-reduces of 64 MB fill."""
    names = {field.name for field in fields(Row)}
    calls = ("gloo all_reduce", "MPI Allreduce", "all_reduce over ")
    found = [row for row in rows("links") if row.operation.startswith(calls) and "again" not in row.operation]
    first = found[0]
    link = {key: first[key] for key in ("rate", "hosts", "delay", "loss", "congestion")}
    cell = Cell(**link, workers=first.world // first.hosts, sizes=(), rounds=0, codecs=(), collectives=())
    figure = draw_shares([(cell, [Row(**{name: row[name] for name in names}) for row in found])])
    figure.axes[0].set_title("64 MB, 2 hosts, 100 Mbit/s, round trip 50 ms, 0.05 % lost")
    # As the results of November 2026 are; read it again when there are newer ones.
    figure.suptitle(
        "One connection fills a tenth of a long link that loses packets, sixteen fill it", x=0.01, ha="left"
    )
    return figure


PICTURES: dict[str, Callable[[], Figure]] = {
    "headline": headline,
    "speedup_gpt-2x1": lambda: _training(plots.speedup),
    "breakdown_gpt-2x1": lambda: _training(plots.breakdown),
    "scoreboard-gpt-2x1-adamw": lambda: scoreboard(rows(SCOREBOARD, kind="score")),
    "links": _links,
    "gain": overview.gain,
    "workers": overview.workers,
    "bytes": overview.bytes_by_method,
    "ranks": overview.ranks,
}
"""The files of ``benchmarks/results/plots``, without their ending, and what draws them."""
