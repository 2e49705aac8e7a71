"""A store that counts what each rank asks of it, and a clock that passes from one rank's next turn to another's."""

from __future__ import annotations

import heapq
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist

__all__ = ["Clock", "CountingStore"]


class CountingStore(dist.Store):
    """One rank's client of a store that is kept in a dict, with TCPStore's rules.

    Attributes:
        values: what the store has; the clients of all ranks share it.
        requests: number of requests so far.
        nbytes: bytes of keys and values, asked and answered.
        kinds: how often each method was called.
    """

    def __init__(self, values: dict[str, bytes]) -> None:
        super().__init__()
        self.values = values
        self.requests = self.nbytes = 0
        self.kinds: Counter[str] = Counter()

    def clone(self) -> CountingStore:
        return self

    def set_timeout(self, timeout: timedelta) -> None:
        pass

    def _count(self, kind: str, *texts: str | bytes) -> None:
        self.requests += 1
        self.kinds[kind] += 1
        self.nbytes += sum(map(len, texts))

    def set(self, key: str, value: str | bytes) -> None:
        self._count("set", key, value)
        self.values[key] = value.encode() if isinstance(value, str) else value

    def get(self, key: str) -> bytes:
        self._count("get", key, self.values[key])
        return self.values[key]

    def multi_get(self, keys: list[str]) -> list[bytes]:
        if not all(key in self.values for key in keys):
            raise RuntimeError("a key is missing")
        found = [self.values[key] for key in keys]
        self._count("multi_get", *keys, *found)
        return found

    def check(self, keys: list[str]) -> bool:
        self._count("check", *keys)
        return all(key in self.values for key in keys)

    def add(self, key: str, amount: int) -> int:
        self._count("add", key, b"12345678")
        total = int(self.values.get(key, b"0")) + amount
        self.values[key] = str(total).encode()
        return total

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        found = self.values.get(key)
        if found == (expected.encode() or None) or found == expected.encode():
            found = self.values[key] = desired.encode()
        self._count("compare_set", key, expected, desired, found or b"")
        return expected.encode() if found is None else found

    def delete_key(self, key: str) -> bool:
        self._count("delete_key", key)
        return self.values.pop(key, None) is not None


class Clock:
    """A clock that passes when a rank waits: ``modules`` see it as ``time``."""

    def __init__(self, monkeypatch: Any, modules: Sequence[Any]) -> None:
        self.now = 1000.0
        seen = SimpleNamespace(**vars(time))
        seen.monotonic = lambda: self.now
        for module in modules:
            monkeypatch.setattr(module, "time", seen)

    def run(self, turns: Mapping[int, Callable[[], float]], seconds: float) -> None:
        """Give each rank its turns for so long; a turn returns the seconds until the rank's next one."""
        end = self.now + seconds
        due = [(self.now + 0.001 * rank / len(turns), rank) for rank in turns]
        heapq.heapify(due)
        while due[0][0] < end:
            self.now, rank = due[0]
            heapq.heapreplace(due, (self.now + turns[rank](), rank))
        self.now = end
