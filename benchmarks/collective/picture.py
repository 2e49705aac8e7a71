"""The share of a link that functions fill, as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from benchmarks import drawing

from .cell import Cell, Row, in_words
from .summary import wire_share

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["draw_shares"]


def draw_shares(measured: Sequence[tuple[Cell, Sequence[Row]]]) -> Figure:
    """Return a panel for each link: bars for each call of the longest messages, by what they travelled over.

    Args:
        measured: links and what was measured on each; cells without a rate have no share and are left out.
    """
    panels = [(cell, rows) for cell, rows in measured if cell.lab().bits_per_second is not None]
    figure = drawing.figure(max(6.8, 3.6 * len(panels)), 3.6)
    for axes, (cell, rows) in zip(figure.subplots(1, len(panels), squeeze=False, sharey=True)[0], panels, strict=True):
        largest = max(row.size for row in rows)
        groups: dict[str, list[tuple[str, float]]] = {}
        for row in rows:
            share = wire_share(cell, row)
            if row.size == largest and share is not None and "again" not in row.operation:
                call, _, way = row.operation.partition(" over ")
                groups.setdefault(f"{call} {row.codec}".rstrip(), []).append((way, 100 * share))
        ways = list(dict.fromkeys(way for bars in groups.values() for way, _ in bars))
        height = 0.8 / max(len(bars) for bars in groups.values())
        for place, bars in enumerate(groups.values()):
            for number, (way, share) in enumerate(bars):
                colour = drawing.GREY if not way else drawing.PALETTE[ways.index(way) % len(drawing.PALETTE)]
                at = place + (number - (len(bars) - 1) / 2) * height
                axes.barh(at, share, height, color=colour)
                axes.text(share + 0.5, at, f"{share:.0f}", va="center", size=drawing.SIZE - 2)
        axes.set_yticks(range(len(groups)), list(groups))
        axes.set(title=f"{cell.network}, {in_words(largest)}", xlabel="% of the link", ylabel="call", xlim=(0, 100))
        axes.invert_yaxis()
        for number, way in enumerate(ways):
            if way:
                axes.bar(0, 0, color=drawing.PALETTE[number % len(drawing.PALETTE)], label=f"over {way}")
    handles, labels = figure.axes[-1].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=max(1, len(labels)))
    return figure
