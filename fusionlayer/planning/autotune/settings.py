"""The user's settings for autotuning."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ... import records
from ...errors import ConfigError

__all__ = ["Autotune"]


@dataclass(frozen=True)
class Autotune:
    """Settings of the online search over numbers and sizes of buckets.

    Attributes:
        steps: search during the first so many steps only; then the best plan stays, and nothing is measured. None: stay
            on, and look every 100 steps.
        drift: begin another search when the step time stays off its level after the last search by more than this
            share.
        every: begin another search so many steps after the last one in any case; None: only when step time drifts.
        log: CSV file for every plan that is tried and its score; rank 0 writes it.

    Raises:
        ConfigError: a value has the wrong type or is out of range.
    """

    steps: int | None = None
    drift: float = 0.1
    every: int | None = None
    log: str | None = None

    def __post_init__(self) -> None:
        records.check(self)
        for name in ("steps", "every"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ConfigError(f"{name}={value}; expected a whole number of steps above 0, or null")
        if not self.drift > 0:
            raise ConfigError(f"drift={self.drift!r}; expected a share of the step time above 0, such as 0.1")

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> Autotune:
        """Return the settings with these ``options``; ``ConfigError`` if one is unknown."""
        return records.build(cls, options, "autotune")
