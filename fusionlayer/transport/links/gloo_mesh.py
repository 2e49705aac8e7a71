"""Connections of gloo to all other ranks, which the links of several transports share."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .base import LinkError
from .gloo_store import GlooStore
from .proof import prove

NEVER_SENT = 0x7FFFFFFF
"""A tag that no message has."""

# Bytes of a rank's listening address, and of the length before it.
_ADDRESS_BYTES, _LENGTH_BYTES = 1024, 8


class GlooMesh:
    """A gloo group that no other code uses. Each link over it has tags of its own, so their messages never match.

    gloo cannot end a single message: a wait that times out closes all connections. So a link whose call fails ends the
    others, here and on the other ranks, which then report the cause. One that is closed between two calls ends none,
    and the last one closes the connections.

    Attributes:
        group: what sends and receives. Any: torch's type stubs lack some of its methods.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, seconds: float) -> None:
        self._rank, self._size = rank, size
        # Guards the next two: links are closed on several threads, and only one of them may shut the group down.
        self._lock = threading.Lock()
        self._is_open = True
        self._links = 0
        self._store = GlooStore(store, size)  # kept, because gloo's reference to it does not keep its Python part
        place = dist.PrefixStore("gloo", self._store)
        self.group: Any = dist.ProcessGroupGloo(place, rank, size, timedelta(seconds=seconds))
        self._store.detach()

    def join(self) -> None:
        """Count a link that uses the connections."""
        with self._lock:
            if not self._is_open:
                raise LinkError(self._rank, "the connections are closed")
            self._links += 1

    def leave(self, *, failed: bool) -> None:
        """Close the connections after the last link, and at once if its call has ``failed``. Never waits for peers."""
        with self._lock:
            self._links -= 1
            is_over = self._is_open and (failed or self._links == 0)
            self._is_open = self._is_open and not is_over
        if is_over:
            self._shut()

    def _shut(self) -> None:
        group = self.group
        for step in range(1, self._size):
            peer = (self._rank + step) % self._size
            try:
                # gloo closes all connections of a group when a receive times out, so this one is made to time out.
                group.recv([torch.empty(1, device="cpu")], peer, NEVER_SENT).wait(timedelta(milliseconds=1))
            except RuntimeError as error:
                if "Timed out" in str(error):
                    break
        # The group's threads may be in a collective until it times out, and the group's destructor waits for them. A
        # thread of its own drops the last reference, so that close() does not wait for it.
        last: list[Any] = [group]
        self.group = None
        del group
        ending = threading.Thread(target=last.clear, name="fusionlayer gloo", daemon=True)
        ending.start()
        # A daemon thread that is still in the destructor when Python exits aborts the process. So wait a moment.
        ending.join(1.0)


def connect_over(
    gather: Callable[[Tensor], list[Tensor]], rank: int, size: int, deadline: float, place: str
) -> GlooMesh:
    """Return more connections between ranks that are connected, which prove over them that they have the job key."""

    def swap(mine: bytes) -> list[bytes]:
        text = len(mine).to_bytes(_LENGTH_BYTES, "little") + mine
        row = torch.frombuffer(bytearray(text.ljust(_ADDRESS_BYTES, b"\0")), dtype=torch.uint8)
        said = [each.numpy().tobytes() for each in gather(row)]
        return [each[_LENGTH_BYTES:][: int.from_bytes(each[:_LENGTH_BYTES], "little")] for each in said]

    def gather_anew(mine: Tensor) -> list[Tensor]:
        every = list(mine.new_empty(size, mine.numel()).unbind(0))
        mesh.group.allgather([every], [mine]).wait(timedelta(seconds=max(deadline - time.monotonic(), 0.001)))
        return every

    mesh = GlooMesh(_ExchangedStore(swap), rank, size, max(deadline - time.monotonic(), 0.001))
    prove(gather_anew, rank, place)
    return mesh


class _ExchangedStore(dist.Store):
    """A store for one ``GlooMesh``, whose ranks exchange their addresses over connections that they have."""

    def __init__(self, swap: Callable[[bytes], list[bytes]]) -> None:
        super().__init__()
        self._swap = swap
        self._mine: dict[str, bytes] = {}

    def set(self, key: str, value: bytes) -> None:  # type: ignore[override]  # torch's stubs know text alone
        """Note what this rank has to say."""
        self._mine[key] = value

    def add(self, key: str, amount: int) -> int:
        """Count nothing: an exchange waits for all ranks."""
        return 0

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait for nothing."""

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """Return what each rank says."""
        (mine,) = (self._mine[key] for key in keys if key in self._mine)
        return self._swap(mine)
