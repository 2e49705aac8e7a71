"""The keys of a store in which ranks report their positions and failures."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from datetime import timedelta

import torch.distributed as dist

from ..process.processes import Identity
from .state import Finding, RankState, decode, decode_finding, encode

_logger = logging.getLogger("fusionlayer")


class StatusKeys:
    """The status keys of the ranks of one transport, one meeting or one watched job.

    Four kinds: ``at/RANK`` has the last state of a rank, ``ask`` the last question to all, ``cause`` the first cause of
    a failure, and ``left`` counts ranks that have left. Ranks that meet have three more: ``here`` counts them,
    ``here/N`` has the first state of the Nth rank, and ``met`` lets all of them continue. Any value is survived, since
    any process that reaches the store can write. Every method may raise RuntimeError: the store does not answer.

    Args:
        store: a client of the store that only one thread uses at a time.
        name: prefix of the keys; only these ranks use it, and it is equal on all of them.
        rank: this rank.
        size: number of ranks.

    Attributes:
        name, rank, size: as given.
        others: all ranks but this one.
        keys: keys under the prefix that others have set, and that no rank needs once all have left.
        complains: whether to warn of a value that is missing or makes no sense: once, and not while this rank leaves,
            because the last one to leave may delete the keys at any time. Any thread may set it.
    """

    def __init__(self, store: dist.Store, name: str, rank: int, size: int) -> None:
        self.name, self.rank, self.size = name, rank, size
        self.others = [other for other in range(size) if other != rank]
        self.keys: set[str] = set()
        self._store = store
        self.complains = True

    def use(self, store: dist.Store) -> None:
        """Read and write through this client of the store from now on."""
        self._store = store

    def begin(self) -> None:
        """Make the keys that all ranks share. Each rank calls it before it reads them."""
        for key in ("ask", "cause"):
            self._store.compare_set(self._key(key), "", "")

    def write(self, state: RankState) -> None:
        """Replace the state of this rank."""
        self._store.set(self._key(f"at/{self.rank}"), encode(state))

    def arrive(self, state: RankState) -> None:
        """Write the first state of this rank, and count the rank. The last rank that comes lets all continue."""
        number = self._store.add(self._key("here"), 1)
        text = encode(state)
        both = [self._key(f"at/{self.rank}"), self._key(f"here/{number}")]
        self._store.multi_set(both, [text, text])  # type: ignore[attr-defined]  # which torch's stubs lack
        if self._store.add(self._key("written"), 1) == self.size:
            self.go_on()

    def go_on(self) -> None:
        """Let all ranks continue that wait for the others: they have come, or there is a cause."""
        self._store.set(self._key("met"), "")

    def wait_for_all(self, seconds: float) -> None:
        """Wait in the store's server until all ranks may continue."""
        self._store.wait([self._key("met")], timedelta(seconds=seconds))

    def arrivals(self, after: int) -> list[RankState | None]:
        """Return the first states of ranks, in the order of their arrival, after the first ``after``.

        None is one that makes no sense.
        """
        count = min(self._store.add(self._key("here"), 0), self.size)
        keys = [self._key(f"here/{number}") for number in range(after + 1, count + 1)]
        if not keys or not self._store.check(keys):  # a rank counts itself before it writes
            return []
        return [decode(text, None, self.size) for text in self._store.multi_get(keys)]

    def have_come(self, ranks: Iterable[int]) -> bool:
        """Return whether all these ranks have written a state."""
        return self._store.check([self._key(f"at/{rank}") for rank in ranks])

    def read(self, ranks: Iterable[int]) -> dict[int, RankState]:
        """Return the last valid states of these ranks."""
        keys = {self._key(f"at/{rank}"): rank for rank in ranks}
        here = list(keys) if keys and self._store.check(list(keys)) else [k for k in keys if self._store.check([k])]
        texts = zip(here, self._store.multi_get(here) if here else [], strict=True)
        states = {keys[key]: decode(text, keys[key], self.size) for key, text in texts}
        return {rank: state for rank, state in states.items() if state is not None}

    def read_all(self, ranks: Iterable[int]) -> dict[int, RankState]:
        """Return the last states of these ranks, which have come; instead of one that makes no sense, an odd one."""
        found, ranks = self.read(ranks), list(ranks)
        if len(found) < len(ranks):
            self.complain("what a rank has written about itself")
        return {rank: found.get(rank) or RankState(rank, Identity.unknown(), -1, life="unreadable") for rank in ranks}

    def ask(self, question: str, before: str | None = None) -> str:
        """Ask the other ranks to write their states again; return the last question."""
        if before is None:
            self._store.set(self._key("ask"), question)
            return question
        return self._store.compare_set(self._key("ask"), before, question).decode(errors="replace")

    def news(self) -> tuple[str, Finding | None]:
        """Return the last question to all ranks, and the first cause of a failure, by one request."""
        keys = [self._key("ask"), self._key("cause")]
        try:
            ask, cause = self._store.multi_get(keys)
        except RuntimeError:
            lost = [key for key in keys if not self._store.check([key])]
            if not lost:
                raise
            self.complain("the question or the cause of a failure")
            for key in lost:
                self._store.set(key, "")
            return "", None
        return ask.decode(errors="replace"), self._found(cause)

    def cause(self) -> Finding | None:
        """Return the first cause of a failure."""
        key = self._key("cause")
        return self._found(self._store.get(key)) if self._store.check([key]) else None

    def settle(self, finding: Finding) -> Finding | None:
        """Make ``finding`` the first cause, unless another rank came first; return the first one."""
        return self._found(self._store.compare_set(self._key("cause"), "", encode(finding)))

    def _found(self, cause: bytes) -> Finding | None:
        finding = decode_finding(cause, self.size) if cause else None
        if cause and finding is None:
            self.complain("the cause of a failure")
        return finding

    def leave(self, has_time: Callable[[], bool] = lambda: True) -> None:
        """Count this rank as left. The last one deletes all keys while it has time: no rank reads them any more."""
        if self._store.add(self._key("left"), 1) == self.size:
            numbers = [f"{kind}/{number}" for number in range(self.size + 1) for kind in ("at", "here")]
            for key in ("ask", "cause", "left", "here", "written", "met", *numbers, *self.keys):
                if has_time():
                    self._store.delete_key(self._key(key))

    def complain(self, what: str) -> None:
        """Warn, once, that a value is missing or makes no sense."""
        if self.complains:
            self.complains = False
            _logger.warning("rank %d: %s is missing in the store or makes no sense", self.rank, what)

    def _key(self, key: str) -> str:
        return f"{self.name}/{key}"


def lost_store(store: dist.Store, store_rank: int | None) -> Finding:
    """Return the finding for a store that does not answer. ``store_rank``: the rank that keeps it, if one does."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    if not isinstance(store, dist.TCPStore):
        return Finding("store", (), f"the {type(store).__name__} by which the ranks met does not answer")
    place = f"the store at {store.host}:{store.port}"
    if store_rank is None:
        return Finding("store", (), f"{place}, kept by the launcher, does not answer")
    return Finding("store", (store_rank,), f"{place}, kept by rank {store_rank}, does not answer")
