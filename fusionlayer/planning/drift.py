"""Detects that steps take other times than when their plan was new."""

from __future__ import annotations

from dataclasses import astuple, dataclass, fields

_LEAST_SHARE = 0.1


@dataclass(frozen=True)
class TypicalStep:
    """Seconds of a typical step: medians over steps, means over ranks.

    Attributes:
        backward: without the encoding during it.
        communication: the seconds of all buckets on their lanes.
        waiting: for results.
    """

    backward: float
    communication: float
    waiting: float


class Drift:
    """Compares each sample with the first one, and reports drift when one time deviates in several samples in a row.

    The reference is measured, not predicted. A prediction assumes one communication thread and a core for each thread,
    so it may be off from the first step on, and planning again would not help.

    Args:
        tolerance: the permitted change of a time, as a share of the reference. A time below a tenth of backward and
            waiting counts as such a tenth.
        looks: number of consecutive deviating samples.

    Attributes:
        reference: the first look.
    """

    def __init__(self, tolerance: float, looks: int) -> None:
        self._tolerance = tolerance
        self._looks = looks
        self.reference: TypicalStep | None = None
        self._off: dict[str, int] = {}

    def look(self, pace: TypicalStep) -> str | None:
        """Take a sample; return the drifted time, in words, or None."""
        if self.reference is None:
            self.reference = pace
            return None
        least = _LEAST_SHARE * (self.reference.backward + self.reference.waiting)
        for field, was, now in zip(fields(TypicalStep), astuple(self.reference), astuple(pace), strict=True):
            off = abs(now - was) > self._tolerance * max(was, least)
            self._off[field.name] = self._off.get(field.name, 0) + 1 if off else 0
            if self._off[field.name] >= self._looks:
                return f"{field.name} takes {now * 1e3:.2f} ms, {was * 1e3:.2f} ms when this plan was new"
        return None
