"""Ranks that are processes of torch.distributed, over connections of their own by gloo, NCCL or both."""

from __future__ import annotations

import hashlib
import os
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ..errors import UsageError
from ._gloo import GlooLink
from ._link import Link
from ._linked import LinkedTransport, Rendezvous
from ._nccl import NcclLink

__all__ = ["C10dTransport"]

_made: weakref.WeakKeyDictionary[dist.ProcessGroup, Counter[tuple[int, ...]]] = weakref.WeakKeyDictionary()


@dataclass(frozen=True, kw_only=True)
class _GroupRendezvous(Rendezvous):
    """A rendezvous of processes of torch.distributed.

    Attributes:
        nccl: whether CUDA tensors travel by NCCL.
        gloo: whether CPU tensors travel by gloo.
    """

    nccl: bool
    gloo: bool


class C10dTransport(LinkedTransport):
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
        self._open(_meet_as(group), timeout, stall_warning, node)

    @classmethod
    def among(
        cls,
        ranks: Sequence[int],
        name: str,
        timeout: float = 300.0,
        *,
        stall_warning: float = 60.0,
        node: str | None = None,
        nccl: bool = False,
    ) -> C10dTransport:
        """Return a transport over ranks of the default group, which any thread may make at any time.

        Others are numbered as they are made, so the ranks must make those of the same processes in one order; this one
        is told from all others by its name.

        Args:
            ranks: of the default group, in the order in which the transport numbers them; this process among them.
            name: equal on all its ranks, and never used before among the processes of the default group.
            timeout: as for the constructor.
            stall_warning: as for the constructor.
            node: as for the constructor.
            nccl: whether CUDA tensors travel by NCCL.

        Raises:
            TransportError: not all ranks came in time.
        """
        rendezvous = _GroupRendezvous(
            store=dist.distributed_c10d._get_default_store(),
            name=f"fusionlayer/{name}",
            rank=ranks.index(dist.get_rank()),
            size=len(ranks),
            store_rank=_keeper(ranks),
            nccl=nccl,
            gloo=True,
        )
        made = cls.__new__(cls)
        made._open(rendezvous, timeout, stall_warning, node)
        return made

    _rendezvous: _GroupRendezvous

    def _make_links(self, store: dist.Store) -> Iterator[tuple[str, Link]]:
        if self._rendezvous.gloo:
            yield "cpu", GlooLink(store, self.rank, self.size, self.timeout, self._node)
        if self._rendezvous.nccl:
            yield "cuda", NcclLink(store, self.rank, self.size, self.timeout)


def _meet_as(group: dist.ProcessGroup | None) -> _GroupRendezvous:
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
    return _GroupRendezvous(
        store=store,
        name=f"fusionlayer/{hashlib.sha256(repr(ranks).encode()).hexdigest()[:16]}/{made[ranks]}",
        rank=rank,
        size=len(ranks),
        store_rank=_keeper(ranks),
        nccl=nccl,
        gloo="cpu" in backends or not nccl,
    )


def _keeper(ranks: Sequence[int]) -> int | None:
    """Return the rank of a group whose process keeps the store by which all have met, if one of them does."""
    by_launcher = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return ranks.index(0) if 0 in ranks and not by_launcher else None
