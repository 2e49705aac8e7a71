"""The transport between the processes of a running Horovod, for jobs that use Horovod already."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import torch.distributed as dist
from torch import Tensor

from ..base.errors import TransportError, UsageError
from ._side_store import open_store
from ._waiting import wait_until
from .connected import ConnectedTransport
from .links.base import Link
from .links.horovod import HorovodLink, import_horovod, load_horovod
from .rendezvous import Connecting, Rendezvous

__all__ = ["HorovodTransport", "of_world"]

# The store that all transports of this process share, and the number of transports made so far. The number makes their
# names unique, so all processes must make transports in the same order.
_store: dist.Store | None = None
_made = 0


class HorovodTransport(ConnectedTransport):
    """This process's end of all processes of Horovod. All make it together, after ``horovod.torch.init()``.

    Everything is sent by Horovod's all-to-all of bytes, CUDA tensors through pinned host memory. Horovod has no
    operation between two ranks alone, so ``send`` and ``recv`` raise ``UsageError``. The processes watch each other
    through a TCP store that rank 0 keeps.

    Args:
        timeout: seconds that a call, or making the transport, may wait for other ranks.
        stall_warning: seconds of waiting after which a warning names the stragglers, once per call.
        node: name of this rank's node, equal on the ranks of that node; None: a host and its network.
        checksum: whether messages carry a checksum; None: those between nodes do.

    Raises:
        ConfigError: Horovod is not installed for this torch.
        UsageError: Horovod is not initialized.
        TransportError: not all ranks came in time, or rank 0 cannot be reached.
    """

    def __init__(
        self,
        timeout: float = 300.0,
        *,
        stall_warning: float = 60.0,
        node: str | None = None,
        checksum: bool | None = None,
    ) -> None:
        global _store, _made
        hvd = load_horovod()
        if _store is None and hvd.size() > 1:
            _store = open_store(hvd.rank(), timeout, lambda notice: _broadcast(notice, timeout))
        _made += 1
        name = f"fusionlayer/horovod/{_made}"
        store = _store or dist.HashStore()
        rendezvous = Rendezvous(store=store, name=name, rank=hvd.rank(), size=hvd.size(), store_rank=0)
        self._open(rendezvous, timeout, stall_warning, node, checksum)

    def send(self, x: Tensor, to: int, tag: int = 0) -> None:
        raise UsageError("Horovod has no message from one rank to another alone; use exchange, or transport 'c10d'")

    def recv(self, x: Tensor, source: int, tag: int = 0) -> None:
        self.send(x, source, tag)

    def subset(self, ranks: Sequence[int]) -> HorovodTransport:
        """Raise ``UsageError``: Horovod's all-to-all always involves all its processes."""
        raise UsageError("Horovod's transport is one of all processes; use transport 'c10d' for some of them")

    def _make_links(self, connecting: Connecting) -> Iterator[tuple[str, Link]]:
        yield "cpu", HorovodLink(self._rendezvous.name, self.timeout, self._checked)


def of_world(
    timeout: float, stall_warning: float, ranks_per_node: int | None, checksum: bool | None
) -> HorovodTransport:
    """Return a transport over all processes of the job. It initializes Horovod if needed."""
    hvd = import_horovod()
    if not hvd.is_initialized():
        hvd.init()
    node = None if ranks_per_node is None else f"node {hvd.rank() // ranks_per_node}"
    return HorovodTransport(timeout, stall_warning=stall_warning, node=node, checksum=checksum)


def _broadcast(notice: Tensor, timeout: float) -> None:
    hvd = load_horovod()
    handle = hvd.broadcast_async_(notice, 0, name="fusionlayer/horovod/store")
    if not wait_until(lambda: bool(hvd.poll(handle)), time.monotonic() + timeout):
        raise TransportError(
            f"rank {hvd.rank()}: not all {hvd.size()} ranks came within {timeout:g} s; make the transport on each"
        )
    hvd.synchronize(handle)
