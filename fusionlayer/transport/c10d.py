"""Ranks that are processes of torch.distributed, over connections of their own by gloo, NCCL or both."""

from __future__ import annotations

import hashlib
import os
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import TransportError, UsageError
from ._base import Transport
from ._calls import Call, nbytes
from ._gloo import GlooLink
from ._link import Link, LinkError, Message
from ._nccl import NcclLink
from ._processes import node_name
from ._signs import Finding, lost_store
from ._staging import bring, bring_back, space
from .heartbeat import Watch

__all__ = ["C10dTransport"]

_made: weakref.WeakKeyDictionary[dist.ProcessGroup, Counter[tuple[int, ...]]] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class _Meeting:
    """Where processes find each other, and as what; equal on all of them but for ``rank``.

    Attributes:
        store: by which they met.
        name: of the transport they make, its own within the store.
        rank: this process.
        size: number of processes.
        nccl: whether CUDA tensors travel by NCCL.
        gloo: whether CPU tensors travel by gloo.
        keeper: the rank whose process keeps the store, if one of them does.
    """

    store: dist.Store
    name: str
    rank: int
    size: int
    nccl: bool
    gloo: bool
    keeper: int | None


class C10dTransport(Transport):
    """This process's end of a group of processes; all of them make it together.

    The connections are its own: the given group only says which processes. CUDA tensors travel by NCCL if the group has
    NCCL, else through pinned host memory; CPU tensors by gloo, or through the device if the group has only NCCL. Over
    gloo, ``send`` may wait for the matching ``recv``. Over NCCL, calls return before the device has done them: that a
    peer was lost is then reported by a later call.

    Args:
        group: which processes; None is the default group.
        timeout: seconds that a call, and the making of the transport, may wait for other ranks.
        stall_warning: seconds of waiting after which a warning that names the late ranks is logged, once per call.
        node: what ranks of this one's node have in common; None: a host and its network.

    Raises:
        UsageError: torch.distributed is not initialized, or this process is not in the group.
        TransportError: not all ranks came in time.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        timeout: float = 300.0,
        *,
        stall_warning: float = 60.0,
        node: str | None = None,
    ) -> None:
        self._open(_meet_as(group), timeout, stall_warning, node_name() if node is None else node)

    def _open(self, meeting: _Meeting, timeout: float, stall_warning: float, node: str) -> None:
        self.rank = meeting.rank
        self.size = meeting.size
        self.timeout = timeout
        self._meeting = meeting
        self._stall_warning = stall_warning
        self._node = node
        self._duplicates = 0
        self._subsets: Counter[tuple[int, ...]] = Counter()
        self._failure: TransportError | None = None
        self._links: dict[str, Link] = {}
        self._watch: Watch | None = None
        if self.size > 1:
            self._connect()

    def exchange(self, sends: Sequence[Tensor], recvs: Sequence[Tensor]) -> None:
        call = Call.exchange(self.rank, self.size, sends, recvs)
        with self._in(call, counted=True):
            recvs[self.rank].copy_(sends[self.rank])
            if self.size == 1:
                return
            link = self._link_for(*sends, *recvs)
            sources, targets = bring(sends, link.device), space(recvs, link.device)
            around = [(self.rank + step) % self.size for step in range(1, self.size)]
            key = call.key(self.sequence)
            link.exchange(
                [Message(peer, sources[peer], key) for peer in around if call.sends[peer]],
                [Message(peer, targets[peer], key) for peer in reversed(around) if call.recvs[peer]],
            )
            bring_back(targets, recvs)
            self.bytes_sent += sum(call.sends) - call.sends[self.rank]

    def all_reduce(self, x: Tensor) -> None:
        call = Call.all_reduce(x)
        with self._in(call, counted=True):
            if self.size == 1:
                return
            link = self._link_for(x)
            (near,) = bring([x], link.device)
            link.all_reduce(near.view(-1), call.key(self.sequence))
            bring_back([near], [x])
            self.bytes_sent += 2 * (self.size - 1) * nbytes(x) // self.size

    def broadcast(self, x: Tensor, root: int) -> None:
        call = Call.broadcast(x, root, self.size)
        with self._in(call, counted=True):
            if self.size == 1:
                return
            link = self._link_for(x)
            (near,) = bring([x], link.device)
            link.broadcast(near.view(-1).view(torch.uint8), root, call.key(self.sequence))
            bring_back([near], [x])
            self.bytes_sent += (self.size - 1) * nbytes(x) * (self.rank == root)

    def send(self, x: Tensor, to: int, tag: int = 0) -> None:
        call = Call.send(x, self.rank, to, tag, self.size)
        with self._in(call, counted=False):
            link = self._link_for(x)
            (near,) = bring([x.view(-1).view(torch.uint8)], link.device)
            link.exchange([Message(to, near, call.key())] if near.numel() else [], [])
            self.bytes_sent += nbytes(x)

    def recv(self, x: Tensor, source: int, tag: int = 0) -> None:
        call = Call.recv(x, self.rank, source, tag, self.size)
        with self._in(call, counted=False):
            link = self._link_for(x)
            flat = x.view(-1).view(torch.uint8)
            (near,) = space([flat], link.device)
            link.exchange([], [Message(source, near, call.key())] if near.numel() else [])
            bring_back([near], [flat])

    def duplicate(self) -> C10dTransport:
        self._duplicates += 1
        twin = C10dTransport.__new__(C10dTransport)
        meeting = replace(self._meeting, name=f"{self._meeting.name}/{self._duplicates}")
        twin._open(meeting, self.timeout, self._stall_warning, self._node)
        return twin

    def subset(self, ranks: Sequence[int]) -> C10dTransport:
        self._check_member(ranks)
        chosen = tuple(ranks)
        self._subsets[chosen] += 1
        name = f"{self._meeting.name}/{hashlib.sha256(repr(chosen).encode()).hexdigest()[:16]}/{self._subsets[chosen]}"
        keeper = self._meeting.keeper
        part = C10dTransport.__new__(C10dTransport)
        meeting = replace(
            self._meeting,
            name=name,
            rank=chosen.index(self.rank),
            size=len(chosen),
            keeper=chosen.index(keeper) if keeper in chosen else None,
        )
        part._open(meeting, self.timeout, self._stall_warning, self._node)
        return part

    def close(self) -> None:
        if self._failure is None:
            self._shut(TransportError(f"rank {self.rank}: this transport is closed; make a new one"), None)

    def _node_key(self) -> bytes:
        return hashlib.sha256(self._node.encode()).digest()[:8]

    def _connect(self) -> None:
        """Meet the other ranks and connect to them."""
        meeting, links = self._meeting, self._links
        try:
            watch = Watch(
                meeting.store,
                meeting.name,
                self.rank,
                self.size,
                self.timeout,
                self._stall_warning,
                meeting.keeper,
                is_overdue=lambda: any(link.is_overdue() for link in links.values()),
                interrupt=lambda: _close_all(links),
            )
            failure = watch.meet(self.timeout)
        except RuntimeError as error:
            lost = lost_store(meeting.store, meeting.keeper)
            raise TransportError(f"rank {self.rank}: making a transport: {lost.text}", lost.ranks) from error
        if failure:
            raise TransportError(f"rank {self.rank}: making a transport: {failure.text}", failure.ranks)
        self._watch = watch
        store = dist.PrefixStore(meeting.name, meeting.store)
        try:
            if meeting.gloo:
                links["cpu"] = GlooLink(store, self.rank, self.size, self.timeout)
            if meeting.nccl:
                links["cuda"] = NcclLink(store, self.rank, self.size, self.timeout)
        except RuntimeError as error:
            raise self._fail(LinkError(self.rank, str(error)), "making the transport") from error
        weakref.finalize(self, _abandon, links, watch).atexit = False

    def _link_for(self, *xs: Tensor) -> Link:
        """Return what moves these tensors, which may have to be brought to its device."""
        device = "cuda" if any(x.is_cuda for x in xs) else "cpu"
        return self._links.get(device) or next(iter(self._links.values()))

    @contextmanager
    def _in(self, call: Call, counted: bool) -> Iterator[None]:
        """What surrounds every call: the other ranks can learn of it, and its failure is the end of the transport."""
        self._check_open()
        self.sequence += counted
        if self._watch is None:
            yield
            return
        self._watch.enter(call, self.sequence)
        try:
            yield
        except LinkError as error:
            self._check_open()
            raise self._fail(error, call.what) from error
        except BaseException as error:
            # What the peers have received of this call is unknown, so there can be no next one.
            text = f"rank {self.rank} raised {type(error).__name__}: {error}"
            self._shut(TransportError(text, [self.rank], sequence=self.sequence), Finding((self.rank,), text, True))
            raise
        self._watch.leave()

    def _check_open(self) -> None:
        if self._failure is not None:
            raise TransportError(str(self._failure), self._failure.ranks, sequence=self._failure.sequence)

    def _fail(self, error: LinkError, what: str) -> TransportError:
        """Close the transport for what has gone wrong; return the error that says what that was."""
        assert self._watch is not None
        _close_all(self._links)
        finding = self._watch.diagnose()
        if not finding.ranks:
            lost = f"the connection to rank {error.peer} was lost, though its process is alive"
            finding = Finding((error.peer,), finding.text or lost, True)
        failure = TransportError(
            f"rank {self.rank}: collective {self.sequence} ({what}): {finding.text}",
            finding.ranks,
            sequence=self.sequence,
        )
        self._shut(failure, finding)
        return failure

    def _shut(self, failure: TransportError, finding: Finding | None) -> None:
        """Make every later call raise ``failure``, and leave word of the finding, if it was one that ends it."""
        self._failure = failure
        _close_all(self._links)
        if self._watch is not None:
            self._watch.end(finding)


def _close_all(links: Mapping[str, Link]) -> None:
    for link in links.values():
        link.close()


def _abandon(links: Mapping[str, Link], watch: Watch) -> None:
    _close_all(links)
    watch.end()


def _meet_as(group: dist.ProcessGroup | None) -> _Meeting:
    """Return where the processes of a group find each other for one more transport."""
    if not (dist.is_available() and dist.is_initialized()):
        raise UsageError("torch.distributed is not initialized; call torch.distributed.init_process_group() first")
    world = dist.group.WORLD
    assert world is not None
    group = group or world
    rank = dist.get_rank(group)
    if rank < 0:
        raise UsageError("this process is not in the group that was given; make the transport on its members only")
    ranks = tuple(dist.get_process_group_ranks(group))
    made = _made.setdefault(world, Counter())
    made[ranks] += 1
    backends = dict(entry.split(":") for entry in dist.get_backend_config(group).split(","))
    store = dist.distributed_c10d._get_default_store()
    # A backend of another name wraps one of the two, and moves CUDA tensors best as NCCL does.
    nccl = (
        backends.get("cuda", "gloo") not in ("gloo", "mpi") and dist.is_nccl_available() and torch.cuda.is_available()
    )
    by_launcher = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return _Meeting(
        store,
        f"fusionlayer/{hashlib.sha256(repr(ranks).encode()).hexdigest()[:16]}/{made[ranks]}",
        rank,
        len(ranks),
        nccl=nccl,
        gloo="cpu" in backends or not nccl,
        keeper=ranks.index(0) if 0 in ranks and not by_launcher else None,
    )
