"""How processes connect to make a transport: they find each other by a store, and compare settings."""

from __future__ import annotations

import hashlib
import os
import weakref
from abc import abstractmethod
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TypeVar

import torch

from ..base.errors import ConfigError, PlanMismatch, TransportError
from ..health.heartbeat import Heartbeat
from ..health.state import Finding
from ..launch.stores import await_count
from ..process import forks
from ..process.processes import node_name
from .base import check_subset, group_by_node
from .linked import LinkedTransport, close_all
from .links.base import Link, LinkError
from .links.checksums import checked_peers
from .rendezvous import Connecting, Rendezvous
from .settings import check_equal, gather_settings

Self = TypeVar("Self", bound="ConnectedTransport")


class ConnectedTransport(LinkedTransport):
    """A ``LinkedTransport`` whose processes meet at a rendezvous. Subclasses make its links."""

    _rendezvous: Rendezvous

    def _open(
        self, rendezvous: Rendezvous, timeout: float, stall_warning: float, node: str | None, checksum: bool | None
    ) -> None:
        """Make the transport. The constructors of subclasses call it."""
        self._begin(rendezvous.rank, rendezvous.size, timeout)
        self._rendezvous = rendezvous
        self._stall_warning = stall_warning
        self._node = node_name() if node is None else node
        self._checksum = checksum
        self._checked: frozenset[int] = frozenset()
        self._duplicates = 0
        self._subsets: Counter[tuple[int, ...]] = Counter()
        self._dropped: weakref.finalize[..., ConnectedTransport] | None = None
        if self.size > 1:
            _live.add(self)
            self._connect()

    @abstractmethod
    def _make_links(self, connecting: Connecting) -> Iterator[tuple[str, Link]]:
        """Connect to the other ranks, which call it too; yield each link with the device type that it serves."""

    def duplicate(self: Self) -> Self:
        self._check_open()
        return self._another(self._rendezvous.renamed(self._next_name()))

    def shared_duplicate(self: Self) -> Self:
        self._check_open()
        return self._another(replace(self._rendezvous, name=self._next_name()))

    def _next_name(self) -> str:
        self._duplicates += 1
        return f"{self._rendezvous.name}/{self._duplicates}"

    def subset(self: Self, ranks: Sequence[int]) -> Self:
        """Return a transport over some of the ranks, including this one, numbered in the order given.

        Those ranks call it together, with the same ``ranks``. Other ranks do not call it.
        """
        self._check_open()
        check_subset(ranks, self.rank, self.size)
        chosen = tuple(ranks)
        self._subsets[chosen] += 1
        part = f"{hashlib.sha256(repr(chosen).encode()).hexdigest()[:16]}/{self._subsets[chosen]}"
        return self._another(self._rendezvous.narrowed(chosen, f"{self._rendezvous.name}/{part}"))

    def begin_child(self) -> None:
        """Refuse every call from now on: this process was forked, and the connections are its parent's."""
        for link in self._links.values():
            forks.keep(link)
        self._links.clear()
        self._awaits_device = False
        self._watch = None
        self._failure = forks.refuse("the transport belongs to its parent")

    def _another(self: Self, rendezvous: Rendezvous) -> Self:
        made = type(self).__new__(type(self))
        made._open(rendezvous, self.timeout, self._stall_warning, self._node, self._checksum)
        return made

    def _connect(self) -> None:
        """Find the other ranks through the store and connect to them."""
        links = self._links
        connecting = Connecting(
            self._rendezvous,
            "a transport",
            self.timeout,
            self._stall_warning,
            is_overdue=lambda: any(link.overdue() for link in [*links.values()]),
            interrupt=lambda: close_all(links, has_failed=True),
        )
        self._watch = watch = connecting.watch
        with self._linking(connecting):
            if self._rendezvous.nodes is None:
                given = self.rank, self.size, self._node, self._common()
                self._settle(*connecting.run(lambda store: gather_settings(store, *given)))
            else:
                self._nodes = self._rendezvous.nodes
            self._checked = checked_peers(self._checksum, self.rank, self.nodes)
            for device, link in self._make_links(connecting):
                links[device] = link
                self._queues |= link.only_queues
        connecting.end()
        self._rendezvous = replace(self._rendezvous, known=dict(watch.processes.of), nodes=self.nodes)
        # A transport that is dropped without close() must not leave its peers waiting. Not at exit: the monitor ends
        # its watches itself then.
        self._dropped = weakref.finalize(self, _abandon, links, watch)
        self._dropped.atexit = False

    def connect_device(self, device: torch.device) -> None:
        if not self._awaits_device:
            return
        self._check_open()
        if torch.cuda.is_current_stream_capturing():
            return  # the call that follows is refused
        self._awaits_device = False
        name = f"{self._rendezvous.name}/{device.type}"
        connecting = Connecting(
            replace(self._rendezvous, name=name), f"connections of {device}", self.timeout, self._stall_warning
        )
        with self._linking(connecting):
            for kind, link in self._make_device_links(connecting, device):
                self._links[kind] = link  # the monitor's thread copies the links before it looks at each
        connecting.end()
        connecting.watch.end()

    def _make_device_links(self, connecting: Connecting, device: torch.device) -> Iterator[tuple[str, Link]]:
        """Like ``_make_links``, for tensors on ``device``, after ``_awaits_device`` announced such links."""
        raise AssertionError(f"{type(self).__name__} has no links of its own for {device}")

    @contextmanager
    def _linking(self, connecting: Connecting) -> Iterator[None]:
        """Let the body make links; wait until all ranks have theirs. An error closes the transport."""
        try:
            yield
            # A rank whose links are complete may end its transport at once. Others are then still connecting among
            # themselves, and take a closed connection for a failure of all.
            connecting.run(lambda store: await_count(store, "linked", self.size))
        except (ConfigError, PlanMismatch):  # every rank raises it
            self.close()
            raise
        except (LinkError, RuntimeError) as error:
            finding = connecting.find_cause(error)
            failure = connecting.error(finding)
            self._shut(failure, finding)
            connecting.watch.end(finding)
            raise failure from error

    def _common(self) -> dict[str, object]:
        """Return the settings that must be equal on all ranks."""
        return {"checksum": self._checksum}

    def _settle(self, nodes: Sequence[str], every: Sequence[Mapping[str, object]]) -> None:
        """Compare the settings of all ranks."""
        check_equal(self.rank, every)
        self._nodes = group_by_node(nodes)

    def _shut(self, failure: TransportError, finding: Finding | None) -> None:
        super()._shut(failure, finding)
        if self._dropped is not None:
            # Python may drop the transport anywhere, even in the monitor's own code, where ending the watch again would
            # wait for the monitor's lock.
            self._dropped.detach()


_live: weakref.WeakSet[ConnectedTransport] = weakref.WeakSet()


def _begin_child() -> None:
    for transport in list(_live):
        transport.begin_child()


os.register_at_fork(after_in_child=_begin_child)


def _abandon(links: Mapping[str, Link], watch: Heartbeat) -> None:
    close_all(links)
    watch.end()
