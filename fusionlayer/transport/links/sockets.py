"""A link over TCP connections of its own, several to each peer, over one or several of this host's interfaces.

It is for links that one connection does not fill: long ones, lossy ones, and several of unequal rates. ``csrc/sockets``
moves the bytes, and tags them with keys of each connection, so that only ranks of the job can make them. Here
connections are made, and made again when they were lost.
"""

from __future__ import annotations

import ctypes
import json
import os
import secrets
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch.distributed as dist

from ...base import libraries
from ...base.job_key import shared_secret
from ...launch.stores import await_count, gather
from ...process import forks
from ...process.processes import node_name
from ..rendezvous import Connecting
from .base import DamagedMessage, LinkError, LinkMessage
from .exchange import ExchangeLink
from .introduction import ConnectionKeys
from .reconnecting import Keeper
from .socket_options import SocketOptions, listeners, places

T = TypeVar("T")

# Bytes to each peer that may be in flight, or wait there for the receiving call: the product of rate and round trip of
# a link of 2.5 Gbit/s and 100 ms.
WINDOW_BYTES = 32 << 20
# Seconds after which ranks continue without connections that cannot be made, if each pair has one.
_ENOUGH = 5.0
_POLL = 0.01
# Seconds in all that a process waits at its exit for its sent data to arrive.
_LAST_WAIT = 5.0

_DONE, _INTERRUPTED, _LATE, _LOST, _DAMAGED, _NONSENSE, _CLOSED, _REFUSED = range(8)
_WHY = {
    _LOST: "its connections are lost",
    _NONSENSE: "what it sends makes no sense",
    _CLOSED: "the connections are closed",
    _REFUSED: "the call before has not ended",
}

_live: weakref.WeakSet[SocketLink] = weakref.WeakSet()


class SocketLink(ExchangeLink):
    """One rank's connections to all others. One thread at a time makes calls; ``close`` may come from any thread.

    Attributes:
        is_alone: whether all ranks are on one host.
        is_sealed: whether what is sent carries tags that only ranks of the job can make, or is encrypted.
    """

    def __init__(
        self,
        connecting: Connecting,
        rank: int,
        size: int,
        timeout: float,
        checked: frozenset[int],
        options: SocketOptions,
    ) -> None:
        super().__init__(rank, size, timeout, checked)
        self._count, self._encrypt = options.connections, options.encrypt
        self._library = libraries.cpu()
        self._result = libraries.LinkResult()
        flags = bytes(peer in checked for peer in range(size))
        self._handle = self._library.fl_link_open(rank, size, self._count, flags, WINDOW_BYTES)
        if not self._handle:
            raise LinkError(rank, "no file is left for the connections")
        self._keeper: Keeper | None = None
        self._is_closed = self.is_alone = self.is_sealed = False
        _live.add(self)
        try:
            connecting.run(lambda store: self._connect(store, options))
        except BaseException:
            self.close()
            raise

    def __del__(self) -> None:
        if self.__dict__.get("_handle"):
            self._library.fl_link_free(self._handle)

    def exchange(
        self, outgoing: Sequence[LinkMessage], incoming: Sequence[LinkMessage], deadline: float | None = None
    ) -> None:
        until = int(min(self._deadline() if deadline is None else deadline, 1e9) * 1e9)
        library, handle, result = self._library, self._handle, self._result
        try:
            status = library.fl_link_exchange(
                handle, _records(outgoing), len(outgoing), _records(incoming), len(incoming), until, result
            )
            while status == _INTERRUPTED:  # between the two calls Python handles the signal
                status = library.fl_link_wait(handle, until, result)
        except BaseException:
            self.close()  # nothing may be written any more to tensors that the caller gives up
            raise
        if status != _DONE:
            raise self._error(status, result.peer, result.nbytes)

    def _error(self, status: int, peer: int, nbytes: int) -> LinkError:
        if status == _DAMAGED:
            return DamagedMessage(peer, self._rank, nbytes, self.is_sealed)  # closed once the other ranks can read why
        self.close()
        why = f"no end within {self._timeout:g} s" if status == _LATE else _WHY[status]
        return LinkError(peer if peer >= 0 else self._rank, why)

    def close(self) -> None:
        self._is_closed = True
        keeper = self._keeper
        self._library.fl_link_close(self._handle, keeper is None)
        if keeper is not None:
            keeper.end()

    def cut(self) -> None:
        """Close at once, even if sent data have not arrived. The keeper's thread calls it."""
        self._library.fl_link_close(self._handle, True)

    def states(self) -> list[list[int]]:
        """Return for each rank the states of its connections: 0 down, 1 up, 2 stalled, 3 the rank has left."""
        return self._table(self._library.fl_link_states, ctypes.c_uint8)

    def sent(self) -> list[list[int]]:
        """Return for each rank the payload bytes that each of its connections has taken."""
        return self._table(self._library.fl_link_sent, ctypes.c_int64)

    def _table(self, fill: ctypes._NamedFuncPointer, kind: type[ctypes._SimpleCData[int]]) -> list[list[int]]:
        cells = (kind * (self._size * self._count))()
        fill(self._handle, cells)
        return [list(map(int, cells[start : start + self._count])) for start in range(0, len(cells), self._count)]

    def tend(self) -> int:
        """Do what is to be done between calls; return how much is not acknowledged. The keeper's thread calls it."""
        left: int = self._library.fl_link_tend(self._handle)
        return left

    def add(self, peer: int, index: int, descriptor: int, keys: ConnectionKeys) -> None:
        """Take a connected socket as connection ``index`` to ``peer``, instead of an earlier one. Any thread."""
        given = keys.sending + keys.receiving if self.is_sealed else None
        self._library.fl_link_add(self._handle, peer, index, descriptor, given, self._encrypt)

    def begin_child(self) -> None:
        """Close this process's copies of the sockets: it was forked, and they are its parent's."""
        self._library.fl_link_forget(self._handle)
        if self._keeper is not None:
            self._keeper.forget()
        forks.keep(self)

    def leave(self, deadline: float) -> None:
        """Close, and wait until the sent data have arrived, at the exit of the process."""
        self.close()
        if self._keeper is not None:
            self._keeper.join(deadline)

    def _connect(self, store: dist.Store, options: SocketOptions) -> None:
        """Send the others this rank's address; call the lower ranks, and wait for the calls of the higher ones."""
        rank, size = self._rank, self._size
        mine = {"node": node_name(), "nonce": secrets.token_hex(16)}  # that of rank 0 counts
        everybody = _parsed(gather(store, "sockets/is", rank, size, json.dumps(mine)), _node_and_nonce)
        self.is_alone = len({node for node, _ in everybody}) == 1
        # Alone the ranks call from, and listen at, the loopback interface: no other process's packets get there.
        self.is_sealed = not self.is_alone if options.authenticate is None else options.authenticate
        self.is_sealed = self.is_sealed or options.encrypt
        secret = shared_secret("sockets", everybody[0][1])
        where = places(options, self.is_alone)
        keeper = Keeper(self, rank, size, self._count, secret, where, options.congestion)
        if self._is_closed:
            return keeper.end()
        self._keeper = keeper
        addresses = gather(store, "sockets/at", rank, size, json.dumps(keeper.addresses))
        keeper.start(_parsed(addresses[:rank], listeners))
        start = time.monotonic()
        while not self._is_closed:
            keeper.call()
            up = [row.count(1) for peer, row in enumerate(self.states()) if peer != rank]
            if min(up) == self._count or (min(up) > 0 and time.monotonic() > start + _ENOUGH):
                break
            time.sleep(_POLL)
        keeper.watch()
        # Nobody makes a call before both ends have the connections.
        await_count(store, "sockets/up", size)


def _node_and_nonce(told: Any) -> tuple[str, bytes]:
    return str(told["node"]), bytes.fromhex(told["nonce"])


def _parsed(texts: Sequence[bytes], parse: Callable[[Any], T]) -> list[T]:
    """Return what each rank has written into the store."""
    found = []
    for peer, text in enumerate(texts):
        try:
            found.append(parse(json.loads(text)))
        except (AttributeError, LookupError, TypeError, ValueError, RecursionError):
            why = f"{text[:80]!r} stands in the store as its address; another program or version has written it"
            raise LinkError(peer, why) from None
    return found


def _records(messages: Sequence[LinkMessage]) -> ctypes.Array[libraries.LinkMessageStruct]:
    record = libraries.LinkMessageStruct
    return (record * len(messages))(*[record(data.data_ptr(), data.numel(), key, peer) for peer, data, key in messages])


def _leave() -> None:
    deadline = time.monotonic() + _LAST_WAIT
    links = list(_live)
    for link in links:
        link.close()
    for link in links:
        link.leave(deadline)


def _begin_child() -> None:
    for link in list(_live):
        link.begin_child()
    _live.clear()
    forks.at_exit(_leave)


# When this module is imported, so that all that end with the process, and may still send, do so first.
forks.at_exit(_leave)
os.register_at_fork(after_in_child=_begin_child)
