"""Types of command-line arguments that more than one benchmark has."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from typing import TypeVar

__all__ = ["comma_separated", "count", "one_of", "positive"]

T = TypeVar("T")


def comma_separated(parse: Callable[[str], T]) -> Callable[[str], tuple[T, ...]]:
    """Return the type of a list whose entries are read by ``parse``; it may not be empty."""
    return lambda text: tuple(parse(part) for part in text.split(","))


def count(least: int = 1, most: int | None = None) -> Callable[[str], int]:
    """Return the type of a whole number from ``least`` to ``most``."""

    def parse(text: str) -> int:
        if not text.isdecimal() or int(text) < least or (most is not None and int(text) > most):
            limits = f"of at least {least}" if most is None else f"from {least} to {most}"
            raise argparse.ArgumentTypeError(f"{text!r}; expected a whole number {limits}")
        return int(text)

    return parse


def one_of(known: Sequence[str]) -> Callable[[str], str]:
    """Return the type of a name that must be among ``known``."""

    def parse(text: str) -> str:
        if text not in known:
            raise argparse.ArgumentTypeError(f"{text!r} is not known; choose from {', '.join(known)}")
        return text

    return parse


def positive(text: str) -> float:
    """Return a positive number, or refuse the argument."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r}; expected a positive number")
    return value
