"""Projected beside measured steps, as a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fusionlayer.cli import drawing

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["draw"]


def draw(rows: Sequence[Mapping[str, Any]]) -> Figure:
    """Return a panel for each network: a pair of bars for each method, on a logarithmic axis.

    Args:
        rows: of ``Comparison.row``.
    """
    networks = list(dict.fromkeys(map(_network, rows)))
    most = max(sum(_network(row) == network for row in rows) for network in networks)
    figure = drawing.figure(max(6.8, 3.8 * len(networks)), 1.2 + 0.42 * most)
    for axes, network in zip(figure.subplots(1, len(networks), squeeze=False)[0], networks, strict=True):
        shown = [row for row in rows if _network(row) == network]
        for offset, word, colour in ((-0.2, "measured", drawing.GREY), (0.2, "projected", drawing.PALETTE[0])):
            places = [place + offset for place in range(len(shown))]
            axes.barh(places, [row[f"{word} ms"] / 1e3 for row in shown], 0.4, color=colour, label=word)
        longest = [max(row["measured ms"], row["projected ms"]) / 1e3 for row in shown]
        for place, (row, end) in enumerate(zip(shown, longest, strict=True)):
            axes.annotate(f" {row['error']}", (end, place), va="center")
        axes.set_yticks(range(len(shown)), [row["method"] for row in shown])
        axes.set(title=network, xlabel="seconds of a step", xscale="log")
        axes.set_xlim(right=3 * max(longest))
        axes.invert_yaxis()
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2)
    return figure


def _network(row: Mapping[str, Any]) -> str:
    way = f", {row['rtt, ms']} ms, {row['lost']:.3g} lost, {row['congestion']}" if "rtt, ms" in row else ""
    return f"{row['rate']}{way}"
