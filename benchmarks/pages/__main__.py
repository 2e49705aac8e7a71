"""Write anew what README and docs show of the result files in benchmarks/results; nothing is measured.

    python -m benchmarks.pages

Tables, pictures, and the losses by which ``fusionlayer plan`` chooses are written. Figures in sentences are only
compared: those that differ from their result, and those that neither have one nor a reason in
``benchmarks/pages/figures.yaml``, are printed. The exit status is 1 if there are.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from benchmarks import drawing
from benchmarks.pages import figures, tables
from benchmarks.pages.found import ROOT


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.pages", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", metavar="PICTURE", help="draw these pictures alone, such as headline")
    parser.add_argument("--no-pictures", action="store_true", help="leave the pictures as they are")
    options = parser.parse_args(arguments)
    wrong, known = [], figures.read()
    for page, text in figures.texts().items():
        filled = tables.fill(text)
        if filled != text:
            (ROOT / page).write_text(filled)
            print(page)
        wrong += figures.problems(page, filled, known)
    wrong += figures.strays(known)
    _write_losses()
    if not options.no_pictures:
        _draw(options.only)
    print(*wrong, sep="\n", end="\n" if wrong else "", file=sys.stderr)
    return 1 if wrong else 0


def _write_losses() -> None:
    from benchmarks.pages import losses  # with torch, which tables do not need

    table = losses.page()
    if losses.PAGE.read_text() != table:
        losses.PAGE.write_text(table)
        print(losses.PAGE.relative_to(ROOT))


def _draw(only: Sequence[str] | None) -> None:
    from benchmarks.pages.pictures import FOLDER, PICTURES  # with torch and matplotlib, which tables do not need

    if unknown := sorted({*(only or ())} - {*PICTURES}):
        raise SystemExit(f"--only {' '.join(unknown)}: no such picture; there are {', '.join(PICTURES)}")
    for name, draw in PICTURES.items():
        if only is None or name in only:
            with drawing.style():
                figure = draw()
                drawing.save(figure, FOLDER / f"{name}.svg")
                if name == "headline":  # also the card of links to the site, 1200 x 630
                    figure.set_size_inches(7.5, 3.9375)
                    figure.savefig(ROOT / "docs/site/card.png", dpi=160)


if __name__ == "__main__":
    sys.exit(main())
