"""A small canvas for the drawings of the documents: it writes SVG, the same bytes every time."""

from __future__ import annotations

from xml.sax.saxutils import escape

__all__ = ["COLOURS", "INK", "PALE", "Canvas"]

INK = "#1f2937"
SOFT = "#6b7280"
PALE = "#f3f4f6"
LINE = "#d1d5db"
# One colour for each kind of work, told apart by people who do not see red and green as well.
COLOURS = {
    "compute": "#9db8d9",
    "encode": "#f2b04c",
    "wire": "#2f7f86",
    "decode": "#c39bd3",
    "update": "#5b7fb5",
    "wait": "#e5e7eb",
}
FIXED = "'DejaVu Sans Mono', Menlo, Consolas, monospace"
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif"


class Canvas:
    """A picture on a white card, so that it reads alike on light and on dark pages.

    Args:
        width: of the picture in pixels.
        height: in pixels.
        title: what it shows, for those who cannot see it.
    """

    def __init__(self, width: int, height: int, title: str) -> None:
        self._lines = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
            f'role="img" font-family="{escape(FONT)}">',
            f"<title>{escape(title)}</title>",
            '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerUnits="userSpaceOnUse" markerWidth="10" '
            f'markerHeight="10" orient="auto"><path d="M0 0 L8 4 L0 8 z" fill="{SOFT}"/></marker></defs>',
        ]
        self.box(0.5, 0.5, width - 1, height - 1, "#ffffff", radius=10, edge=LINE)

    def box(
        self, x: float, y: float, width: float, height: float, fill: str, radius: float = 3, edge: str = "none"
    ) -> None:
        """Draw a rectangle with round corners."""
        self._lines.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{radius:g}" fill="{fill}" '
            f'stroke="{edge}"/>'
        )

    def text(
        self,
        x: float,
        y: float,
        words: str,
        size: float = 13,
        anchor: str = "start",
        colour: str = INK,
        bold: bool = False,
        fixed: bool = False,
    ) -> None:
        """Write one line; ``y`` is its base line; ``fixed``: all characters are equally wide, as in a terminal."""
        weight = ' font-weight="600"' if bold else ""
        if fixed:
            weight += f' font-family="{escape(FIXED)}"'
            words = words.replace(" ", "\N{NO-BREAK SPACE}")  # others are taken together
        self._lines.append(
            f'<text x="{x:g}" y="{y:g}" font-size="{size:g}" text-anchor="{anchor}" fill="{colour}"{weight}>'
            f"{escape(words)}</text>"
        )

    def label(self, x: float, y: float, width: float, height: float, words: str, size: float = 12) -> None:
        """Write one or several lines, parted by newlines, into the middle of a place."""
        lines = words.split("\n")
        top = y + height / 2 - (len(lines) - 1) * size * 0.62 + size * 0.35
        for number, line in enumerate(lines):
            self.text(x + width / 2, top + number * size * 1.24, line, size, "middle")

    def bar(
        self, x: float, y: float, width: float, height: float, kind: str, words: str = "", size: float = 11.5
    ) -> None:
        """Draw a span of time in the colour of its kind of work."""
        self.box(x, y, width, height, COLOURS[kind], edge="#ffffff")
        if words:
            colour = "#ffffff" if kind in ("wire", "update") else INK
            self.text(x + width / 2, y + height / 2 + 4, words, size, "middle", colour)

    def arrow(self, x1: float, y1: float, x2: float, y2: float, width: float = 1.5, dash: bool = False) -> None:
        """Draw an arrow from the first point to the second."""
        dashes = ' stroke-dasharray="4 4"' if dash else ""
        self._lines.append(
            f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" stroke="{SOFT}" stroke-width="{width:g}" '
            f'marker-end="url(#tip)"{dashes}/>'
        )

    def line(self, x1: float, y1: float, x2: float, y2: float, dash: bool = False) -> None:
        """Draw a thin line."""
        dashes = ' stroke-dasharray="3 3"' if dash else ""
        self._lines.append(f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" stroke="{SOFT}"{dashes}/>')

    def legend(self, x: float, y: float, kinds: dict[str, str]) -> None:
        """Name colours in one line; ``kinds``: a kind of work, and its words."""
        for kind, words in kinds.items():
            self.box(x, y - 10, 12, 12, COLOURS[kind])
            self.text(x + 17, y, words, 12)
            x += 17 + 7.0 * len(words) + 22

    def svg(self) -> str:
        """Return the file."""
        return "\n".join([*self._lines, "</svg>", ""])
