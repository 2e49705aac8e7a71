"""The alpha-beta model: seconds of a call as a line over its size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..base.errors import ConfigError

__all__ = ["AlphaBeta"]


@dataclass(frozen=True)
class AlphaBeta:
    """Seconds of a call by its size: ``alpha + beta * size``, and 0 for size 0.

    Attributes:
        alpha: seconds of a call, whatever its size.
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
