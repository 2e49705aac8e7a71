"""Roll calls: exactly one rank decides, all learn the same, and who is far behind is not waited for."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch.distributed as dist

from fusionlayer.transport._link import LinkError
from fusionlayer.transport._roll import MOST_RANKS, RollCall

pytestmark = pytest.mark.short

SIZE, LONG, SHORT = 4, 180.0, 0.001


class Calls:
    """The roll calls of ranks that are threads, over one store."""

    def __init__(self, size: int = SIZE) -> None:
        self.store = dist.HashStore()
        self.is_over, self.is_due = False, True
        self.ranks = [RollCall(self.store, rank, size, lambda: self.is_over) for rank in range(size)]

    def of(self, ranks: Sequence[int], grace: float, must: Sequence[int] = (), patience: float = LONG) -> list[Any]:
        """Let these ranks call at once; return what each was told."""

        def call(rank: int) -> tuple[int, ...]:
            return self.ranks[rank].call(grace, must, lambda: self.is_due, time.monotonic() + patience)

        with ThreadPoolExecutor(len(ranks)) as pool:
            return list(pool.map(call, ranks))


def test_all_who_come_within_the_grace_are_in() -> None:
    calls = Calls()
    for _ in range(50):
        assert calls.of(range(SIZE), LONG) == [(0, 1, 2, 3)] * SIZE
    # Of the numbers that all have left behind, nothing stays in the store.
    assert calls.store.num_keys() == 2


def test_all_learn_the_same_whenever_they_come() -> None:
    """Calls in a row without a grace to speak of; some are closed while others come."""
    calls, numbers = Calls(), range(150)

    def come(rank: int) -> list[tuple[int, ...]]:
        chosen = random.Random(rank)
        told = []
        for _ in numbers:
            time.sleep(chosen.choice([0.0, 0.0, 0.0005, 0.002]))
            told.append(calls.ranks[rank].call(SHORT / 2, (), lambda: True, time.monotonic() + LONG))
        return told

    with ThreadPoolExecutor(SIZE) as pool:
        first, *others = pool.map(come, range(SIZE))
    assert others == [first] * (SIZE - 1)
    assert all(len(present) >= SIZE // 2 for present in first)


@pytest.mark.parametrize("early", [(0, 1), (0, 3), (1, 2), (2, 3)])
def test_who_comes_later_is_out_and_is_told_so(early: tuple[int, int]) -> None:
    """Rank 0 too: whoever makes half of the ranks decides."""
    calls = Calls()
    late = [rank for rank in range(SIZE) if rank not in early]
    assert calls.of(early, SHORT) == [early] * 2
    assert calls.of(late, SHORT) == [early] * 2
    assert calls.of(range(SIZE), LONG) == [(0, 1, 2, 3)] * SIZE


def test_less_than_half_of_the_ranks_decide_nothing() -> None:
    calls = Calls()
    with pytest.raises(LinkError, match="it did not come in time") as raised:
        calls.of([0], SHORT, patience=0.05)
    assert raised.value.peer == 1


def test_who_has_not_come_to_the_last_call_is_not_waited_for() -> None:
    """The grace is long: with a wait for the late the second call would end by the test's deadline alone."""
    calls = Calls()
    assert calls.of([0, 3], SHORT) == [(0, 3)] * 2
    assert calls.of([0, 3], 1e6) == [(0, 3)] * 2
    assert calls.of([1], SHORT) == calls.of([1], SHORT) == [(0, 3)]
    told: list[Any] = []
    # Rank 1 has come to the last call by now, and is waited for; rank 2 is not.
    waiting = threading.Thread(target=lambda: told.extend(calls.of([0, 3], LONG)), daemon=True)
    waiting.start()
    assert calls.of([1], LONG) == [(0, 1, 3)]
    waiting.join(LONG)
    assert told == [(0, 1, 3)] * 2


def test_who_must_be_in_is_waited_for_beyond_the_grace() -> None:
    calls = Calls()
    assert calls.of([0, 3], SHORT) == [(0, 3)] * 2
    told: list[Any] = []
    waiting = threading.Thread(target=lambda: told.extend(calls.of([0, 3], SHORT, must=[2])), daemon=True)
    waiting.start()
    waiting.join(0.2)
    assert waiting.is_alive()
    assert calls.of([2], SHORT) == [(0, 3)]
    assert calls.of([2], SHORT, must=[2]) == [(0, 2, 3)]
    waiting.join(LONG)
    assert told == [(0, 2, 3)] * 2


def test_waiting_ends_when_the_connections_are_closed() -> None:
    calls = Calls()
    calls.is_over = True
    with pytest.raises(LinkError, match="closed") as raised:
        calls.of([1], LONG)
    assert raised.value.peer == 0


def test_nobody_is_out_before_the_answer_is_needed() -> None:
    calls = Calls()
    calls.is_due = False
    told: list[Any] = []
    waiting = threading.Thread(target=lambda: told.extend(calls.of([0, 3], SHORT)), daemon=True)
    waiting.start()
    waiting.join(0.2)
    assert waiting.is_alive()
    assert calls.of([1, 2], SHORT) == [(0, 1, 2, 3)] * 2
    waiting.join(LONG)
    assert told == [(0, 1, 2, 3)] * 2


def test_one_rank_alone_closes_a_call() -> None:
    """Though the third one too comes before that, and waits."""
    calls, early = Calls(), [0, 1, 3]
    calls.is_due = False
    told: list[Any] = []
    waiting = threading.Thread(target=lambda: told.extend(calls.of(early, SHORT)), daemon=True)
    waiting.start()
    while calls.store.add("0/here", 0) != 0b1011:
        time.sleep(0.001)
    calls.is_due = True
    waiting.join(LONG)
    assert told == [(0, 1, 3)] * 3
    assert calls.store.add("0/here", 0) == (1 << MOST_RANKS) + 0b1011
