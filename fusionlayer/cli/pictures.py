"""Pictures of the commands' results: speed-ups and bandwidths."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..planning.projection import BASELINE
from . import drawing
from .units import MEMORY, RATES, in_words, unit_for

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST = 5
"""Lines of a picture next to the baselines: the best ones are drawn."""

Curve = Sequence[tuple[float, float]]
_MARKERS = "os^Dv"


def draw_speedups(title: str, curves: Mapping[str, Curve]) -> Figure:
    """Return speed-ups over the baseline against workers, by method. Call it within ``drawing.style()``."""
    best = _best(curves)
    figure = drawing.figure(7, 3.4)
    axes = figure.subplots()
    axes.axhline(1, color=drawing.GREY)
    _draw_lines(axes, best, curves)
    workers = sorted({x for curve in curves.values() for x, _ in curve})
    axes.set_xscale("log")
    axes.set_xticks(workers, [f"{count:g}" for count in workers])
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.set(xlabel="workers", ylabel=f"steps per second, {BASELINE} = 1")
    of = f" (the {len(best)} fastest of {len(curves)} methods)" if len(best) < len(curves) else ""
    most = max(y for _, y in curves[best[0]])
    axes.set_title(f"{best[0]} makes up to {most:.1f} times the steps of {BASELINE}{of}\n{title}")
    drawing.name_lines(axes)
    return figure


def draw_bandwidths(title: str, panels: Mapping[str, Mapping[str, Curve]]) -> Figure:
    """Return the bandwidth that a network without codec would need, a panel for each collective, by codec.

    Args:
        title: what was measured.
        panels: by collective and by codec, sizes in bytes with bytes per second.
    """
    unit = unit_for(RATES, [rate for curves in panels.values() for curve in curves.values() for _, rate in curve])
    every: dict[str, list[tuple[float, float]]] = {}
    for curves in panels.values():
        for name, curve in curves.items():
            every.setdefault(name, []).extend((x, y / RATES[unit]) for x, y in curve)
    best = _best(every)
    columns = min(2, len(panels))
    rows = -(-len(panels) // columns)
    figure = drawing.figure(4.2 * columns, 2.6 * rows + 0.4)
    for axes, (collective, curves) in zip(
        figure.subplots(rows, columns, squeeze=False).flat, panels.items(), strict=False
    ):
        _draw_lines(axes, best, {name: [(x, y / RATES[unit]) for x, y in curve] for name, curve in curves.items()})
        sizes = sorted({x for curve in curves.values() for x, _ in curve})
        axes.set(xscale="log", yscale="log")
        step = -(-len(sizes) // 5)
        axes.set_xticks(sizes[::step], [in_words(size, MEMORY) for size in sizes[::step]])
        axes.minorticks_off()
        axes.set(title=collective, xlabel="size of the call", ylabel=f"effbw, {unit}")
        drawing.name_lines(axes)
    for axes in list(figure.axes)[len(panels) :]:
        axes.remove()
    of = f" (the {len(best)} fastest of {len(every)} codecs)" if len(best) < len(every) else ""
    figure.suptitle(f"How fast a network would be as good without a codec{of}: {title}", x=0.01, ha="left")
    return figure


def _best(curves: Mapping[str, Curve]) -> list[str]:
    """Return the names of the curves that reach highest, the highest first."""
    return sorted(curves, key=lambda name: -max(y for _, y in curves[name]))[:MOST]


def _draw_lines(axes: Any, names: Sequence[str], curves: Mapping[str, Curve]) -> None:
    """Draw a line for each name that has a curve; a name has the same colour in every panel."""
    for name, colour, marker in zip(names, drawing.PALETTE, _MARKERS, strict=False):
        if name in curves:
            axes.plot(
                [x for x, _ in curves[name]], [y for _, y in curves[name]], color=colour, marker=marker, label=name
            )
    axes.grid(axis="y")
