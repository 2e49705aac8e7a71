"""The transport between processes of MPI, by mpi4py, for clusters whose network or launcher needs MPI."""

from __future__ import annotations

import hashlib
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor

from ..base.errors import TransportError
from ._side_store import open_store
from ._waiting import wait_until
from .connected import ConnectedTransport
from .links.base import Link
from .links.mpi import MpiLink, load_mpi
from .rendezvous import Connecting, Rendezvous

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["MpiTransport", "of_world"]


@dataclass
class _World:
    """State that transports over the same processes share, for the life of the process.

    Attributes:
        comm: a communicator to duplicate for the transports. Nothing else uses it.
        store: the store through which the ranks watch each other. Rank 0 keeps it.
        made: number of transports made so far.
    """

    comm: MPI.Intracomm
    store: dist.Store
    made: int = 0


_worlds: dict[tuple[int, ...], _World] = {}


@dataclass(frozen=True, kw_only=True)
class _MpiRendezvous(Rendezvous):
    """A rendezvous of processes of MPI.

    Attributes:
        comm: the communicator from which the transport makes its own; None for a single process.
        members: the ranks of ``comm`` that make the transport; None for all.
    """

    comm: MPI.Intracomm | None
    members: tuple[int, ...] | None = None

    def narrowed(self: _MpiRendezvous, ranks: tuple[int, ...], name: str) -> _MpiRendezvous:
        return replace(super().narrowed(ranks, name), members=ranks)


class MpiTransport(ConnectedTransport):
    """This process's end of an MPI communicator. All its processes make it together.

    The transport uses its own communicators and sends bytes only. It adds sums itself, in rank order and in float32.
    CUDA tensors are sent through pinned host memory. ``send`` may wait for the matching ``recv``. A thread that waits
    sleeps.

    The processes watch each other through a TCP store that rank 0 keeps. The system chooses its port, and MPI carries
    its address to the other ranks. So errors name late, stopped and failed ranks like those of ``C10dTransport``. They
    name a dead process only if the launcher lets the others live (Open MPI 4: ``mpirun --enable-recovery``).

    Args:
        comm: which processes; None is ``MPI.COMM_WORLD``.
        timeout: seconds that a call, or making the transport, may wait for other ranks.
        stall_warning: seconds of waiting after which a warning names the stragglers, once per call.
        node: name of this rank's node, equal on the ranks of that node; None: a host and its network.
        checksum: whether messages carry a checksum; None: those between nodes do.

    Raises:
        ConfigError: mpi4py or an MPI library is missing, or MPI was initialized for fewer threads.
        TransportError: not all ranks came in time, or rank 0 cannot be reached.
    """

    _rendezvous: _MpiRendezvous

    def __init__(
        self,
        comm: MPI.Intracomm | None = None,
        timeout: float = 300.0,
        *,
        stall_warning: float = 60.0,
        node: str | None = None,
        checksum: bool | None = None,
    ) -> None:
        mpi = load_mpi()
        comm = mpi.COMM_WORLD if comm is None else comm
        assert comm is not None
        if comm.size == 1:
            alone = _MpiRendezvous(store=dist.HashStore(), name="", rank=0, size=1, store_rank=None, comm=None)
            self._open(alone, timeout, stall_warning, node, checksum)
            return
        ranks = _world_ranks(mpi, comm)
        world = _worlds.get(ranks)
        if world is None:
            own = _duplicate(comm, timeout)
            world = _World(own, open_store(comm.rank, timeout, lambda notice: _broadcast(own, notice, timeout)))
            _worlds[ranks] = world
        world.made += 1
        digest = hashlib.sha256(repr(ranks).encode()).hexdigest()[:16]
        rendezvous = _MpiRendezvous(
            store=world.store,
            name=f"fusionlayer/mpi/{digest}/{world.made}",
            rank=comm.rank,
            size=comm.size,
            store_rank=0,
            comm=world.comm,
        )
        self._open(rendezvous, timeout, stall_warning, node, checksum)

    def _make_links(self, connecting: Connecting) -> Iterator[tuple[str, Link]]:
        comm, members = self._rendezvous.comm, self._rendezvous.members
        assert comm is not None
        if members is None:
            comm = _duplicate(comm, self.timeout)
        else:
            # Create_group blocks and cannot be cancelled. That is safe here, because all its ranks have met in the
            # store before and make the same call now.
            comm = comm.Create_group(
                comm.Get_group().Incl(members), zlib.crc32(self._rendezvous.name.encode()) % (1 << 15)
            )
        # A duplicate is made from this transport's own communicator. So two threads may duplicate two transports at
        # once, and their collectives cannot meet on one communicator.
        self._rendezvous = replace(self._rendezvous, comm=comm, members=None)
        yield "cpu", MpiLink(comm, self._rendezvous.name, self.timeout, self._checked)


def of_world(timeout: float, stall_warning: float, ranks_per_node: int | None, checksum: bool | None) -> MpiTransport:
    """Return a transport over all processes of the job."""
    node = None if ranks_per_node is None else f"node {load_mpi().COMM_WORLD.rank // ranks_per_node}"
    return MpiTransport(None, timeout, stall_warning=stall_warning, node=node, checksum=checksum)


def _world_ranks(mpi: Any, comm: MPI.Intracomm) -> tuple[int, ...]:
    """Return the ranks that the processes of ``comm`` have in COMM_WORLD, in the order of ``comm``."""
    group = comm.Get_group()
    ranks = group.Translate_ranks(range(group.size), mpi.COMM_WORLD.Get_group())
    return tuple(ranks)


def _duplicate(comm: MPI.Intracomm, timeout: float) -> MPI.Intracomm:
    made, request = comm.Idup()
    _finish(request, comm, timeout)
    return made


def _broadcast(comm: MPI.Intracomm, notice: Tensor, timeout: float) -> None:
    _finish(comm.Ibcast([notice.numpy(), load_mpi().BYTE], 0), comm, timeout)


def _finish(request: MPI.Request, comm: MPI.Intracomm, timeout: float) -> None:
    if not wait_until(request.Test, time.monotonic() + timeout):
        raise TransportError(
            f"rank {comm.rank}: not all {comm.size} ranks came within {timeout:g} s; make the transport on every rank "
            "of the communicator"
        )
