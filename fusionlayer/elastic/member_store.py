"""The store that each member keeps: the others find it there after a change, whichever member fails."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from torch.distributed import TCPStore

from ..base.errors import TransportError
from ..launch.stores import SealedStore, dial, mark, serve
from ..process.bounded import Aside, bounded
from ..process.interfaces import own_address, reachable_names
from ..process.processes import node_name
from .generation import MemberAddress

Result = TypeVar("Result")

_LOOPBACK = "127.0.0.1"
_REQUEST = "request to a member"
# Seconds that a host may take to accept a connection before the next of its addresses is tried.
_KNOCK = 1.0


def open_store(loopback: bool, patience: float) -> tuple[TCPStore, MemberAddress]:
    """Open a store in this process, at a port of the system's choice; return it and where it is."""
    place = _LOOPBACK if loopback else own_address()
    store = serve(place, patience)
    found = (place,) if place else tuple(reachable_names())
    return store, MemberAddress(node_name(), found, store.port, mark(store))


class DistantStore:
    """A store that another member keeps. Each request ends within the timeout, even if that process is stopped.

    torch's own client would wait for the answer as long as the connection lasts, regardless of its timeout.

    Args:
        address: where it is.
        patience: seconds that a request may take.

    Raises:
        TransportError: no process answers there, or another program does.
        RuntimeError: of any request, if it gets no answer in time; ask nothing more then.
    """

    def __init__(self, address: MemberAddress, patience: float) -> None:
        self._patience = patience
        self._aside = Aside(_REQUEST)
        self._store = sealed(reach(address, patience))

    def get(self, key: str) -> bytes:
        """Return the value of a key; wait for it."""
        return self._ask(lambda: self._store.get(key))

    def set(self, key: str, value: str) -> None:
        """Set the value of a key."""
        self._ask(lambda: self._store.set(key, value))

    def add(self, key: str, amount: int) -> int:
        """Add to a number, which begins with 0; return the sum."""
        return self._ask(lambda: self._store.add(key, amount))

    def _ask(self, request: Callable[[], Result]) -> Result:
        return self._aside.run(request, time.monotonic() + self._patience, lambda: None)


def sealed(store: TCPStore) -> SealedStore:
    """Return a member's store as members write and read it: with the proof of the job key, where there is one."""
    return SealedStore(store, "member")


def reach(address: MemberAddress, patience: float) -> TCPStore:
    """Return torch's client of the store at an address, for callers that bound its requests themselves."""
    end = time.monotonic() + patience + _KNOCK * len(names(address))
    return bounded(partial(_connect, address, patience), end, name=_REQUEST)


def _connect(address: MemberAddress, patience: float) -> TCPStore:
    for name in names(address):
        store = dial(name, address.port, address.token, patience, _KNOCK)
        if store is not None:
            return store
    raise TransportError(f"nothing answers at port {address.port} of {', '.join(names(address))}")


def is_reachable(address: MemberAddress, patience: float) -> bool:
    """Return whether ``reach`` succeeds."""
    try:
        reach(address, patience)
    except (TransportError, RuntimeError):
        return False
    return True


def names(address: MemberAddress) -> tuple[str, ...]:
    """Return the names by which to try a store: its addresses on this host, loopback alone, or all."""
    return (_LOOPBACK,) if address.node == node_name() and len(address.names) > 1 else address.names
