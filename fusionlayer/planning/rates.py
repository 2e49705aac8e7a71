"""Rates of the ranks' links: how they are measured, and the shares of a sum that follow from them."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

import torch

from ..base.errors import ConfigError
from ..transport import Transport
from .cost_model import parse_rate

MEASURED = "measured"

_logger = logging.getLogger("fusionlayer")

_UNIT = 1000
"""The sum of all shares, before they are rounded."""

_ALIKE = 0.85
"""Measured rates that differ by less count as equal: chance explains that much, and equal shares cost nothing."""

_FIRST_BYTES, _MOST_BYTES = 64 << 10, 8 << 20
_LONG_ENOUGH = 0.25
"""Seconds of an exchange against which a round trip is short."""


def shares_by(rates: Sequence[str], transport: Transport) -> tuple[int, ...]:
    """Return the shares of the ranks by the setting ``rates``; empty: equal ones. All ranks call it together."""
    if not rates:
        return ()
    if list(rates) == [MEASURED]:
        found = measure_rates(transport)
    elif len(rates) == transport.size:
        found = [parse_rate(rate) for rate in rates]
    else:
        raise ConfigError(
            f"rates={list(rates)} for {transport.size} ranks; expected the rate of each rank's link, such as 100mbit, "
            f"or {MEASURED} alone"
        )
    shares = shares_of(found)
    if transport.rank == 0:
        words = ", ".join(f"{rate / 1e6:.4g}" for rate in found)
        _logger.info("links of the ranks carry %s Mbit/s; shares of a sum: %s", words, list(shares) or "equal")
    return shares


def least_time(rates: Sequence[float]) -> float:
    """Return the seconds that a sum of messages of 1 bit needs at these rates, in bits per second, with any shares.

    A rank with share w sends and receives 1 + (n - 2) w bits, as ``two_shot_by_shares`` explains. All n together send
    2 n - 2, and each of them at least 1.
    """
    return max(1 / min(rates), (2 * len(rates) - 2) / sum(rates))


def shares_of(rates: Sequence[float]) -> tuple[int, ...]:
    """Return the shares, as whole numbers, with which a sum takes ``least_time``; empty: equal ones.

    In that time T a rank of rate r can have the share (T r - 1) / (n - 2). If a slow rank decides T, the shares of the
    others are scaled down in proportion. Two ranks send equally much whatever the shares. A pure function: ranks that
    have the same rates get the same shares.
    """
    if len(rates) <= 2 or min(rates) == max(rates):
        return ()
    time = least_time(rates)
    possible = [max(0.0, time * rate - 1) for rate in rates]
    return tuple(round(_UNIT * share / sum(possible)) for share in possible)


def measure_rates(transport: Transport) -> list[float]:
    """Return the bits per second of each rank's link, both directions in use. All ranks call it together.

    One host after the other exchanges messages with all others, so the sum of their rates limits the measured rate of
    the fastest link. Messages are in the host's memory. They grow until they take a quarter of a second. Ranks of one
    host have equal parts of its link. The rates are the same on all ranks; nearly equal ones are made equal.
    """
    nodes = transport.nodes
    rates = [1.0] * transport.size
    if len(nodes) > 1:
        with transport.doing("a measurement of the links' rates"):
            for node in nodes:
                rate = _rate_of(node, transport)
                for rank in node:
                    rates[rank] = rate / len(node)
    fastest: float | None = None
    for rate in sorted(set(rates), reverse=True):
        if fastest is None or rate < _ALIKE * fastest:
            fastest = rate
        rates = [fastest if each == rate else each for each in rates]
    return rates


def _rate_of(node: Sequence[int], transport: Transport) -> float:
    """Return the bits per second that the ranks of a node exchange with all others."""
    others = transport.size - len(node)
    here = transport.rank in node
    nbytes, seconds = _FIRST_BYTES, 0.0
    while True:
        data = torch.zeros(nbytes, dtype=torch.uint8, device="cpu")
        across = [rank for rank in range(transport.size) if (rank in node) != here]
        messages = {rank: (data, torch.empty_like(data)) for rank in across}
        transport.barrier()
        start = time.perf_counter()
        transport.exchange(messages)
        mine = torch.tensor([time.perf_counter() - start if here else 0.0], dtype=torch.float64, device="cpu")
        transport.all_reduce_max(mine)
        seconds = mine.item()
        if seconds >= _LONG_ENOUGH or nbytes >= _MOST_BYTES:
            return 8 * nbytes * others * len(node) / max(seconds, 1e-9)
        nbytes = min(_MOST_BYTES, int(nbytes * max(2.0, min(8.0, 1.5 * _LONG_ENOUGH / max(seconds, 1e-9)))))
