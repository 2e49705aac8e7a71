"""Numbers for people: times, bytes and rates, in one unit for all the numbers that a reader compares."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0}
BYTES = {"B": 1.0, "kB": 1e3, "MB": 1e6, "GB": 1e9}
"""Bytes that are sent."""
MEMORY = {"B": 1.0, "KiB": 1024.0, "MiB": 1024.0**2, "GiB": 1024.0**3}
"""Sizes of tensors and messages that grow by powers of two."""
RATES = {"kbit/s": 1e3 / 8, "Mbit/s": 1e6 / 8, "GB/s": 1e9}
"""Bytes per second: slow networks are sold by the bit, fast ones are compared by the byte."""


def in_one_unit(ladder: Mapping[str, float], *columns: Sequence[float | None]) -> tuple[str, list[list[str]]]:
    """Return a unit of ``ladder``, and the numbers of all ``columns`` in it, each with as many decimals.

    The unit is the largest in which a typical number is at least 1. None becomes an empty text.
    """
    unit = unit_for(ladder, [value for column in columns for value in column if value is not None])
    scaled = [[None if value is None else value / ladder[unit] for value in column] for column in columns]
    decimals = _decimals([value for column in scaled for value in column if value is not None])
    return unit, [["" if value is None else f"{value:.{decimals}f}" for value in column] for column in scaled]


def in_words(value: float, ladder: Mapping[str, float]) -> str:
    """Return one number with its unit, such as "1.50 MB"."""
    unit, ((number,),) = in_one_unit(ladder, [value])
    return f"{number} {unit}"


def unit_for(ladder: Mapping[str, float], values: Sequence[float]) -> str:
    """Return the largest unit in which the median of ``values`` is at least 1; zeros do not count."""
    sizes = [abs(value) for value in values if value]
    names = list(ladder)
    if not sizes:
        return names[0]
    typical = statistics.median(sizes)
    return [names[0], *(name for name in names[1:] if typical >= 0.9995 * ladder[name])][-1]


def _decimals(values: Sequence[float]) -> int:
    """Return how many decimals show three digits of a typical number and two of the smallest.

    They are 2 at most, and fewer where the largest number would have more than five digits.
    """
    sizes = [abs(value) for value in values if value and math.isfinite(value)]
    if not sizes or all(value == int(value) for value in sizes):
        return 0
    wanted = (2 - _magnitude(statistics.median(sizes)), 1 - _magnitude(min(sizes)))
    return max(0, min(2, 4 - _magnitude(max(sizes)), max(wanted)))


def _magnitude(value: float) -> int:
    return math.floor(math.log10(value))
