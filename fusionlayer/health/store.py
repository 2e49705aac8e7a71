"""The keys of a store by which the ranks of one transport tell each other where they are and why they fail."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch.distributed as dist

from ..process.processes import Identity
from .call_state import UNREADABLE, decode_cause, decode_state, encode_cause
from .evidence import Diagnosis

__all__ = ["StatusKeys"]

_logger = logging.getLogger("fusionlayer")


class StatusKeys:
    """What the ranks of one transport write for each other to read.

    Five kinds of keys: ``who/RANK`` has the process of a rank, ``at/RANK`` the last state of a rank (see ``_states``),
    ``ask`` the last question to all, ``cause`` the first cause of a failure, and ``left`` counts ranks that have left.
    Any value is survived, since whoever reaches the store can write. Every method may raise RuntimeError: the store
    does not answer.

    Args:
        name: prefix of the keys; only this transport uses it, and it is equal on its ranks.
        rank: this rank.
        size: number of ranks.

    Attributes:
        name: as given.
        others: all ranks but this one.
        keys: keys under the prefix that others have set, and that nobody needs once all ranks have left.
        farewell: what this rank's last state says besides; None while it makes calls. Any thread may set it.
    """

    def __init__(self, name: str, rank: int, size: int) -> None:
        self.others = [other for other in range(size) if other != rank]
        self.keys: set[str] = set()
        self.farewell: Mapping[str, Any] | None = None
        self.name, self._rank, self._size = name, rank, size
        self._store: dist.Store
        self._has_complained = False

    def use(self, store: dist.Store) -> None:
        """Read and write by this client of the store from now on."""
        self._store = dist.PrefixStore(self.name, store)

    def begin(self) -> None:
        """Make the keys that all ranks share. Every rank calls it before it writes anything else."""
        self._store.set("ask", "")
        self._store.compare_set("cause", "", "")

    def introduce(self, identity: Identity) -> None:
        """Write which process this rank is."""
        self._store.set(f"who/{self._rank}", identity.encode())

    def have_come(self, ranks: Iterable[int]) -> bool:
        """Return whether all these ranks have written which processes they are."""
        return self._store.check([f"who/{rank}" for rank in ranks])

    def identity(self, rank: int) -> Identity:
        """Return the process of a rank that has come."""
        return Identity.decode(self._store.get(f"who/{rank}"))

    def write_state(self, state: str) -> None:
        """Replace the state of this rank."""
        self._store.set(f"at/{self._rank}", state)

    def read_states(self, ranks: Sequence[int]) -> dict[int, Mapping[str, Any]]:
        """Return the last states that these ranks have written, ``UNREADABLE`` for one that makes no sense."""
        keys = [f"at/{rank}" for rank in ranks]
        try:
            texts = self._store.multi_get(keys)
        except RuntimeError:
            # Either the store is lost, and so is the next call, or a key is, and the others still tell something.
            texts = [self._store.get(key) if self._store.check([key]) else b"" for key in keys]
        states = {rank: decode_state(text, self._size) for rank, text in zip(ranks, texts, strict=True)}
        if UNREADABLE in states.values():
            self._complain("what a rank has written about itself")
        return states

    def ask(self, question: str) -> None:
        """Ask the other ranks to write their states again."""
        self._store.set("ask", question)

    def read_news(self) -> tuple[str, bytes]:
        """Return the last question to all ranks, and the first cause of a failure; b"" is none."""
        try:
            ask, cause = self._store.multi_get(["ask", "cause"])
        except RuntimeError:
            lost = [key for key in ("ask", "cause") if not self._store.check([key])]
            if not lost:
                raise
            self._complain("what ranks ask or tell each other")
            for key in lost:
                self._store.set(key, "")
            return "", b""
        return ask.decode(errors="replace"), cause

    def settle(self, finding: Diagnosis) -> bytes:
        """Make ``finding`` the first cause, unless another rank came first; return the first one."""
        return self._store.compare_set("cause", "", encode_cause(finding.ranks, finding.text))

    def decode(self, cause: bytes) -> Diagnosis | None:
        """Return what a rank has written as the first cause; None if it makes no sense."""
        told = decode_cause(cause, self._size)
        if told is None:
            self._complain("the cause of a failure")
            return None
        return Diagnosis(*told, True)

    def leave(self, has_time: Callable[[], bool]) -> None:
        """Count this rank as left. The last one deletes all keys while it has time: nobody reads them any more."""
        if self._store.add("left", 1) == self._size:
            mine = [f"{kind}/{rank}" for kind in ("at", "who") for rank in range(self._size)]
            for key in ("ask", "cause", "left", *mine, *self.keys):
                if has_time():
                    self._store.delete_key(key)

    def is_left(self) -> bool:
        """Return whether all ranks have left."""
        return not self._store.check(["ask"])

    def _complain(self, what: str) -> None:
        # Once this rank leaves, the last one to leave may delete the keys at any time.
        if not self._has_complained and self.farewell is None:
            self._has_complained = True
            _logger.warning("rank %d: %s is missing in the store or makes no sense", self._rank, what)
