"""Differences of the ranks' clocks, measured by messages there and back."""

from __future__ import annotations

import time

import torch

from .base import Transport

_ROUNDS = 8


def measure_clock(transport: Transport, *, wanted: bool) -> tuple[int, int] | None:
    """Return by how many nanoseconds rank 0's ``perf_counter_ns`` is ahead of this rank's, and the largest error.

    All ranks call it together. If no rank has ``wanted`` it, all get None after one small exchange. Ranks of a node
    have one clock, so its first rank measures for all of them. A message there and back carries rank 0's time. The
    shortest of eight counts: rank 0 read its clock in the middle of it, or at most half of it earlier or later.
    """
    flags = torch.empty(transport.size, 1, dtype=torch.uint8, device="cpu")
    transport.all_gather(torch.tensor([wanted], dtype=torch.uint8, device="cpu"), flags)
    if not flags.any():
        return None
    mine = torch.zeros(2, dtype=torch.int64, device="cpu")
    for rank in (node[0] for node in transport.nodes if 0 not in node):
        if transport.rank == rank:
            mine.copy_(
                torch.tensor(min((_ask(transport) for _ in range(_ROUNDS)), key=lambda found: found[1]), device="cpu")
            )
        elif transport.rank == 0:
            for _ in range(_ROUNDS):
                _answer(transport, rank)
    every = torch.empty(transport.size, mine.nbytes, dtype=torch.uint8, device="cpu")
    transport.all_gather(mine.view(torch.uint8), every)
    first = next(node[0] for node in transport.nodes if transport.rank in node)
    offset, error = every[first].view(torch.int64).tolist()
    return offset, error


def _ask(transport: Transport) -> tuple[int, int]:
    """Return offset and error by one message to rank 0 and its answer."""
    answer = torch.empty(1, dtype=torch.int64, device="cpu")
    start = time.perf_counter_ns()
    transport.send(answer.zero_(), 0)
    transport.recv(answer, 0)
    end = time.perf_counter_ns()
    return int(answer) - (start + end) // 2, (end - start) // 2


def _answer(transport: Transport, rank: int) -> None:
    """Answer one question of ``rank`` by the time."""
    now = torch.empty(1, dtype=torch.int64, device="cpu")
    transport.recv(now, rank)
    transport.send(now.fill_(time.perf_counter_ns()), rank)
