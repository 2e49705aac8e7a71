"""A roll call: the ranks of a transport find out, through the store by which they met, who is there for a sum."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection
from contextlib import suppress
from datetime import timedelta

import torch.distributed as dist

from ._link import LinkError

__all__ = ["MOST_RANKS", "RollCall"]

MOST_RANKS = 62
"""Ranks of a roll call at most: each has a bit of one number of the store, and one more bit closes the call."""

_CLOSED = 1 << MOST_RANKS
# Seconds between two looks of the rank that decides: at first, and at most. In between a quarter of what was waited so
# far: each look is a round trip, beside the payload of other buckets.
_SHORTEST, _LONGEST = 0.001, 0.005
# Seconds for which a rank waits in the store for the answer before it looks whether waiting has become useless.
_PATIENCE = 0.1
# Calls whose keys are deleted at a time.
_DELETED = 2


class RollCall:
    """Decides who is in the next calls of a transport. One thread at a time uses it, in the same order on all ranks.

    Each rank adds its bit to a number in the store, which answers with the sum. So exactly one rank sees that its bit
    makes half of them. This rank waits for the others, at most for the grace, and then adds the bit that closes the
    call: who comes after that is out. One atomic number thus elects who decides. Who is in stands under another key, as
    bits are added after a call was closed too. Whoever makes the number whole writes that all are in. The other ranks
    wait for this key in the store, which answers as soon as it is there. A rank that was out last time, and has not
    even come to that call by now, is far behind and is not waited for.

    Half are enough, as nobody else can decide too. A third of the ranks would do the same, and stray further from what
    all of them would have done.

    Args:
        store: a client of the store that nobody else uses at the same time, with a prefix of this transport's own.
        rank: this rank.
        size: number of ranks, at most ``MOST_RANKS``.
        is_over: returns whether waiting has become useless.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, is_over: Callable[[], bool]) -> None:
        self._store = store
        self._rank = rank
        self._size = size
        self._everyone = (1 << size) - 1
        self._is_over = is_over
        self._number = 0
        self._last = self._everyone
        # Numbers of calls that all ranks may still read, and the number of those from the left that nobody reads more.
        self._kept: deque[int] = deque()

    def call(self, grace: float, must: Collection[int], is_due: Callable[[], bool], deadline: float) -> tuple[int, ...]:
        """Return the ranks that are in, in ascending order: the same on all ranks, whenever they come.

        Args:
            grace: seconds to wait for the rest once half of them are there.
            must: ranks that are waited for without end.
            is_due: returns whether the answer is needed by now. Until then the rest is waited for beyond the grace.
            deadline: time of the monotonic clock at which waiting ends in any case.

        Raises:
            LinkError: nobody decides in time, or waiting has become useless; it names a rank that has not come.
            RuntimeError: the store does not answer.
        """
        number, everyone = self._number, self._everyone
        self._number += 1
        here = self._store.add(f"{number}/here", 1 << self._rank)
        is_open = here < _CLOSED
        if is_open and here == everyone:
            present = everyone
            self._store.set(f"{number}/in", str(present))
        elif is_open and here.bit_count() == -(-self._size // 2):
            present = self._decide(number, grace, sum(1 << rank for rank in must), is_due, deadline)
        else:
            present = self._learn(number, deadline)
        self._kept.append(number)
        if self._rank == 0 and present == everyone:
            self._forget()
        self._last = present
        return tuple(rank for rank in range(self._size) if present >> rank & 1)

    def _decide(self, number: int, grace: float, must: int, is_due: Callable[[], bool], deadline: float) -> int:
        wanted, late = self._everyone, self._everyone & ~self._last
        if late:
            wanted &= ~late | self._store.add(f"{number - 1}/here", 0)
        soon, here = time.monotonic() + grace, 0

        def is_enough() -> bool:
            nonlocal here
            here = self._store.add(f"{number}/here", 0)
            if must & ~here:
                return False
            return here == self._everyone or is_due() and (not wanted & ~here or time.monotonic() >= soon)

        start = time.monotonic()
        while not is_enough():
            now = time.monotonic()
            self._check(deadline, lambda: (must or self._everyone) & ~here)
            time.sleep(min(max((now - start) / 4, _SHORTEST), _LONGEST, max(deadline - now, 0)))
        if here != self._everyone:
            here = self._store.add(f"{number}/here", _CLOSED) - _CLOSED
            self._store.set(f"{number}/in", str(here))
        return here

    def _learn(self, number: int, deadline: float) -> int:
        """Return what another rank has decided."""
        key, known = f"{number}/in", False
        while not known:
            self._check(deadline, lambda: self._everyone & ~self._store.add(f"{number}/here", 0))
            with suppress(dist.DistStoreError):  # so long there was no answer
                self._store.wait([key], timedelta(seconds=min(_PATIENCE, max(deadline - time.monotonic(), 0.001))))
                known = True
        return int(self._store.get(key))

    def _check(self, deadline: float, missing: Callable[[], int]) -> None:
        """Raise if waiting for those who are ``missing``, as bits, has become useless or has lasted too long."""
        if self._is_over():
            raise LinkError(self._first(missing()), "the connections are closed")
        if time.monotonic() >= deadline:
            raise LinkError(self._first(missing()), "it did not come in time")

    def _first(self, ranks: int) -> int:
        """Return the first of the ranks whose bits are set, or this one if none is."""
        return (ranks & -ranks).bit_length() - 1 if ranks else self._rank

    def _forget(self) -> None:
        """Delete keys of calls that all ranks have left behind, as each of them is in the last one."""
        for _ in range(_DELETED):
            if len(self._kept) < 2:
                return
            number = self._kept.popleft()
            for key in (f"{number}/here", f"{number}/in"):
                self._store.delete_key(key)
