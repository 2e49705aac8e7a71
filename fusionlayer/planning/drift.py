"""Whether steps have become other than those that a plan was made for."""

from __future__ import annotations

from dataclasses import astuple, dataclass, fields

__all__ = ["Drift", "Pace"]

_LEAST_SHARE = 0.1


@dataclass(frozen=True)
class Pace:
    """What steps take in the middle, means over ranks, in seconds.

    Attributes:
        backward: what is encoded in it left out.
        communication: of all buckets on their lanes.
        waiting: for results.
    """

    backward: float
    communication: float
    waiting: float


class Drift:
    """Compares looks at the pace with the first one; says yes when several in a row are off, in the same thing.

    A plan follows from how long backward and communication take. A prediction of them is no reference: it knows one
    communication thread and nothing of what threads take from each other, so it may be off from the first step on, and
    planning again would not help.

    Args:
        tolerance: part of the reference by which a time may change. What is short beside the rest, less than a tenth
            of backward and waiting, counts as such a tenth.
        looks: how many in a row must be off.

    Attributes:
        reference: the first look.
    """

    def __init__(self, tolerance: float, looks: int) -> None:
        self._tolerance = tolerance
        self._looks = looks
        self.reference: Pace | None = None
        self._off: dict[str, int] = {}

    def look(self, pace: Pace) -> str | None:
        """Take a look; return what has drifted, in words, if something has."""
        if self.reference is None:
            self.reference = pace
            return None
        least = _LEAST_SHARE * (self.reference.backward + self.reference.waiting)
        for field, was, now in zip(fields(Pace), astuple(self.reference), astuple(pace), strict=True):
            off = abs(now - was) > self._tolerance * max(was, least)
            self._off[field.name] = self._off.get(field.name, 0) + 1 if off else 0
            if self._off[field.name] >= self._looks:
                return f"{field.name} takes {now * 1e3:.2f} ms, {was * 1e3:.2f} ms when this plan was new"
        return None
