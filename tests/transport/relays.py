"""Links of our own between threads, with a relay on each connection that a test can cut, hold or make damage bytes."""

import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

import torch.distributed as dist

from fusionlayer.process.interfaces import family_of
from fusionlayer.transport.links import sockets
from fusionlayer.transport.links.reconnecting import Keeper
from fusionlayer.transport.links.socket_options import SocketOptions
from fusionlayer.transport.links.sockets import SocketLink


class Relay:
    """Stands between the listener of the lower rank and the connections of the higher one, in the order of their calls.

    Attributes:
        holding: whether bytes of a connection stay here, by its place in that order.
        alter: what becomes of bytes: a function of the connection's place, whether they come from the caller, how many
            have gone that way before, and the bytes. None cuts the connection.
        open: whether new connections are let through.
    """

    def __init__(self, to: tuple[str, int]) -> None:
        self._to = to
        self._listener = socket.create_server((to[0], 0), family=family_of(to[0]), backlog=64)
        self.address = self._listener.getsockname()[:2]
        self.holding: dict[int, threading.Event] = {}
        self.alter: Callable[[int, bool, int, bytes], bytes | None] = lambda *given: given[3]
        self.open = True
        self.ends: list[tuple[socket.socket, socket.socket]] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self, place: int) -> None:
        """Cut a connection at once."""
        for end in self.ends[place]:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def close(self) -> None:
        self._listener.close()
        for place in range(len(self.ends)):
            self.cut(place)

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                if not self.open:
                    near.close()
                    continue
                far = socket.create_connection(self._to)
                self.ends.append((near, far))
                for from_caller in (True, False):
                    pair = (near, far) if from_caller else (far, near)
                    where = len(self.ends) - 1
                    threading.Thread(target=self._pump, args=(where, from_caller, *pair), daemon=True).start()

    def _pump(self, place: int, from_caller: bool, source: socket.socket, sink: socket.socket) -> None:
        passed = 0
        with suppress(OSError):
            while data := source.recv(1 << 14):
                if place in self.holding:
                    self.holding[place].wait(180)
                altered = self.alter(place, from_caller, passed, data)
                if altered is None:
                    break
                passed += len(data)
                sink.sendall(altered)
        self.cut(place)


class _Connecting:
    """Stands for ``Connecting``: the store is the threads' own, and nobody is lost."""

    def __init__(self, store: dist.Store) -> None:
        self._store = store

    def run(self, make: Callable[[dist.Store], Any]) -> Any:
        return make(self._store)


@contextmanager
def links(
    size: int = 2,
    connections: int = 1,
    *,
    checked: bool = False,
    timeout: float = 180,
    through: bool = True,
    **options: Any,
) -> Iterator[Any]:
    """Yield the links of all ranks, and relays ``through`` which rank 0 is called: one for each of its listeners."""
    store = dist.HashStore()
    relays: list[Relay] = []
    original = Keeper.__init__

    def make(self: Keeper, *args: Any) -> None:
        original(self, *args)
        if self._rank == 0 and through:
            made = [[Relay(address) for address in each] for each in self.addresses]
            relays.extend(relay for each in made for relay in each)
            self.addresses = [[relay.address for relay in each] for each in made]

    def link(rank: int) -> SocketLink:
        marked = frozenset(range(size)) - {rank} if checked else frozenset()
        chosen = SocketOptions(connections, **options)
        return SocketLink(_Connecting(store), rank, size, timeout, marked, chosen)  # type: ignore[arg-type]

    Keeper.__init__ = make  # type: ignore[method-assign]
    try:
        with ThreadPoolExecutor(size) as pool:
            made = list(pool.map(link, range(size)))
    finally:
        Keeper.__init__ = original  # type: ignore[method-assign]
    try:
        yield made, relays
    finally:
        for each in made:
            each.close()
        for relay in relays:
            relay.close()
        assert not {each for each in made if each._keeper is None}
        for each in made:
            each.cut()
            assert each in sockets._live


def together(*calls: Callable[[], Any]) -> list[Any]:
    """Return what the calls return, each made on a thread of its own."""
    with ThreadPoolExecutor(len(calls)) as pool:
        return [done.result() for done in [pool.submit(call) for call in calls]]
