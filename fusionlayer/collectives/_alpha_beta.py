"""The alpha-beta model: seconds of a call as a line over its size, and of a collective in two forms."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ..base.errors import ConfigError


@dataclass(frozen=True)
class AlphaBeta:
    """Seconds of a call by its size: ``alpha + beta * size``, and 0 for size 0.

    Attributes:
        alpha: seconds of a call, regardless of its size.
        beta: seconds per unit of size.
    """

    alpha: float
    beta: float

    def __post_init__(self) -> None:
        if not (0 <= self.alpha < float("inf") and 0 <= self.beta < float("inf")):
            raise ConfigError(f"alpha={self.alpha!r}, beta={self.beta!r}; expected seconds of at least 0 for both")

    def __call__(self, size: float) -> float:
        """Return the seconds of a call of ``size``."""
        return self.alpha + self.beta * size if size > 0 else 0.0

    @classmethod
    def through(cls, points: Sequence[tuple[float, float]]) -> AlphaBeta:
        """Return the line through (size, seconds) with the least sum of squared relative errors.

        Neither alpha nor beta is negative.
        """
        weights = [1 / y**2 for _, y in points]
        total = sum(weights)
        mean_x = sum(w * x for w, (x, _) in zip(weights, points, strict=True)) / total
        mean_y = sum(w * y for w, (_, y) in zip(weights, points, strict=True)) / total
        spread = sum(w * (x - mean_x) ** 2 for w, (x, _) in zip(weights, points, strict=True))
        along = sum(w * (x - mean_x) * (y - mean_y) for w, (x, y) in zip(weights, points, strict=True))
        beta = max(0.0, along / spread) if spread else 0.0
        if mean_y - beta * mean_x < 0:
            squares = sum(w * x * x for w, (x, _) in zip(weights, points, strict=True))
            return cls(0.0, sum(w * x * y for w, (x, y) in zip(weights, points, strict=True)) / squares)
        return cls(mean_y - beta * mean_x, beta)


@dataclass(frozen=True)
class Costs:
    """The time of a collective in both forms, where d is the bytes that a rank sends in the native form.

    Native: T(d) = alpha + beta d (equation 6). Zipped: T(d) = alpha + beta e s d + codec s d (equation 7, plus encoding
    and decoding). s is the precision factor, below 1 if the native form sends wider elements.

    Attributes:
        native: seconds by bytes that are sent.
        zipped: seconds by bytes that are sent.
        factor: e, the share of bytes that is left after encoding.
        codec: seconds of encoding and decoding for each byte before encoding.
    """

    native: AlphaBeta
    zipped: AlphaBeta
    factor: float
    codec: float = 0.0

    def seconds(self, nbytes: float, precision: float = 1.0) -> tuple[float, float]:
        """Return the seconds of the native and of the zipped form for ``nbytes`` in the native form."""
        elements = precision * nbytes
        return self.native(nbytes), self.zipped(self.factor * elements) + self.codec * elements

    def zips_from(self, precision: float = 1.0) -> float:
        """Return the size in bytes from which on the zipped form takes less time; infinite if it never does."""
        gained = self.native.beta - precision * (self.factor * self.zipped.beta + self.codec)
        paid = self.zipped.alpha - self.native.alpha
        return math.inf if gained <= 0 else max(0.0, paid / gained)


def describe(costs: Costs, precision: float = 1.0) -> str:
    """Return text with the figures of equations 6 and 7, and the size from which on the zipped form is faster."""
    threshold = costs.zips_from(precision)
    where = "never zipped" if threshold == math.inf else f"zipped from {threshold / 1e3:.1f} kB on"
    return (
        f"native {_line(costs.native)}; zipped {_line(costs.zipped)} of {costs.factor:.3f} of the bytes"
        f"{f', codec {1e9 * costs.codec:.3f} ns per byte' if costs.codec else ''}: {where}"
    )


def _line(line: AlphaBeta) -> str:
    return f"{1e3 * line.alpha:.3f} ms + {1e9 * line.beta:.3f} ns per byte"
