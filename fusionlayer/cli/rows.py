"""Rows of ``fusionlayer bench collectives``: as a table, CSV, JSON, and for a picture."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields

from .. import __version__
from .tables import Column, Table, layout
from .units import MEMORY, RATES, SECONDS, in_one_unit


@dataclass(frozen=True)
class Row:
    """One row: one collective with one codec at one size. ``--help`` explains the columns."""

    collective: str
    codec: str
    algorithm: str
    dtype: str
    ranks: int
    size: int
    calls: int
    time_s: float
    min_s: float
    max_s: float
    algbw_gb_s: float
    busbw_gb_s: float
    effbw_gb_s: float
    sent_bytes: int
    ratio: float


def _as_json(rows: Sequence[Row], columns: Sequence[str] | None, width: int | None) -> str:
    from ..planning.profiler.machine import describe_machine  # needs torch, and ``--help`` needs this module

    environment = {**describe_machine(), "fusionlayer": __version__}
    return json.dumps({"environment": environment, "rows": [asdict(row) for row in rows]}, indent=2) + "\n"


def _as_csv(rows: Sequence[Row], columns: Sequence[str] | None, width: int | None) -> str:
    text = io.StringIO()
    sheet = csv.DictWriter(text, [field.name for field in fields(Row)])
    sheet.writeheader()
    sheet.writerows(asdict(row) for row in rows)
    return text.getvalue()


def _as_text(rows: Sequence[Row], columns: Sequence[str] | None, width: int | None) -> str:
    return layout([table(rows)], columns, width)


FORMATS: dict[str, Callable[[Sequence[Row], Sequence[str] | None, int | None], str]] = {
    "text": _as_text,
    "csv": _as_csv,
    "json": _as_json,
}
"""For each format the function that makes the text of rows, chosen columns and width; the last two are for tables."""


def title(rows: Sequence[Row]) -> str:
    """Return the common properties of all rows."""
    return f"{rows[0].ranks} ranks, {rows[0].dtype}" if rows else "no rows"


def table(rows: Sequence[Row]) -> Table:
    """Return the rows with one unit for all times, and one for all bandwidths."""
    volume, (size,) = in_one_unit(MEMORY, [row.size for row in rows])
    unit, times = in_one_unit(
        SECONDS, *([getattr(row, f"{name}_s") for row in rows] for name in ("time", "min", "max"))
    )
    names = ("algbw", "busbw", "effbw")
    rate, bandwidths = in_one_unit(RATES, *([1e9 * getattr(row, f"{name}_gb_s") for row in rows] for name in names))
    columns = [
        Column("collective", [row.collective for row in rows], text=True),
        Column("codec", [row.codec for row in rows], text=True),
        Column("algorithm", [row.algorithm for row in rows], text=True),
        Column("size", size, volume),
        Column("time", times[0], unit),
        Column("min", times[1], unit, gives_way=2),
        Column("max", times[2], unit, gives_way=2),
        *(
            Column(name, cells, rate, gives_way=int(name == "algbw"))
            for name, cells in zip(names, bandwidths, strict=True)
        ),
        Column("ratio", [f"{row.ratio:.2f}" for row in rows], "x"),
    ]
    return Table(title(rows), columns)
