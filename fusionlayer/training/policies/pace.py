"""How many local steps ranks make between two syncs with "auto": they agree on their measurements."""

from __future__ import annotations

import logging
import statistics
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from ...planning.local_steps import EveryRules, EveryState
from ...process.clock import Clock, Stamp
from .gradient_noise import NOTHING

_logger = logging.getLogger("fusionlayer")


class Pace:
    """The number of local steps between two syncs, for ``Local(every="auto")``.

    At each sync ranks exchange their measurements of the previous sync. Nothing else counts, so all ranks compute the
    same number.

    Args:
        clock: the clock of the parameters' device.
        rules: bounds, and when the number changes; None: the defaults.

    Attributes:
        state: has the present number, ``every``.
    """

    def __init__(self, clock: Clock, rules: EveryRules | None = None) -> None:
        self._clock = clock
        self._rules = rules or EveryRules()
        self.begin_anew()

    def begin_anew(self) -> None:
        """Begin with the smallest number."""
        self.state = EveryState(self._rules.least)
        self._began: Stamp = None
        self._left: Stamp = None
        self._arrived: Stamp = None

    def report(self, joined: bool) -> float:
        """Note that a sync begins; return the share of the time that this rank waited for the sync before.

        A rank that has ``joined`` only waits, so it reports nothing, and the number stays as it is.
        """
        waited = NOTHING if joined else self._waited()
        self._began, self._left, self._arrived = self._arrived, self._clock.stamp(), None
        return waited

    def arrive(self, drift: float, waited: Sequence[float], says: bool) -> None:
        """Note that a sync has arrived, and follow what all ranks have reported.

        Args:
            drift: divergence of ranks at the sync before.
            waited: what each rank reported.
            says: write to the log.
        """
        self._arrived = self._clock.stamp()
        if NOTHING in waited:
            return
        before, waiting = self.state, statistics.fmean(waited)
        self.state = before.after(drift, waiting, self._rules)
        if says and self.state.every != before.every:
            _logger.info(
                "sync: every=%d instead of %d; ranks waited %.0f %% of their time, their divergence is %.2f",
                *(self.state.every, before.every, 100 * waiting, drift),
            )

    def state_dict(self) -> dict[str, Any]:
        """Return the state on which the next numbers depend, besides future measurements."""
        return asdict(self.state)

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Continue with the result of ``state_dict``; earlier measurements no longer count."""
        self.begin_anew()
        self.state = EveryState(**saved)

    def _waited(self) -> float:
        if self._began is None or self._arrived is None:
            return NOTHING
        spent = self._clock.seconds(self._began, self._arrived)
        waited = self._clock.seconds(self._left, self._arrived)
        return waited / spent if spent and waited is not None else NOTHING  # a device may not have reported yet
