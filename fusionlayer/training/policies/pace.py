"""How many local steps ranks make between two syncs with "auto": they agree on their measurements."""

from __future__ import annotations

import logging
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from ...planning.local_steps import EveryRules, EveryState, divergence
from ...process.clock import Clock, Stamp

__all__ = ["Pace"]

_NOTHING = -1.0
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
        self._norms: list[Tensor] = []

    def leave(self, differences: Iterable[Tensor], joined: bool) -> list[float]:
        """Note that a sync sends these differences; return this rank's report of the previous sync.

        That is the share of the time that it waited, the norm of its differences, and the norm of their average. A rank
        that has ``joined`` only waits, so it reports nothing, and the number stays unchanged.
        """
        told = [_NOTHING] * 3 if joined else self._told()
        self._began, self._left, self._arrived = self._arrived, self._clock.stamp(), None
        self._norms = [_norm(differences)]
        return told

    def arrive(self, averages: Iterable[Tensor], told: Sequence[Sequence[float]], says: bool) -> None:
        """Note that the averages have arrived, and follow the ``told`` numbers of all ranks; ``says``: write to the
        log."""
        self._norms.append(_norm(averages))
        self._arrived = self._clock.stamp()
        if any(waited == _NOTHING for waited, _, _ in told):
            return
        before, waiting = self.state, statistics.fmean(waited for waited, _, _ in told)
        # The average has the same bits on all ranks, but its norm need not: the first rank's value counts.
        drift = divergence(told[0][2], [norm for _, norm, _ in told])
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

    def _told(self) -> list[float]:
        if self._began is None or self._arrived is None:
            return [_NOTHING] * 3
        spent = self._clock.seconds(self._began, self._arrived)
        waited = self._clock.seconds(self._left, self._arrived)
        if not spent or waited is None:  # a device has not reported yet
            return [_NOTHING] * 3
        return [waited / spent, *(float(norm) for norm in self._norms)]


def _norm(tensors: Iterable[Tensor]) -> Tensor:
    """Return the 2-norm of all together, () f64, on their device, without a wait of the host."""
    each = [*tensors]
    if not each:  # all parameters are frozen
        return torch.zeros((), dtype=torch.float64, device="cpu")
    norm: Tensor = torch.stack([norm.double() for norm in torch._foreach_norm(each)]).norm()
    return norm
