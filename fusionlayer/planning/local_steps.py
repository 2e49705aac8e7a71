"""How often replicas exchange what they have learned: chosen by prediction, then adapted to what is measured."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ..base.errors import ConfigError
from .codec_rules import FIDELITIES, LOCAL
from .collective_phases import BETWEEN, Phase
from .simulation import Compute, Load, run_local_steps

__all__ = ["EveryChoice", "EveryRules", "EveryState", "choose_every", "divergence", "smallest_every"]

MOST = 256
"""Longest period that is chosen."""
TOLERANCE = 0.05
"""Share of a step's computing by which a mean step may be longer while the network is no bottleneck."""


# ---- by prediction --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class EveryChoice:
    """A period, and why it was chosen.

    Attributes:
        every: steps of the period.
        seconds: predicted mean step.
        reason: the predictions, in words.
    """

    every: int
    seconds: float
    reason: str


def smallest_every(compute: float, seconds: Callable[[int], float], fidelity: str, most: int = MOST) -> EveryChoice:
    """Return the shortest period, of 1, 2, 4, ... steps, with which the network is no bottleneck.

    It is none if the mean step is at most 5 % longer than its computing.

    Args:
        compute: seconds that a step computes.
        seconds: returns the predicted mean step of a period of so many steps.
        fidelity: all but "local" allow no period longer than one step.
        most: the longest period; if it is too short too, it is chosen.

    Raises:
        ConfigError: the fidelity is unknown.
    """
    if fidelity not in FIDELITIES:
        raise ConfigError(f"fidelity={fidelity!r}; expected one of: {', '.join(FIDELITIES)}")
    if fidelity != LOCAL:
        found = seconds(1)
        return EveryChoice(1, found, f"every=1: fidelity {fidelity!r} never skips a step; {_step(found, compute)}")
    before = ""
    every = 1
    while True:
        found = seconds(every)
        enough = found <= (1 + TOLERANCE) * compute
        if enough or 2 * every > most:
            limit = "" if enough else f"; every={every} is the longest allowed, and the network is a bottleneck still"
            return EveryChoice(every, found, f"every={every}: {_step(found, compute)}{before}{limit}")
        before = f"; every={every}: {found * 1e3:.2f} ms"
        every *= 2


def choose_every(
    compute: float,
    nbytes: float,
    bandwidth: float,
    *,
    fidelity: str = LOCAL,
    startup: float = 0.0,
    fragments: int = 1,
    delay: int = 0,
    most: int = MOST,
) -> EveryChoice:
    """Return the shortest period with which the network is no bottleneck, from a few numbers.

    Args:
        compute: seconds that a step computes.
        nbytes: bytes that a rank sends when all buckets are sent once.
        bandwidth: of its link, in bytes a second.
        startup: seconds of each fragment, however small.
        fragments: parts that leave one after the other, spread over the period; never more than the period has steps.
        delay: steps after which results are waited for; always less than the period.
        fidelity, most: as for ``smallest_every``.

    Raises:
        ConfigError: a number makes no sense, or the fidelity is unknown.
    """
    for name, value, least in (("compute", compute, 0), ("bandwidth", bandwidth, 0)):
        if not least < value < math.inf:
            raise ConfigError(f"{name}={value}; expected a number above {least}")
    for name, value, least in (("nbytes", nbytes, 0), ("startup", startup, 0), ("fragments", fragments, 1)):
        if not least <= value < math.inf:
            raise ConfigError(f"{name}={value}; expected at least {least}")

    def seconds(every: int) -> float:
        parts = min(fragments, every)
        each = startup + nbytes / parts / bandwidth
        leaving: list[Sequence[int]] = [()] * every
        for part in range(parts):
            leaving[(part + 1) * every // parts - 1] = (0,)
        load = Load(0.0, 0.0, 1.0, [Phase(each, 0.0, BETWEEN)])
        return run_local_steps(Compute(0.0, compute, 0.0), [load], leaving, delay=min(delay, every - 1)).seconds

    return smallest_every(compute, seconds, fidelity, most)


def _step(seconds: float, compute: float) -> str:
    return f"a mean step is predicted to take {seconds * 1e3:.2f} ms, computing {compute * 1e3:.2f} ms"


# ---- by measurement -------------------------------------------------------------------------------------------------


def divergence(mean_norm: float, norms: Sequence[float]) -> float:
    """Return how much replicas drift apart: 1 less the mean cosine between what two of them have learned.

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
            above 1 replicas undo what the others learn.
        waiting: share of a step's time spent waiting for the network above which it is doubled.
        syncs: exchanges in a row that must say so.
        rest: exchanges after a halving in which it is not doubled again.
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
    """A period that follows what is measured. All ranks have the same, as they are given the same numbers.

    That replicas drift apart counts more than waiting: a period is halved though the network is a bottleneck. It is
    doubled only as long as replicas do not drift apart, and not soon after it was halved.

    Attributes:
        every: steps of the period.
        apart: exchanges in a row in which replicas had drifted apart.
        waited: exchanges in a row in which the network was a bottleneck, and replicas had not drifted apart.
        rest: exchanges in which the period is not doubled.
    """

    every: int
    apart: int = 0
    waited: int = 0
    rest: int = 0

    def after(self, divergence: float, waiting: float, rules: EveryRules) -> EveryState:
        """Return the state after an exchange.

        Args:
            divergence: as ``divergence`` returns it. NaN, as after an overflow, counts as drifted apart.
            waiting: share of the time since the last exchange in which training waited for the network; the mean, or
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
