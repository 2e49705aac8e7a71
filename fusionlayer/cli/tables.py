"""Tables: by rich if it is installed and the output is a terminal, else in plain text."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence

__all__ = ["plain_table", "print_table"]


def plain_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> str:
    """Return a table as text; ``right`` are the columns that hold numbers."""
    lines = [columns, *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(columns))]

    def line(cells: Sequence[str]) -> str:
        padded = [
            cell.rjust(width) if i in right else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ]
        return "  ".join(padded).rstrip()

    return "\n".join([title, "", line(columns), "  ".join("-" * width for width in widths), *map(line, rows)])


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> None:
    """Print a table and an empty line."""
    if not sys.stdout.isatty() or importlib.util.find_spec("rich") is None:
        print(plain_table(title, columns, rows, right), end="\n\n")
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table()
    for i, column in enumerate(columns):
        table.add_column(Text(column), justify="right" if i in right else "left")
    for row in rows:
        table.add_row(*map(Text, row))
    Console().print(Text(title), table, "")
