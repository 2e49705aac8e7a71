"""The definition of a long wait in this job: far longer than its steps have taken."""

from __future__ import annotations

from collections.abc import Mapping

# A wait is long if it lasts this many times the second longest one; a single long wait is not yet usual.
_TIMES = 3.0
# The share of it that remains after a second, so that old observations fade.
_MEMORY = 0.9997
# Seconds without progress from which on a rank writes more often where it is.
_STILL = 2.5


class UsualWait:
    """Notes when calls begin and end, and how long it usually takes until the next one does."""

    def __init__(self, patience: float) -> None:
        self._patience = patience
        self._calls: Mapping[str, tuple[int, int]] = {}
        self._since: float | None = None
        self._longest = (0.0, 0.0)
        self.is_still = False

    def note(self, now: float, calls: Mapping[str, tuple[int, int]]) -> bool:
        """Note the position of each channel; return whether any has changed."""
        moved = calls != self._calls
        if self._since is None:
            self._since = now
        if moved:
            first, second = (each * _MEMORY for each in self._longest)
            gap = now - self._since
            self._longest = (max(first, gap), max(second, min(first, gap)))
            self._calls, self._since = calls, now
        self.is_still = now - self._since > _STILL
        return moved

    def idle(self, now: float) -> float:
        """Return the seconds without progress."""
        return 0.0 if self._since is None else now - self._since

    def is_long(self, now: float) -> bool:
        """Return whether this rank has seen no progress for longer than is usual."""
        return self.idle(now) > max(self._patience, _TIMES * self._longest[1])
