"""The store of a process group while its ranks connect."""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta

import torch.distributed as dist

from ..base.errors import TransportError
from ..launch.stores import EndingStore

# Seconds that ranks wait for each other at the end, and that rank 0 then keeps its server.
_PATIENCE, _HEAD_START = 2.0, 0.3


class Meeting(EndingStore):
    """A store whose waits end at a deadline, and which can delete this rank's values.

    gloo leaves its keys behind, and the next group of the same name would connect to addresses that are gone.
    """

    def __init__(self, store: dist.Store, rank: int, ranks: Sequence[int], timeout: timedelta) -> None:
        self._seconds = timeout.total_seconds()
        super().__init__(store, f"group of ranks {list(ranks)}", time.monotonic() + self._seconds)
        self._rank, self._ranks = rank, ranks

    def begin(self) -> str:
        """Wait until all ranks have called it; return a text that no other call returns, equal on all ranks."""
        self.set(f"here/{self._rank}", "")
        keys = [f"here/{rank}" for rank in range(len(self._ranks))]
        try:
            self.wait(keys)
        except RuntimeError as error:
            missing = [rank for rank, key in zip(self._ranks, keys, strict=True) if not self.check([key])]
            raise TransportError(
                f"process group of ranks {list(self._ranks)}: ranks {missing} did not come within {self._seconds:g} s; "
                "make and destroy the same groups in the same order on every rank, above all before "
                "new_group(use_local_synchronization=True), whose name depends on how many groups a rank has",
                missing,
            ) from error
        if self._rank == 0:
            self.set("token", secrets.token_hex(8))
        return self.get("token").decode(errors="replace")

    def forget(self) -> None:
        """Delete this rank's values. The ranks must meet once more before one of them uses the store again."""
        for key in self.written:
            with suppress(RuntimeError):  # the store has gone; so have its keys
                self.delete_key(key)
        self.written.clear()


def part(store: dist.Store, rank: int, size: int) -> None:
    """Wait until rank 0 has ended the store, if the store is a server in its process. All ranks call it at the end.

    A rank that makes the next default group at once would otherwise connect to the server that is about to end. If
    other ranks have yet to come, or rank 0 keeps its server, the wait ends soon.
    """
    server = store
    while isinstance(server, dist.PrefixStore):
        server = server.underlying_store
    by_launcher = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if not isinstance(server, dist.TCPStore) or by_launcher or size == 1:
        return
    with suppress(RuntimeError, OSError):  # others have yet to come, or the server has ended
        if store.add("here", 1) == size:
            store.set("all", "")
        store.wait(["all"], timedelta(seconds=_PATIENCE))
        if rank == 0:
            # A request that fails would make torch log a stack, so rank 0 continues when the others make no more.
            store.wait(["gone"], timedelta(seconds=_PATIENCE))
            for key in ("here", "all", "left", "gone"):
                store.delete_key(key)
            return
        with socket.create_connection((server.host, server.port), _HEAD_START) as connection:
            if store.add("left", 1) == size - 1:
                store.set("gone", "")
            connection.recv(1)  # nothing comes: it ends with the server, or with the time
