"""Ranks that are processes of MPI, by mpi4py: for clusters whose network, or whose launcher, wants it."""

from __future__ import annotations

import hashlib
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor

from ..errors import TransportError
from ._link import Link
from ._linked import LinkedTransport, Rendezvous
from ._mpi_link import MpiLink, load_mpi
from ._side_store import open_store
from ._waiting import wait_until

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["MpiTransport", "of_world"]


@dataclass
class _World:
    """What transports over the same processes have in common; kept for the life of the process.

    Attributes:
        comm: a communicator of their own, from which theirs are made.
        store: by which they watch each other; rank 0 keeps it.
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
        comm: the communicator of which the transport's own is made.
        members: which of its ranks make it; None for all.
    """

    comm: MPI.Intracomm | None
    members: tuple[int, ...] | None = None

    def narrowed(self: _MpiRendezvous, ranks: tuple[int, ...], name: str) -> _MpiRendezvous:
        return replace(super().narrowed(ranks, name), members=ranks)


class MpiTransport(LinkedTransport):
    """This process's end of an MPI communicator; all its processes make it together.

    Traffic is on communicators of its own, as bytes; sums are added here, in rank order and float32. CUDA tensors
    travel through pinned host memory. ``send`` may wait for the matching ``recv``. A thread that waits sleeps.

    The processes watch each other through a TCP store that rank 0 keeps, at a port that the system chooses and an
    address that MPI carries to the others. So late, stopped and erring ranks are named as by ``C10dTransport``. A
    process that dies is named only if the launcher lets the others live (Open MPI 4: ``mpirun --enable-recovery``).

    Args:
        comm: which processes; None is ``MPI.COMM_WORLD``.
        timeout: seconds that a call, and the making of the transport, may wait for other ranks.
        stall_warning: seconds of waiting after which a warning that names the late ranks is logged, once per call.
        node: what ranks of this one's node have in common; None: a host and its network.

    Raises:
        ConfigError: no mpi4py, no MPI library, or one that was initialized for a single thread.
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
    ) -> None:
        mpi = load_mpi()
        comm = mpi.COMM_WORLD if comm is None else comm
        assert comm is not None
        if comm.size == 1:
            alone = _MpiRendezvous(store=dist.HashStore(), name="", rank=0, size=1, store_rank=None, comm=None)
            self._open(alone, timeout, stall_warning, node)
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
        self._open(rendezvous, timeout, stall_warning, node)

    def _make_links(self, store: dist.Store) -> Iterator[tuple[str, Link]]:
        comm, members = self._rendezvous.comm, self._rendezvous.members
        assert comm is not None
        if members is None:
            comm = _duplicate(comm, self.timeout)
        else:
            # It cannot be given up, but all its ranks have come by now: they have met in the store.
            comm = comm.Create_group(
                comm.Get_group().Incl(members), zlib.crc32(self._rendezvous.name.encode()) % (1 << 15)
            )
        # Two threads may duplicate two transports, each on the communicator of its own.
        self._rendezvous = replace(self._rendezvous, comm=comm, members=None)
        yield "cpu", MpiLink(comm, self._rendezvous.name, self.timeout)


def of_world(timeout: float, stall_warning: float, ranks_per_node: int | None) -> MpiTransport:
    """Return a transport over all processes of the job. ``ranks_per_node``: None for those of a host."""
    node = None if ranks_per_node is None else f"node {load_mpi().COMM_WORLD.rank // ranks_per_node}"
    return MpiTransport(None, timeout, stall_warning=stall_warning, node=node)


def _world_ranks(mpi: Any, comm: MPI.Intracomm) -> tuple[int, ...]:
    """Return the ranks of the processes in COMM_WORLD, in the order of ``comm``."""
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
