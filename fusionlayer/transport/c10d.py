"""The transport between processes of torch.distributed, over gloo and NCCL connections of its own."""

from __future__ import annotations

import hashlib
import itertools
import logging
import os
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from types import MappingProxyType

import torch
import torch.distributed as dist
from torch import Tensor

from ..base.errors import TransportError, UsageError, require
from ..launch.stores import gather
from ..process.processes import Identity
from .connected import ConnectedTransport
from .devices import check_devices
from .links.base import Link, LinkError
from .links.faster import is_faster
from .links.gloo import GlooLink
from .links.gloo_mesh import GlooMesh
from .links.nccl import NcclLink
from .links.peer import PeerLink
from .links.peer_memory import Gather, OutOfReach
from .links.proof import prove, prove_link
from .links.socket_options import SocketOptions
from .links.sockets import SocketLink
from .rendezvous import Connecting, Rendezvous

_logger = logging.getLogger("fusionlayer")

# Number of transports made so far over the same ranks, for each default group. It makes their names unique.
_made: weakref.WeakKeyDictionary[dist.ProcessGroup, Counter[tuple[int, ...]]] = weakref.WeakKeyDictionary()
# The processes that have met to make a default group: one may be lost before it comes to make a transport.
_met: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[int, Identity]] = weakref.WeakKeyDictionary()


@dataclass(frozen=True, kw_only=True)
class _GroupRendezvous(Rendezvous):
    """A rendezvous of processes of torch.distributed.

    Attributes:
        nccl: whether CUDA tensors are sent by NCCL.
        sockets: how connections of our own are made, which take the place of gloo and NCCL; None: there are none.
        pays: whether they are faster than gloo; None: that was not measured yet.
        peer_bytes: see ``Transport``.
        peers_pay: whether messages by peer memory are faster than by NCCL; None: that was not measured yet.
        mesh: connections of gloo between just these ranks, which shared duplicates use; None: there are none yet.
    """

    nccl: bool
    sockets: SocketOptions | None = None
    pays: bool | None = None
    peer_bytes: int = 0
    peers_pay: bool | None = None
    mesh: GlooMesh | None = None

    def renamed(self, name: str) -> _GroupRendezvous:
        return replace(super().renamed(name), mesh=None)

    def narrowed(self, ranks: tuple[int, ...], name: str) -> _GroupRendezvous:
        return replace(super().narrowed(ranks, name), mesh=None)


class C10dTransport(ConnectedTransport):
    """This process's end of a group of processes. All of them make it together.

    The transport makes its own connections; the given group only says which processes. CPU tensors are sent by gloo.
    CUDA tensors are sent by NCCL if the group has NCCL, else through pinned host memory. The ranks connect by NCCL in
    their first collective call with a CUDA tensor, on that tensor's device (``connect_device``). Over gloo, ``send``
    may wait for the matching ``recv``. Over NCCL, calls return before the device has done the work, so a later call
    reports a failed peer.

    Args:
        group: which processes; None is the default group.
        timeout: seconds that a call, or making the transport, may wait for other ranks.
        stall_warning: seconds of waiting after which a warning names the stragglers, once per call.
        node: name of this rank's node, equal on the ranks of that node; None: a host and its network.
        checksum: whether messages carry a checksum; None: those between nodes do, NCCL's excepted. NCCL carries none,
            so with True CUDA tensors are sent through pinned host memory.
        sockets: sends all tensors by connections of our own, those of CUDA through pinned host memory. Given
            on all ranks, with one number of connections; None: by gloo and NCCL.
        peer_bytes: bytes of each rank's device that ranks of one host share for messages, if that is faster than NCCL,
            and as much again for sums in one launch; 0: NCCL alone.

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
        checksum: bool | None = None,
        sockets: SocketOptions | None = None,
        peer_bytes: int = 0,
    ) -> None:
        place = replace(_next_rendezvous(group), sockets=sockets, peer_bytes=peer_bytes)
        self._open(place, timeout, stall_warning, node, checksum)

    @classmethod
    def among(
        cls,
        ranks: Sequence[int],
        name: str,
        timeout: float = 300.0,
        *,
        stall_warning: float = 60.0,
        node: str | None = None,
        checksum: bool | None = None,
        sockets: SocketOptions | None = None,
        peer_bytes: int = 0,
        nccl: bool = False,
        place: tuple[dist.Store, int] | None = None,
        known: Mapping[int, Identity] = MappingProxyType({}),
    ) -> C10dTransport:
        """Return a transport over ranks of the default group. Any thread may make it at any time.

        The ranks find each other by ``name``. The constructor numbers transports instead, so all ranks must use it in
        the same order.

        Args:
            ranks: ranks of the default group, including this process, in the order in which the transport numbers them.
            name: equal on all these ranks, and never used before among the processes of the default group.
            timeout: as for the constructor.
            stall_warning: as for the constructor.
            node: as for the constructor.
            checksum: as for the constructor.
            sockets: as for the constructor.
            peer_bytes: as for the constructor.
            nccl: whether CUDA tensors are sent by NCCL.
            place: the store in which the ranks find each other, and this process's rank; None: the ranks of the default
                group.
            known: known processes of other ranks of the transport: the end of one before it comes is seen at once.

        Raises:
            TransportError: not all ranks came in time.
        """
        store, rank = place or (dist.distributed_c10d._get_default_store(), dist.get_rank())
        rendezvous = _GroupRendezvous(
            store=store,
            name=f"fusionlayer/{name}",
            rank=ranks.index(rank),
            size=len(ranks),
            store_rank=_store_rank(ranks),
            nccl=nccl,
            known=known,
            sockets=sockets,
            peer_bytes=peer_bytes,
        )
        made = cls.__new__(cls)
        made._open(rendezvous, timeout, stall_warning, node, checksum)
        return made

    _rendezvous: _GroupRendezvous

    def _common(self) -> dict[str, object]:
        sockets = self._rendezvous.sockets
        name = "c10d" if sockets is None else "auto" if sockets.only_if_faster else "sockets"
        common = {"transport": name, "sees_cuda": self._rendezvous.nccl, "peer_bytes": self.peer_bytes}
        for each in ("connections", "authenticate", "encrypt"):
            common[each] = sockets and getattr(sockets, each)
        return super()._common() | common

    @property
    def peer_bytes(self) -> int:  # type: ignore[override]
        """Bytes of each rank's device that messages by peer memory, and sums in one launch, may take each."""
        return self._rendezvous.peer_bytes

    def _make_links(self, connecting: Connecting) -> Iterator[tuple[str, Link]]:
        sockets = self._rendezvous.sockets
        by_nccl = self._rendezvous.nccl and not self._checksum and (sockets is None or sockets.only_if_faster)
        self._awaits_device = self._queues = by_nccl
        if sockets is not None and not sockets.only_if_faster:
            yield "cpu", self._own_link(connecting, sockets)
        elif sockets is not None:
            yield "cpu", self._faster_link(connecting, sockets)
        else:
            yield "cpu", self._gloo_link(connecting)

    def _make_device_links(self, connecting: Connecting, device: torch.device) -> Iterator[tuple[str, Link]]:
        connecting.run(lambda store: check_devices(store, self.rank, self.size, device))
        store = connecting.waiting_store()
        link = connecting.run(lambda _: NcclLink(store, self.rank, self.size, self.timeout, device))
        yield "cuda", link
        if self.peer_bytes and len(self.nodes) == 1:
            with torch.cuda.device(device):
                yield from self._over_peers(connecting, link)

    def _over_peers(self, connecting: Connecting, link: Link) -> Iterator[tuple[str, Link]]:
        """Yield a link over the memory of the ranks' devices; then ``link`` again, if it is as fast. As all ranks do.

        So the measured link has a watch, like every link.
        """
        pays = self._rendezvous.peers_pay
        if pays is not False:
            gather, where = self._gather_by(connecting), link.device.type
            try:
                peers = PeerLink(link, self.rank, self.size, self.timeout, self.peer_bytes, gather)
            except OutOfReach as problem:
                pays = False
                _logger.warning(
                    "messages are sent by NCCL, as a rank cannot reach the memory of the others: %s", problem
                )
            else:
                yield where, peers
                if pays is None:
                    pays = is_faster(peers, link, self.rank, self.size, ("copies out of the peers' memory", "NCCL"))
                if not pays:
                    yield where, link
        self._rendezvous = replace(self._rendezvous, peers_pay=pays)

    def _gather_by(self, connecting: Connecting) -> Gather:
        """Return a function with which the ranks exchange data to connect."""
        turns = itertools.count()

        def gather_from_all(mine: bytes) -> list[bytes]:
            name = f"peers/{next(turns)}"

            def swap(store: dist.Store) -> list[bytes]:
                told = gather(store, name, self.rank, self.size, mine.hex())
                try:
                    return [bytes.fromhex(each.decode()) for each in told]
                except ValueError:
                    raise TransportError(
                        "what ranks have put into the store about their devices' memory makes no sense"
                    ) from None

            return connecting.run(swap)

        return gather_from_all

    def _gloo_link(self, connecting: Connecting) -> GlooLink:
        mesh, name = self._rendezvous.mesh, self._rendezvous.name
        is_new = mesh is None
        if mesh is None:
            mesh = connecting.run(lambda store: GlooMesh(store, self.rank, self.size, self.timeout))
        place = (self.rank, self.size, self.timeout, self._node)
        link = GlooLink(mesh, name, *place, self._checked, sums_checked=bool(self._checksum))
        if is_new:
            connecting.run(lambda _: prove_link(link, self.rank, self.size, name, self.timeout / 2))
            self._rendezvous = replace(self._rendezvous, mesh=mesh)
        return link

    def _own_link(self, connecting: Connecting, sockets: SocketOptions) -> SocketLink:
        return SocketLink(connecting, self.rank, self.size, self.timeout, self._checked, sockets)

    def _faster_link(self, connecting: Connecting, sockets: SocketOptions) -> Link:
        """Return a link of our own if it is faster than gloo, otherwise gloo's: the same on all ranks."""
        own: SocketLink | None = None
        gloo: GlooLink | None = None
        pays = self._rendezvous.pays
        if pays is not False:
            own = self._own_link(connecting, sockets)
            pays = False if own.is_alone else pays
        if pays is not True:
            gloo = self._gloo_link(connecting)
        if own is not None and gloo is not None and pays is None:
            pays = is_faster(own, gloo, self.rank, self.size)
        self._rendezvous = replace(self._rendezvous, pays=pays)
        taken, dropped = (own, gloo) if pays else (gloo, own)
        if dropped is not None:
            dropped.close()
        assert taken is not None
        return taken


def make_default_group(
    backend: str, store: dist.Store, rank: int, size: int, timeout: float, stall_warning: float
) -> None:
    """Make torch's default process group, of all ranks that meet in ``store``."""
    rendezvous = Rendezvous(
        store=store, name="fusionlayer/group", rank=rank, size=size, store_rank=_store_rank(range(size))
    )
    connecting = Connecting(rendezvous, "the process group", timeout, stall_warning)

    def make(_: dist.Store) -> None:
        # torch keeps the store for good, so it gets the one without a deadline.
        patience = timedelta(seconds=timeout)
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=patience)
        prove(exchange, rank, rendezvous.name)

    def exchange(mine: Tensor) -> list[Tensor]:
        rows = list(mine.new_empty(size, mine.numel()))
        dist.all_gather(rows, mine)
        return rows

    try:
        connecting.run(make)
    except (LinkError, RuntimeError) as error:
        finding = connecting.find_cause(error)
        connecting.watch.end(finding)
        raise connecting.error(finding) from error
    assert dist.group.WORLD is not None
    _met[dist.group.WORLD] = dict(connecting.watch.processes.of)
    connecting.end()
    connecting.watch.end()


def _next_rendezvous(group: dist.ProcessGroup | None) -> _GroupRendezvous:
    """Return the rendezvous at which the processes of a group make their next transport."""
    if not (dist.is_available() and dist.is_initialized()):
        raise UsageError("torch.distributed is not initialized; call torch.distributed.init_process_group() first")
    world = dist.group.WORLD
    assert world is not None
    group = group or world
    if not isinstance(group, int):  # which torch gives a process instead of a group that it is not in
        require(group, dist.ProcessGroup, "group", "a process group of torch.distributed, or None for all ranks")
    rank = dist.get_rank(group)
    if rank < 0:
        raise UsageError("this process is not in the group that was given; make the transport on its members only")
    ranks = tuple(dist.get_process_group_ranks(group))
    made = _made.setdefault(world, Counter())
    made[ranks] += 1
    met = _met.get(world, {})
    backends = dict(entry.split(":") for entry in dist.get_backend_config(group).split(","))
    store = dist.distributed_c10d._get_default_store()
    # A backend of any other name wraps gloo or NCCL, and for CUDA tensors NCCL is the better guess.
    nccl = (
        backends.get("cuda", "gloo") not in ("gloo", "mpi") and dist.is_nccl_available() and torch.cuda.is_available()
    )
    return _GroupRendezvous(
        store=store,
        name=f"fusionlayer/{hashlib.sha256(repr(ranks).encode()).hexdigest()[:16]}/{made[ranks]}",
        rank=rank,
        size=len(ranks),
        store_rank=_store_rank(ranks),
        nccl=nccl,
        known={place: met[other] for place, other in enumerate(ranks) if other in met},
    )


def _store_rank(ranks: Sequence[int]) -> int | None:
    """Return the rank, within ``ranks``, of the process that keeps the default store; None if none of them does."""
    by_launcher = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return ranks.index(0) if 0 in ranks and not by_launcher else None
