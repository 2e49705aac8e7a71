"""Tables in plain text. They fit the terminal: less important columns are left out, and no number is ever cut."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

from ..base.errors import printable
from .arguments import some_of

_ALL = "all"
_GAP = 2
_NARROWEST = 24
"""Characters that a column of text keeps while less important columns can be left out."""


@dataclass(frozen=True)
class Column:
    """A column of a table.

    Attributes:
        name: its header.
        cells: a text for each row.
        unit: the unit of its numbers; it stands below the header.
        text: the cells are words and begin at the left; numbers end at the right.
        gives_way: 0 if the column must be shown; where a table is too wide, the column with the largest number goes
            first.
        wraps: long cells continue in the next line. Only the last column may.
    """

    name: str
    cells: Sequence[str]
    unit: str = ""
    text: bool = False
    gives_way: int = 0
    wraps: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "cells", [printable(cell) for cell in self.cells])  # they may be of files or peers

    @property
    def width(self) -> int:
        """Characters of the longest cell."""
        return max(map(len, (self.name, self.unit, *self.cells)))


@dataclass(frozen=True)
class Table:
    """A title above columns, all with equally many cells."""

    title: str
    columns: Sequence[Column]

    def only(self, chosen: Sequence[str]) -> Table:
        """Return the table with the columns of these names, in its own order."""
        return Table(self.title, [column for column in self.columns if column.name in chosen])

    def format(self, width: int | None = None) -> str:
        """Return the table in lines of at most ``width`` characters, if that can be without cutting; None: any."""
        kept, dropped = _fit(self.columns, width)
        widths = [column.width for column in kept]
        if width is not None and kept and kept[-1].wraps:
            widths[-1] = min(widths[-1], max(_NARROWEST, width - sum(widths[:-1]) - _GAP * len(widths[:-1])))
        heads = [[column.name for column in kept]]
        if any(column.unit for column in kept):
            heads.append([column.unit for column in kept])
        rows = list(zip(*(column.cells for column in kept), strict=True))
        lines = [*heads, ["-" * wide for wide in widths], *(part for row in rows for part in _split(row, kept, widths))]
        text = [*_fill(printable(self.title), width), "", *(_line(line, kept, widths) for line in lines)]
        if dropped:
            text += _fill(f"(no room for {', '.join(dropped)}; --columns all shows everything)", width)
        return "\n".join(text)


def screen_width() -> int | None:
    """Return how many columns the output has: as COLUMNS says, or else the terminal; None for a pipe or a file."""
    given = os.environ.get("COLUMNS", "")
    if given.isdecimal() and int(given):
        return int(given)
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def add_columns(parser: argparse.ArgumentParser, known: Sequence[str]) -> None:
    """Add the option that chooses columns of the printed tables, which have columns of these names."""
    parser.add_argument(
        "--columns",
        type=some_of("column", [*known, _ALL]),
        metavar="NAME,NAME",
        help="table columns, or all (default: those that fit the terminal or COLUMNS; all in pipes)",
    )


def show(tables: Sequence[Table], chosen: Sequence[str] | None = None) -> None:
    """Print tables as ``layout`` makes them."""
    sys.stdout.write(layout(tables, chosen, screen_width()))


def layout(tables: Sequence[Table], chosen: Sequence[str] | None, width: int | None) -> str:
    """Return tables, each followed by an empty line.

    Args:
        tables: in their order. A row without any of the chosen columns is left out.
        chosen: names of columns, or "all", whatever room there is; None: what fits.
        width: characters of a line; None: any.
    """
    if chosen is not None and _ALL not in chosen:
        tables = [part for part in (table.only(chosen) for table in tables) if part.columns]
    return "".join(table.format(width if chosen is None else None) + "\n\n" for table in tables)


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> None:
    """Print a table of rows and an empty line; ``right`` are the columns that hold numbers."""
    show([Table(title, [Column(name, [r[i] for r in rows], text=i not in right) for i, name in enumerate(columns)])])


def print_text(text: str) -> None:
    """Print a paragraph in lines that fit the terminal."""
    print("\n".join(_fill(printable(text), screen_width())))


def _fit(columns: Sequence[Column], width: int | None) -> tuple[list[Column], list[str]]:
    """Return the columns that there is room for, and the names of the others."""
    kept = list(columns)
    while width is not None and _narrowest(kept) > width and (loose := [c for c in kept if c.gives_way]):
        kept.remove(max(loose, key=lambda column: column.gives_way))
    return kept, [column.name for column in columns if column not in kept]


def _narrowest(columns: Sequence[Column]) -> int:
    widths = [min(column.width, _NARROWEST) if column.wraps else column.width for column in columns]
    return sum(widths) + _GAP * (len(widths) - 1)


def _split(row: Sequence[str], columns: Sequence[Column], widths: Sequence[int]) -> list[list[str]]:
    """Return the lines of a row; further lines hold the rest of the last cell."""
    if not columns[-1].wraps:
        return [list(row)]
    first, *more = _fill(row[-1], widths[-1]) or [""]
    return [[*row[:-1], first], *([*("" for _ in row[:-1]), part] for part in more)]


def _line(cells: Sequence[str], columns: Sequence[Column], widths: Sequence[int]) -> str:
    padded = [
        cell.ljust(width) if column.text else cell.rjust(width)
        for cell, column, width in zip(cells, columns, widths, strict=True)
    ]
    return (" " * _GAP).join(padded).rstrip()


def _fill(text: str, width: int | None) -> list[str]:
    """Return the lines of a text; words stay whole, however long they are."""
    if width is None or len(text) <= width:
        return [text] if text else []
    return textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False)
