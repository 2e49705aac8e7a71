"""Projected beside measured steps, as a picture."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.figure import Figure

from fusionlayer.cli import drawing

from .validate import Comparison

__all__ = ["draw"]


def draw(compared: Sequence[Comparison]) -> Figure:
    """Return a panel for each network: a pair of bars for each method, on a logarithmic axis."""
    networks = list(dict.fromkeys(each.network for each in compared))
    most = max(sum(each.network == network for each in compared) for network in networks)
    figure = drawing.figure(max(6.8, 3.8 * len(networks)), 1.2 + 0.42 * most)
    for axes, network in zip(figure.subplots(1, len(networks), squeeze=False)[0], networks, strict=True):
        shown = [each for each in compared if each.network == network]
        for place, each in enumerate(shown):
            axes.barh(place - 0.2, each.measured, 0.4, color=drawing.GREY, label="measured" if not place else None)
            colour = drawing.PALETTE[0]
            axes.barh(place + 0.2, each.projected, 0.4, color=colour, label="projected" if not place else None)
            axes.annotate(f" {each.error:+.0%}", (max(each.measured, each.projected), place), va="center")
        axes.set_yticks(range(len(shown)), [each.cell["method"] for each in shown])
        axes.set(title=network, xlabel="seconds of a step", xscale="log")
        axes.set_xlim(right=2 * max(max(each.measured, each.projected) for each in shown))
        axes.invert_yaxis()
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2)
    return figure
