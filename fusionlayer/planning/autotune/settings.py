"""What a user may say about autotuning."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from ...errors import ConfigError
from ...registry import nearest

__all__ = ["Autotune"]


@dataclass(frozen=True)
class Autotune:
    """How the online search over bucket counts and sizes goes about it.

    Attributes:
        steps: search during the first so many steps only; the best plan of those stays, and nothing is measured any
            more. None: left on, and training is looked at every 100 steps.
        drift: another search begins when the step time stays away from what it was after the last one by more than
            this share.
        every: another search begins so many steps after the last one anyway; None: only when step time drifts.
        log: CSV file for every plan that is tried and its score; rank 0 writes it.

    Raises:
        ConfigError: a value that has no meaning.
    """

    steps: int | None = None
    drift: float = 0.1
    every: int | None = None
    log: str | None = None

    def __post_init__(self) -> None:
        for name in ("steps", "every"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 1):
                raise ConfigError(f"autotune: {name}={value!r}; expected a whole number of steps above 0, or None")
        if isinstance(self.drift, bool) or not isinstance(self.drift, (int, float)) or not self.drift > 0:
            raise ConfigError(f"autotune: drift={self.drift!r}; expected a share of the step time above 0, such as 0.1")
        if self.log is not None and not isinstance(self.log, str):
            raise ConfigError(f"autotune: log={self.log!r}; expected the name of a file, or None")

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> Autotune:
        """Return the settings with these ``options``; ``ConfigError`` if one is unknown."""
        known = [f.name for f in fields(cls)]
        for key in options:
            if key not in known:
                raise ConfigError(f"autotune: unknown option {key!r}; {nearest(str(key), known)}")
        return cls(**options)
