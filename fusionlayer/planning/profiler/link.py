"""Measures transfers and collectives by size, for a profile; medians count."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ...process.clock import HOST, Clock
from ...transport import Transport
from .averages import Points

_CALLS = 20
"""Exchanges of one byte for each repeat."""

Transfer = Callable[[], object]


def levels_of(transport: Transport) -> dict[str, tuple[int, ...]]:
    """Return the ranks with which this rank exchanges "inside" its node, and those "between" nodes.

    These have the same position in the other nodes, as in ``two_level``. There is no level unless there are several
    nodes, of several ranks each and equally many.
    """
    nodes = transport.nodes
    if not 1 < len(nodes) < transport.size or len(set(map(len, nodes))) > 1:
        return {}
    mine = next(node for node in nodes if transport.rank in node)
    place = mine.index(transport.rank)
    return {
        "inside": tuple(rank for rank in mine if rank != transport.rank),
        "between": tuple(node[place] for node in nodes if node is not mine),
    }


def measure_call(
    transport: Transport, repeats: int, clock: Clock = HOST, peers: Sequence[int] | None = None
) -> dict[str, float]:
    """Return seconds, and CPU seconds of the process, of an exchange of one byte. All ranks call it together.

    It is an exchange with ``peers``, or with all other ranks. By a device's clock the byte is on the device, and CPU
    seconds are 0: no transfer takes them from the device.

    The first decile of many calls counts: scheduling only adds to so short a call, and would look like a cost of the
    network.
    """
    call = _gather(transport, 1, clock) if peers is None else _exchange(peers, transport, 1, clock)
    samples = _samples(transport, call, _CALLS * repeats, clock)
    latency, cpu = (statistics.quantiles(column, n=10)[0] for column in zip(*samples, strict=True))
    return {"latency": latency, "cpu": cpu}


def measure_link(transport: Transport, sizes: Sequence[int], repeats: int, clock: Clock = HOST) -> dict[str, Any]:
    """Return the costs of the link between two ranks, by bytes that each of them sends. Both call it together.

    ``latency`` and ``cpu`` belong to an exchange of one byte. For other sizes CPU seconds are the process's plus each
    rank's equal part of the kernel's for the network.
    """
    call = measure_call(transport, repeats, clock)
    curves: dict[str, Points] = {"exchange": [], "all_reduce": []}
    per_byte: dict[str, float] = {}
    for size in sizes:
        for name, kind in (("exchange", _gather), ("all_reduce", _reduce)):
            before = _softirq_seconds()
            seconds, cpu = _transfer(transport, kind(transport, size, clock), repeats, clock)
            cpu += 0.0 if clock.lags else (_softirq_seconds() - before) / transport.size / repeats
            per_byte[name] = max(0.0, cpu - call["cpu"]) / size  # the largest size has the last word
            curves[name].append([size, seconds])
    return {**call, "cpu_per_byte": per_byte["exchange"], "sum_per_byte": per_byte["all_reduce"], **curves}


def measure_collectives(
    transport: Transport, sizes: Sequence[int], repeats: int, limit: float = math.inf, clock: Clock = HOST
) -> dict[str, Points]:
    """Return seconds of the transfers of each collective by bytes of each rank's message. All ranks call it together.

    For nodes of several ranks it also returns the exchanges of ``levels_of``, all ranks at once, by bytes of each
    message. Messages of a size that is no multiple of 4 or of the number of ranks are shortened by the remainder.

    Args:
        transport: all ranks.
        sizes: bytes, growing.
        repeats: calls for each size; their median counts. One further call comes before them.
        limit: seconds for all sizes. A size that is expected to exceed it, in proportion to the time of the previous
            size, is left out with all larger ones. The first two are always measured.
        clock: the clock of the device on which the messages lie.
    """
    kinds: dict[str, Callable[[Transport, int, Clock], Transfer]] = {
        "dense": _reduce,
        "one_shot": _gather,
        "two_shot": _pieces,
        **{level: partial(_exchange, peers) for level, peers in levels_of(transport).items()},
    }
    found: dict[str, Points] = {name: [] for name in kinds}
    spent = torch.zeros(2, dtype=torch.float64, device="cpu")  # on all sizes, on the last one
    for place, size in enumerate(sizes):
        if place >= 2 and float(spent[0] + spent[1] * size / sizes[place - 1]) > limit:
            break
        start = time.perf_counter()
        for name, kind in kinds.items():
            found[name].append([size, _transfer(transport, kind(transport, size, clock), repeats, clock)[0]])
        if limit < math.inf:
            spent[1] = time.perf_counter() - start
            spent[0] += spent[1]
            transport.broadcast(spent, 0)  # rank 0's clock counts: ranks must stop at the same size
    return found


def _gather(transport: Transport, nbytes: int, clock: Clock) -> Transfer:
    mine = torch.ones(nbytes, dtype=torch.uint8, device=clock.device)
    return partial(transport.all_gather, mine, mine.new_empty(transport.size, nbytes))


def _exchange(peers: Sequence[int], transport: Transport, nbytes: int, clock: Clock) -> Transfer:
    data = torch.ones(nbytes, dtype=torch.uint8, device=clock.device)
    return partial(transport.exchange, {peer: (data.clone(), torch.empty_like(data)) for peer in peers})


def _reduce(transport: Transport, nbytes: int, clock: Clock) -> Transfer:
    return partial(transport.all_reduce, torch.zeros(nbytes // 4, device=clock.device))


def _pieces(transport: Transport, nbytes: int, clock: Clock) -> Transfer:
    mine = torch.ones(transport.size, nbytes // transport.size, dtype=torch.uint8, device=clock.device)
    every = torch.empty_like(mine)

    def two_shots() -> None:
        transport.all_to_all(mine, every)
        transport.all_gather(mine[0], every)

    return two_shots


def _transfer(transport: Transport, call: Transfer, repeats: int, clock: Clock) -> tuple[float, float]:
    """Return medians of a call's seconds and of the process's CPU seconds during it."""
    samples = _samples(transport, call, repeats, clock)
    seconds, cpu = (statistics.median(column) for column in zip(*samples, strict=True))
    return seconds, cpu


def _samples(transport: Transport, call: Transfer, repeats: int, clock: Clock) -> list[tuple[float, float]]:
    """Return each call's seconds and the process's CPU seconds; a first call does not count."""
    call()
    samples = []
    for _ in range(repeats):
        clock.finish()
        transport.barrier()
        busy, start = time.process_time(), clock.stamp()
        call()
        end, busy = clock.stamp(), time.process_time() - busy
        samples.append((clock.waited(start, end), 0.0 if clock.lags else busy))
    return samples


def _softirq_seconds() -> float:
    """Return the machine's seconds in soft interrupts, which run the network's queues; 0 if they are unknown."""
    try:
        fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()
    except OSError:
        return 0.0
    return int(fields[7]) / 100  # USER_HZ
