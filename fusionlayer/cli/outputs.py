"""Writes results: paths are checked before measuring, and a failed write keeps the measurements."""

from __future__ import annotations

import os
import sys
import tempfile
from argparse import ArgumentParser
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from ..base.errors import ConfigError, FusionLayerError
from . import drawing
from .arguments import check_file
from .spawn import RANKS_PREFIX

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PICTURES = (".png", ".svg", ".pdf")
_WORDS = ", ".join(PICTURES[:-1]) + f" or {PICTURES[-1]}"

Write = Callable[[Path], object]


def add_plot(parser: ArgumentParser, what: str) -> None:
    """Add the option ``--plot`` for a picture of ``what``."""
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help=f"draw {what}, as {_WORDS}")


def check_picture(path: Path, flag: str = "--plot") -> None:
    """Raise ``ConfigError`` unless a picture can be drawn into this file, before work is done for it."""
    if path.suffix not in PICTURES:
        raise ConfigError(f"{flag} {path}: pictures are {_WORDS}; name such a file")
    if find_spec("matplotlib") is None:
        raise ConfigError(f'{flag} needs matplotlib, which is not installed: pip install "fusionlayer[bench]"')
    check_file(path, flag)


def keep(path: Path, write: Write, flag: str) -> None:
    """Let ``write`` make a file of text. If that fails, print the text, and write it into the temporary folder.

    Raises:
        FusionLayerError: the file is not where it was wanted. The message says why, and where it is.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write(path)
    except OSError as error:
        place, where = _rescue(path, write)
        if place is not None:
            _print(place.read_text())
        raise FusionLayerError(f"{flag} {path} cannot be written: {error.strerror}; {where}") from error


def keep_picture(path: Path, draw: Callable[[], Figure], flag: str = "--plot") -> None:
    """Draw a picture into a file, in the common style, and print the file's name.

    Raises:
        FusionLayerError: the file cannot be written. The message says why, and where the picture is.
    """

    def write(place: Path) -> None:
        with drawing.style():
            drawing.save(draw(), place)

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write(path)
    except (OSError, ConfigError) as error:
        raise FusionLayerError(f"{flag}: {error}; {_rescue(path, write)[1]}") from error
    print(path)


def tell(text: str, name: str) -> None:
    """Print a result. If standard output cannot take it, write it into a file ``name`` of the temporary folder.

    Raises:
        FusionLayerError: it could not be printed. The message says why, and where the result is.
        BrokenPipeError: the reader wants no more.
    """
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        drop_output()
        _, where = _rescue(Path(name), lambda place: place.write_text(text))
        raise FusionLayerError(f"standard output cannot be written: {error.strerror}; {where}") from error


def drop_output() -> None:
    """Discard the remaining output: Python flushes at its end, and would fail once more."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.__stdout__.fileno() if sys.__stdout__ else 1)


def _print(text: str) -> None:
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except OSError:
        drop_output()


def _rescue(path: Path, write: Write) -> tuple[Path | None, str]:
    """Let ``write`` make a file of this name in the temporary folder; return its path, and a text that names it."""
    folder = Path(tempfile.gettempdir())
    if folder.name.startswith(RANKS_PREFIX):  # that of ranks goes with them
        folder = folder.parent
    try:
        place = Path(tempfile.mkdtemp(prefix="fusionlayer-", dir=folder)) / path.name
        write(place)
    except (OSError, ConfigError) as error:
        return None, f"nor can the temporary folder: {error}"
    return place, f"the result is in {place}"
