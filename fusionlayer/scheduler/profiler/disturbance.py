"""What communication costs the thread that computes, beside the time that it takes itself."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable
from functools import partial

import torch

from ...transport import Transport

__all__ = ["measure_disturbance"]

_DISTURBANCES = 16
_DISTURBED_EVERY = 0.003
_DISTURBED = 192
"""Rows of matrices whose product takes far less time than lies between two exchanges."""
_NBYTES = 1 << 10


def measure_disturbance(transport: Transport, repeats: int) -> float:
    """Return the seconds that a thread which computes loses for each small exchange of another; at least 0.

    On shared cores it loses what the exchange takes of them, and anywhere what the interpreter's lock and the caches
    cost. All ranks call it together. Median of ``repeats``.
    """
    left, right = torch.ones(2, _DISTURBED, _DISTURBED)
    product = torch.empty_like(left)
    mine = torch.ones(_NBYTES, dtype=torch.uint8)
    every = torch.empty(transport.size, _NBYTES, dtype=torch.uint8)

    def rounds_within(work: Callable[[], object]) -> tuple[int, float]:
        """Return how many products another thread computes while ``work`` runs here, and in how many seconds."""
        done = threading.Event()
        found: list[tuple[int, float]] = []

        def compute() -> None:
            start, rounds = time.perf_counter(), 0
            while not done.is_set():
                torch.mm(left, right, out=product)
                rounds += 1
            found.append((rounds, time.perf_counter() - start))

        thread = threading.Thread(target=compute, name="fusionlayer profiler")
        thread.start()
        try:
            work()
        finally:
            done.set()
            thread.join()
        return found[0]

    def exchanges() -> None:
        for _ in range(_DISTURBANCES):
            time.sleep(_DISTURBED_EVERY)
            transport.all_gather(mine, every)

    samples = []
    for _ in range(repeats):
        transport.barrier()
        rounds, seconds = rounds_within(partial(time.sleep, _DISTURBANCES * _DISTURBED_EVERY))
        transport.barrier()
        disturbed, longer = rounds_within(exchanges)
        samples.append((longer - disturbed * seconds / rounds) / _DISTURBANCES)
    return max(0.0, statistics.median(samples))
