"""Which of two links between the same ranks is the faster one. All ranks find the same."""

from __future__ import annotations

import logging
import time

import torch
from torch import Tensor

from .base import Link, LinkMessage

_logger = logging.getLogger("fusionlayer")

# The least gain. A smaller gain may be chance, and a well-known library is preferable.
_GAIN = 1.1
_FIRST_BYTES = 64 << 10
_LEAST_BYTES, _MOST_BYTES = 256 << 10, 8 << 20
# Seconds that one exchange should take.
_EXCHANGE = 0.05
_ROUNDS = 3
# So many exchanges are timed together where calls only queue them: the end of one alone is not seen soon enough.
_QUEUED = 16


def is_faster(
    link: Link, other: Link, rank: int, size: int, names: tuple[str, str] = ("connections of our own", "gloo")
) -> bool:
    """Return whether ``link`` moves bytes faster than ``other``. All ranks call it together, and get one answer.

    A short exchange with the neighbours determines the length of the timed messages, so on a fast network this takes
    milliseconds; on a long link it takes a dozen round trips. The sum of all ranks' times counts.
    """
    links = (link, other)
    first = torch.tensor([_time(link, rank, size, _FIRST_BYTES, 1)], dtype=torch.float64, device=link.device)
    link.all_reduce(first, 2)
    _settle(link)
    seconds = first.item() / size
    nbytes = int(min(max(_FIRST_BYTES * _EXCHANGE / seconds, _LEAST_BYTES), _MOST_BYTES))
    times = torch.zeros(2, dtype=torch.float64, device=link.device)
    for number in range(_ROUNDS):
        found = torch.tensor(
            [_time(each, rank, size, nbytes, 3 + number) for each in links], dtype=torch.float64, device="cpu"
        )
        if number:  # the first one only opens the windows
            times += found.to(link.device)
    link.all_reduce(times, 3 + _ROUNDS)
    _settle(link)
    own, others = times.tolist()
    faster: bool = others > _GAIN * own
    if rank == 0:
        _logger.info(
            "%s: %.2f of the time of %s for %d bytes; bytes are sent by %s",
            names[0],
            own / others,
            names[1],
            nbytes,
            names[not faster],
        )
    return faster


def _time(link: Link, rank: int, size: int, nbytes: int, key: int) -> float:
    """Return the seconds of an exchange with both neighbours, or of several, after all have come."""
    _exchange(link, rank, size, torch.zeros(2, dtype=torch.uint8, device=link.device), key)
    data = torch.zeros(2 * nbytes, dtype=torch.uint8, device=link.device)
    _settle(link)
    start = time.perf_counter()
    for _ in range(_QUEUED if link.only_queues else 1):
        _exchange(link, rank, size, data, key)
    _settle(link)
    return time.perf_counter() - start


def _exchange(link: Link, rank: int, size: int, data: Tensor, key: int) -> None:
    half = data.numel() // 2
    link.exchange(
        [LinkMessage((rank + 1) % size, data[:half], key)], [LinkMessage((rank - 1) % size, data[half:], key)]
    )


def _settle(link: Link) -> None:
    """Wait for what was only queued."""
    if link.only_queues:
        link.drain()
