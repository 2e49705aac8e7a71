"""The rendezvous and connections of the processes of one transport, and its end after a failure."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist

from ..base.errors import TransportError
from ..health.calls import Call
from ..health.heartbeat import Heartbeat
from ..health.monitor import monitor
from ..health.state import Finding
from ..launch.stores import EndingStore
from ..process import outages
from ..process.bounded import Overdue, bounded
from ..process.processes import Identity
from .links.base import LinkError

AnyRendezvous = TypeVar("AnyRendezvous", bound="Rendezvous")
Result = TypeVar("Result")

# Seconds by which a meeting may outlast its timeout, so that the ranks that came find the missing ones.
_LAST_LOOK = 1.5


@dataclass(frozen=True, kw_only=True)
class Rendezvous:
    """The rendezvous of the processes of one transport. Equal on all of them, except ``rank``.

    Attributes:
        store: the store through which they find each other.
        name: name of the transport that they make, unique within the store.
        rank: this process.
        size: number of processes.
        store_rank: the rank whose process keeps the store; None if none of them does.
        known: processes of ranks that have met before, by another name.
        nodes: ranks of each node, if just these ranks have compared nodes and settings before; None: they do so.
    """

    store: dist.Store
    name: str
    rank: int
    size: int
    store_rank: int | None
    known: Mapping[int, Identity] = field(default_factory=dict)
    nodes: tuple[tuple[int, ...], ...] | None = None

    def renamed(self: AnyRendezvous, name: str) -> AnyRendezvous:
        """Return a rendezvous of the same processes under another name, for connections of its own."""
        return replace(self, name=name)

    def narrowed(self: AnyRendezvous, ranks: tuple[int, ...], name: str) -> AnyRendezvous:
        """Return a rendezvous of some of the processes, including this one, under another name."""
        store_rank = ranks.index(self.store_rank) if self.store_rank in ranks else None
        known = {place: self.known[rank] for place, rank in enumerate(ranks) if rank in self.known}
        own = ranks.index(self.rank)
        return replace(self, name=name, rank=own, size=len(ranks), store_rank=store_rank, known=known, nodes=None)


class Connecting:
    """The time in which the processes of a rendezvous meet and make their connections.

    A process that fails meanwhile is found: its host checks it, and the others ask by the store.

    Attributes:
        watch: the watch over the ranks, which have met.
        store: for the keys of the connections alone, over a client that no other transport uses until ``end``.
    """

    def __init__(
        self,
        rendezvous: Rendezvous,
        what: str,
        timeout: float,
        stall_warning: float,
        *,
        is_overdue: Callable[[], bool] = lambda: False,
        interrupt: Callable[[], None] = lambda: None,
    ) -> None:
        self._rendezvous = rendezvous
        self._what = what
        self._timeout = timeout
        self._deadline = time.monotonic() + timeout
        self._in_vain = in_vain = threading.Event()

        def give_up() -> None:  # without a reference to self, as the watch keeps it
            in_vain.set()
            interrupt()

        self.watch = Heartbeat(
            rendezvous.store,
            rendezvous.name,
            rendezvous.rank,
            rendezvous.size,
            timeout,
            stall_warning,
            rendezvous.store_rank,
            rendezvous.known,
            is_overdue=is_overdue,
            interrupt=give_up,
        )
        self._client = self._meet()
        self.store = dist.PrefixStore(rendezvous.name, self._client)
        self._ending = EndingStore(self.store, rendezvous.name, self._deadline, in_vain)
        self._ending.written = self._ending.awaited = self.watch.keys.keys
        self.watch.enter(Call(f"making {what}"), 0)

    def run(self, make: Callable[[dist.Store], Result]) -> Result:
        """Return ``make(store)``. It connects to the other ranks, and the store is for its keys alone."""
        watch = self.watch
        try:
            return bounded(
                lambda: make(self._ending),
                self._deadline,
                lambda: self._in_vain.is_set() or watch.processes.see_gone(),
                f"making of {self._what}",
            )
        except Overdue:
            self._in_vain.set()
            raise LinkError(
                self._rendezvous.rank, f"no connections within {self._timeout:g} s; {outages.between_hosts()}"
            ) from None

    def end(self) -> None:
        """Note that the connections are made: no library turns to the store again."""
        self.watch.leave()
        monitor.give_back_meeting_store(self._rendezvous.store, self._client)

    def waiting_store(self) -> dist.Store:
        """Return ``store`` over a client of its own, for a library whose requests wait for keys."""
        own: dist.Store = self._rendezvous.store.clone()  # type: ignore[attr-defined]
        own.set_timeout(timedelta(seconds=self._timeout))
        return dist.PrefixStore(self._rendezvous.name, own)

    def _meet(self) -> dist.Store:
        """Wait for the other ranks; return a client of the store for the connections."""
        watch = self.watch
        try:
            store, finding = bounded(
                lambda: watch.meet(self._timeout), self._deadline + _LAST_LOOK, name="meeting of ranks"
            )
        except Overdue:
            raise self.error(watch.judge_here(is_silent=True)) from None
        except RuntimeError as error:
            raise self.error(self._own(error) or watch.judge_here(is_silent=True)) from error
        if finding:
            raise self.error(finding)
        return store

    def find_cause(self, error: Exception) -> Finding:
        """Return why ``run`` has raised ``error``, as far as this rank can find out."""
        otherwise = Finding("unknown", (), f"all ranks are alive, and yet: {outages.explain(error).text}")
        return self.watch.diagnose(otherwise, known=self._own(error))

    def _own(self, error: Exception) -> Finding | None:
        """Return what has failed in this process, if the error means that."""
        rank, cause = self._rendezvous.rank, outages.explain(error)
        return Finding("failed", (rank,), f"rank {rank} has {cause.text}") if cause.here else None

    def error(self, finding: Finding) -> TransportError:
        """Return the error of a finding."""
        return TransportError(f"rank {self._rendezvous.rank}: making {self._what}: {finding.text}", finding.ranks)
