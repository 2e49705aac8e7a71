"""Pictures of README and docs, each drawn from result files without measuring anything."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields

from matplotlib.figure import Figure

from benchmarks import ablation, hops, interfaces, missing, plots, sharded_losses
from benchmarks.collective.cell import Cell, Row
from benchmarks.collective.picture import draw_shares
from benchmarks.faults import summary as faults
from benchmarks.lab import Flap, Network
from benchmarks.pages.found import CONVERGENCE, RESULTS, SCOREBOARD, TRAINING, end, result, rows, speedup, the
from benchmarks.pages.tables import HEADLINE
from benchmarks.scoreboard.picture import picture as scoreboard
from benchmarks.sharded import __main__ as sharded
from benchmarks.simulate.picture import draw as projections
from benchmarks.tensor_parallel import __main__ as tensor_parallel
from benchmarks.zipped import __main__ as zipped
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


def _training(draw: Callable[[plots.Setting, list[plots.Row]], Figure], theme: str) -> Figure:
    ((setting, found),) = plots.settings_of(rows(theme)).items()
    return draw(setting, found)


def _time_to_loss() -> Figure:
    ((setting, found),) = plots.settings_of(rows(TRAINING)).items()
    curves: dict[str, list[plots.Row]] = {}
    for row in rows(CONVERGENCE):
        curves.setdefault(row.method, []).append(row)
    figure = plots.time_to_loss(setting, found, curves)
    assert figure is not None
    return figure


def _links() -> Figure:
    names = {field.name for field in fields(Row)}
    found = [row for row in rows("links") if row.operation != "gloo all_reduce again"]
    first = found[0]
    link = {key: first[key] for key in ("rate", "hosts", "delay", "loss", "congestion")}
    cell = Cell(**link, workers=first.world // first.hosts, sizes=(), rounds=0, codecs=(), collectives=())
    return draw_shares([(cell, [Row(**{name: row[name] for name in names}) for row in found])])


def _interfaces() -> Figure:
    rates = [word.rstrip(":") for word in result("interfaces").title.split() if "mbit" in word]
    flap = Flap(1, "eth1", 12.0, 24.0)
    return interfaces.draw(rows("interfaces")[0].samples, Network(2, interfaces=tuple(rates)), flap)


TITLES = {
    "simulate-gpt-far": "Steps on long and lossy links, projected and measured",
    "ablation-gpt-2x1": "Planners that fuse wait less than wfbp, which sends every tensor by itself",
    "faults": "What is attacked tells so, and rightly, or trains on",
    "hops": "Each hop of a ring adds an error, two_shot adds none (grey: other methods)",
    "interfaces": "Both interfaces are used, one carries on alone, and the other is used again",
    "links": "One connection fills a tenth of a long link that loses packets, sixteen fill it",
    "missing": "Top-k behind fusion sends nothing of many tensors, with feedback of fewer",
    "sharded-2x2": "Sharded training: sdp4bit sends least and makes the most steps",
    "sharded-losses": "Four bits both ways end near f32, weights themselves in 4 bits do not",
    "tensor-parallel-2x1": "Compressed activations make more steps; cutting them into pieces does not",
    "zipped": "Zipping pays for large messages, and the switcher mostly finds out where",
    "zipped-late": "All-to-all when one rank is late: design 2 has the least left to do",
}
"""What these pictures show, as the results of November 2026 are; read them again when there are newer ones."""


def _titled(name: str, figure: Figure) -> Figure:
    figure.suptitle(TITLES[name], x=0.01, ha="left")
    return figure


PICTURES: dict[str, Callable[[], Figure]] = {
    "headline": headline,
    **{
        f"{name}_{theme}": lambda draw=draw, theme=theme: _training(draw, f"training-{theme}")
        for name, draw in (("speedup", plots.speedup), ("breakdown", plots.breakdown), ("bytes", plots.bytes_sent))
        for theme in ("gpt-2x1", "gpt-2x2", "resnet-4x1")
    },
    "time-to-loss_gpt-2x1": _time_to_loss,
    "scoreboard-gpt-2x1-adamw": lambda: scoreboard(rows(SCOREBOARD, kind="score")),
    "ablation-gpt-2x1": lambda: _titled("ablation-gpt-2x1", ablation.picture(rows("ablation-gpt-2x1"), "gpt, dgc")),
    "faults": lambda: _titled("faults", faults.picture(rows("faults"))),
    "hops": lambda: _titled("hops", hops.picture(rows("hops"))),
    "interfaces": lambda: _titled("interfaces", _interfaces()),
    "links": lambda: _titled("links", _links()),
    "missing": lambda: _titled("missing", missing.picture(rows("missing"), 0.01)),
    "sharded-2x2": lambda: _titled("sharded-2x2", sharded.picture(rows("sharded-2x2"))),
    "sharded-losses": lambda: _titled(
        "sharded-losses", sharded_losses.curves(rows("sharded-losses"), result("sharded-losses").title)
    ),
    "simulate-gpt-far": lambda: _titled("simulate-gpt-far", projections(rows("simulate-gpt-far"))),
    "tensor-parallel-2x1": lambda: _titled("tensor-parallel-2x1", tensor_parallel.picture(rows("tensor-parallel-2x1"))),
    "zipped": lambda: _titled("zipped", zipped.ratios([row for row in rows("zipped") if "size" in row])),
    "zipped-late": lambda: _titled("zipped-late", zipped.designs([row for row in rows("zipped") if "split" in row])),
}
"""The files of ``benchmarks/results/plots``, without their ending, and what draws them."""
