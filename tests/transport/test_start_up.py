"""Requests to the store by which ranks meet: as many for each rank, however many ranks there are."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from functools import cache, partial
from typing import Any

import pytest
import torch.distributed as dist

from fusionlayer.health import meeting
from fusionlayer.health.processes import Processes
from fusionlayer.health.state import RankState, decode
from fusionlayer.health.store import StatusKeys
from fusionlayer.launch.stores import EndingStore, gather
from fusionlayer.process.processes import Identity
from fusionlayer.transport.c10d import C10dTransport
from fusionlayer.transport.links.gloo_store import GlooStore
from fusionlayer.transport.settings import gather_settings
from tests.tiers import tiered


class CountingStore(dist.Store):
    """A store that counts the requests of one rank, except those of the thread that looks how the others are."""

    def __init__(self, store: dist.Store, counted: Counter[str]) -> None:
        super().__init__()
        self._store, self.counted = store, counted

    def clone(self) -> CountingStore:
        return CountingStore(self._store, self.counted)

    def set_timeout(self, timeout: timedelta) -> None:
        pass


def _counting(name: str) -> Callable[..., Any]:
    def request(self: CountingStore, *given: Any) -> Any:
        self.counted[name] += threading.current_thread().name != "fusionlayer heartbeat"
        return getattr(self._store, name)(*given)

    return request


for _name in ("set", "get", "add", "check", "wait", "compare_set", "delete_key", "multi_get", "multi_set"):
    setattr(CountingStore, _name, _counting(_name))


def by_all(size: int, begin: Callable[[int], Callable[[], Any]]) -> list[Any]:
    """Return what each rank's function returns; all run at once, on threads."""
    found: list[Any] = [None] * size

    def run(rank: int) -> None:
        found[rank] = begin(rank)()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def start(store: dist.Store, rank: int, size: int) -> Counter[str]:
    """Meet, compare settings and learn gloo's addresses as one of the ranks; return the requests."""
    counted: Counter[str] = Counter()
    own = CountingStore(store, counted)
    keys, processes = StatusKeys(own, "meeting", rank, size), Processes(rank, size, {})
    keys.begin()
    keys.arrive(RankState(rank, processes.own, 1))
    assert meeting.await_all(keys, lambda: keys, processes, time.monotonic() + 300, "300 s") is None
    assert processes.of.keys() == {*range(size)}
    ending = EndingStore(own, "transport", time.monotonic() + 300)
    nodes, _ = gather_settings(ending, rank, size, f"node {rank // 8}", {"checksum": None})
    assert nodes == [f"node {each // 8}" for each in range(size)]
    addresses = GlooStore(ending, size)
    text = b"host".ljust(4)
    value = len(text).to_bytes(8, "little") + text + (2).to_bytes(8, "little") + rank.to_bytes(2, "little")
    numbers = b"".join(number.to_bytes(8, "little") for number in range(size))
    addresses.set(f"gloo/{rank}", value + numbers)
    for peer in {0, size // 2, size - 1}:
        assert addresses.get(f"gloo/{peer}") == value[:-2] + peer.to_bytes(2, "little") + numbers
    return counted


@pytest.mark.parametrize("size", tiered([16, 64, 1024], lambda size: size == 16, lambda size: size == 64))
def test_ranks_make_as_many_requests_however_many_they_are(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "_FIRST_LOOK", 600.0)  # a rank looks at the others only after a while
    monkeypatch.setattr("fusionlayer.health.store.decode", cache(decode))  # all ranks are in one process
    counts = {}
    for ranks in (4, size):
        store = dist.HashStore()
        store.set_timeout(timedelta(seconds=300))
        counted = by_all(ranks, lambda rank, s=store, n=ranks: partial(start, s, rank, n))  # type: ignore[misc]
        counts[ranks] = max(sum(each.values()) for each in counted)
    assert counts[size] <= counts[4], counts
    assert counts[4] <= 24, counts


def test_transports_and_duplicates_make_as_many_requests_however_many_ranks_they_have(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(meeting, "_FIRST_LOOK", 600.0)
    counts: dict[int, list[int]] = {}
    for size in (2, 12):
        store = dist.HashStore()
        counted = [Counter[str]() for _ in range(size)]

        def make(rank: int, size: int, store: dist.Store, counted: list[Counter[str]]) -> tuple[int, int]:
            place = (CountingStore(store, counted[rank]), rank)
            transport = C10dTransport.among(range(size), "t", 120.0, place=place)
            first = sum(counted[rank].values())
            lane = transport.duplicate()
            second = sum(counted[rank].values())
            lane.barrier()
            lane.close()
            transport.close()
            return first, second - first

        made = by_all(size, lambda rank, n=size, s=store, c=counted: partial(make, rank, n, s, c))  # type: ignore[misc]
        counts[size] = [max(each) for each in zip(*made, strict=True)]
    # The last rank of each phase lets the others go on, by one request more.
    assert all(more <= less + 4 for less, more in zip(counts[2], counts[12], strict=True)), counts
    assert counts[12][1] < counts[12][0], "a duplicate compares nothing that the first transport has compared"


def test_a_rank_that_has_come_twice_is_no_other_rank() -> None:
    store, found = dist.HashStore(), []
    for number in range(3):
        keys = StatusKeys(store, "", min(number, 1), 3)
        keys.arrive(RankState(keys.rank, Identity.own(), number))
    keys = StatusKeys(store, "", 0, 3)
    found.append(meeting.await_all(keys, lambda: keys, Processes(0, 3, {}), time.monotonic() + 60, "60 s"))
    assert found[0] is not None and found[0].ranks == (2,) and "ranks [1] came twice" in found[0].text


def test_all_texts_are_gathered_in_rank_order() -> None:
    store = dist.HashStore()
    assert (
        by_all(3, lambda rank: partial(gather, store, "x", rank, 3, f"of {rank}")) == [[b"of 0", b"of 1", b"of 2"]] * 3
    )
