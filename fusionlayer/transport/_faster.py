"""Which of two links between the same ranks is the faster one. All ranks find the same."""

from __future__ import annotations

import logging
import time

import torch
from torch import Tensor

from ._exchange_link import ExchangeLink
from ._link import LinkMessage

__all__ = ["is_faster"]

_logger = logging.getLogger("fusionlayer")

# What must be gained at least. Less may be chance, and a library that is well known is worth that.
_GAIN = 1.1
_FIRST_BYTES = 64 << 10
_LEAST_BYTES, _MOST_BYTES = 256 << 10, 8 << 20
# Seconds that one exchange should take.
_EXCHANGE = 0.05
_ROUNDS = 3


def is_faster(link: ExchangeLink, other: ExchangeLink, rank: int, size: int) -> bool:
    """Return whether ``link`` moves bytes faster than ``other``. All ranks call it together, and get one answer.

    A short exchange with the neighbours says how long the messages are that are timed, so on a fast network this takes
    milliseconds; on a long link it takes a dozen round trips. What counts is the sum of all ranks' times.

    Raises:
        LinkError: one of the links has failed.
    """
    links = (link, other)
    first = torch.tensor([_time(link, rank, size, _FIRST_BYTES, 1)], dtype=torch.float64)
    link.all_reduce(first, 2)
    seconds = first.item() / size
    nbytes = int(min(max(_FIRST_BYTES * _EXCHANGE / seconds, _LEAST_BYTES), _MOST_BYTES))
    times = torch.zeros(2, dtype=torch.float64)
    for number in range(_ROUNDS):
        found = torch.tensor([_time(each, rank, size, nbytes, 3 + number) for each in links], dtype=torch.float64)
        if number:  # the first one only opens the windows
            times += found
    link.all_reduce(times, 3 + _ROUNDS)
    own, others = (float(seconds) for seconds in times)
    faster = others > _GAIN * own
    if rank == 0:
        _logger.info(
            "connections of our own take %.2f of gloo's time for %d bytes; %s moves bytes between hosts",
            own / others,
            nbytes,
            "they" if faster else "gloo",
        )
    return faster


def _time(link: ExchangeLink, rank: int, size: int, nbytes: int, key: int) -> float:
    """Return the seconds of an exchange with both neighbours, after all have come."""
    _exchange(link, rank, size, torch.zeros(2, dtype=torch.uint8), key)
    data = torch.zeros(2 * nbytes, dtype=torch.uint8)
    start = time.perf_counter()
    _exchange(link, rank, size, data, key)
    return time.perf_counter() - start


def _exchange(link: ExchangeLink, rank: int, size: int, data: Tensor, key: int) -> None:
    half = data.numel() // 2
    link.exchange(
        [LinkMessage((rank + 1) % size, data[:half], key)], [LinkMessage((rank - 1) % size, data[half:], key)]
    )
