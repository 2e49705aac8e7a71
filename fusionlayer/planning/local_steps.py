"""The period between two syncs, adapted to measurements."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..base.errors import ConfigError

MOST = 256
"""Longest period that is chosen."""
TOLERANCE = 0.05
"""Share of a step's computing by which a mean step may be longer with the network still no bottleneck."""


def divergence(mean_norm: float, norms: Sequence[float]) -> float:
    """Return how much replicas diverge: 1 minus the mean cosine between two ranks' differences.

    0: all have learned the same; 1: their differences are as if independent; above that they undo each other.

    Args:
        mean_norm: 2-norm of the mean, over ranks, of the differences since the last exchange.
        norms: 2-norms of each rank's difference, at least two.
    """
    squares = [norm * norm for norm in norms]
    pairs = sum(norms) ** 2 - sum(squares)  # sum of |a| |b| over ordered pairs
    if not pairs > 0:
        return 0.0 if pairs == 0 else math.nan
    count = len(norms)
    return 1.0 - ((count * mean_norm) ** 2 - sum(squares)) / pairs


@dataclass(frozen=True)
class EveryRules:
    """When a period is halved or doubled.

    Attributes:
        least, most: bounds of the period. Independent noise of batches hides how much a long period costs, so the
            largest is a guard too.
        apart: divergence above which it is halved. With small batches it is near 1 after one step already, by noise;
            above 1 replicas undo each other's progress.
        waiting: share of a step's time spent waiting for the network above which it is doubled.
        syncs: exchanges in a row that must say so.
        rest: exchanges after a halving without another doubling.
    """

    least: int = 1
    most: int = 32
    apart: float = 1.0
    waiting: float = TOLERANCE
    syncs: int = 3
    rest: int = 24

    def __post_init__(self) -> None:
        if not 1 <= self.least <= self.most:
            raise ConfigError(f"least={self.least}, most={self.most}; expected 1 <= least <= most")
        if not (self.syncs >= 1 and self.rest >= 0):
            raise ConfigError(f"syncs={self.syncs}, rest={self.rest}; expected at least 1, and at least 0")


@dataclass(frozen=True)
class EveryState:
    """A period that follows measurements. All ranks compute the same number from the same inputs.

    Divergence counts more than waiting: a period is halved even if the network is a bottleneck. It is doubled only as
    long as replicas do not drift apart, and not soon after it was halved.

    Attributes:
        every: steps of the period.
        apart: consecutive exchanges with diverged replicas.
        waited: consecutive exchanges in which the network was a bottleneck and replicas had not diverged.
        rest: remaining exchanges without a doubling.
    """

    every: int
    apart: int = 0
    waited: int = 0
    rest: int = 0

    def after(self, divergence: float, waiting: float, rules: EveryRules) -> EveryState:
        """Return the state after an exchange.

        Args:
            divergence: as ``divergence`` returns it. NaN, as after an overflow, counts as drifted apart.
            waiting: share of the time since the last exchange for which training waited for the network; the mean, or
                the largest, over ranks.
            rules: the bounds.
        """
        drifted = not divergence <= rules.apart
        apart = self.apart + 1 if drifted else 0
        waited = self.waited + 1 if not drifted and waiting > rules.waiting else 0
        rest = max(0, self.rest - 1)
        if apart >= rules.syncs and self.every > rules.least:
            return EveryState(max(rules.least, self.every // 2), rest=rules.rest)
        if waited >= rules.syncs and not rest and self.every < rules.most:
            return EveryState(min(rules.most, self.every * 2))
        return replace(self, apart=apart, waited=waited, rest=rest)
