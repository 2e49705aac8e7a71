"""Pieces of Markdown for the pages that are made from code."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

__all__ = ["as_code", "as_page", "table"]


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return a table of Markdown; a bar within a cell is no border."""
    return [
        f"| {' | '.join(head)} |",
        "|---" * len(head) + "|",
        *(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in rows),
    ]


def as_code(names: Iterable[str]) -> str:
    """Return "`a`, `b`"."""
    return ", ".join(f"`{name}`" for name in names)


def as_page(*lines: str | list[str]) -> str:
    """Return a page of these paragraphs, headings and tables."""
    return "\n\n".join("\n".join(part) if isinstance(part, list) else part for part in lines) + "\n"
