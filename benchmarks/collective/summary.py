"""From what the workers measured to a table that can be read."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from .cell import Cell, Row, in_words
from .operations import YARDSTICK

__all__ = ["cpu_per_gigabyte", "summarize", "wire_share"]


def summarize(cell: Cell, rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return a line of the table for each of the cell's ``rows``."""
    named = {(row.size, row.name): row for row in rows}
    return [_line(cell, row, named.get((row.size, row.against or YARDSTICK))) for row in rows]


def _line(cell: Cell, row: Row, yardstick: Row | None) -> dict[str, Any]:
    seconds = statistics.median(row.seconds)
    speed = row.size / seconds / 1e6
    share = wire_share(cell, row)
    compared = yardstick if yardstick is not row and yardstick and row.bus_factor == yardstick.bus_factor else None
    return {
        "network": cell.network,
        "workers": cell.world,
        "size": in_words(row.size),
        "operation": row.name,
        "ms": f"{seconds * 1e3:.2f}",
        "min..max": f"{min(row.seconds) * 1e3:.2f}..{max(row.seconds) * 1e3:.2f}",
        "times as fast": _ratios(row, compared) if compared else "",
        "sent, KB": f"{statistics.median(row.sent) / 1024:.1f}",
        "of the wire": "" if share is None else f"{100 * share:.0f} %",
        "algbw, MB/s": f"{speed:.1f}",
        "busbw, MB/s": f"{speed * row.bus_factor:.1f}",
        "CPU, ms": f"{statistics.median(row.cpu_seconds) * 1e3:.2f}",
        "CPU, s per GB sent": f"{cpu:.2f}" if (cpu := cpu_per_gigabyte(row)) is not None else "",
    }


def wire_share(cell: Cell, row: Row) -> float | None:
    """Return the time that the link needs for the bytes sent, as a share of the time taken; None without a rate.

    The bytes are those that the device counted, headers included, so the link's full rate is what they are held to.
    """
    rate = cell.lab().bits_per_second
    if rate is None:
        return None
    bounds = [8 * sent / rate for sent in row.sent]
    return statistics.median(bound / seconds for bound, seconds in zip(bounds, row.seconds, strict=True))


def cpu_per_gigabyte(row: Row) -> float | None:
    """Return the CPU seconds of a worker for 1e9 bytes that its host sends; None where bytes cannot be counted."""
    sent = sum(row.sent)
    return 1e9 * sum(row.cpu_seconds) / sent if sent else None


def _ratios(row: Row, yardstick: Row) -> str:
    ratios = [theirs / ours for theirs, ours in zip(yardstick.seconds, row.seconds, strict=False)]
    return f"{statistics.median(ratios):.2f} [{min(ratios):.2f}..{max(ratios):.2f}]"
