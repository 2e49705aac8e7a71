"""Writes results: paths are checked before measuring, and a failed write keeps the measurements."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from ..base.errors import FusionLayerError
from .spawn import RANKS_PREFIX

Write = Callable[[Path], object]


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
    except OSError as error:
        return None, f"nor can the temporary folder: {error}"
    return place, f"the result is in {place}"
