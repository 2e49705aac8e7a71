"""Makes the connections of a ``SocketLink``, in both directions, and makes lost ones again while training runs."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from typing import Protocol

from ...process.interfaces import family_of
from .base import LinkError
from .introduction import PATIENCE, ConnectionKeys, Reception, introduce
from .socket_options import Place, Told, ways

_logger = logging.getLogger("fusionlayer")

# Seconds between two rounds of the keeper's thread: while something is in flight, and else.
_BUSY = 0.1
_IDLE = 0.5
# Seconds for which the thread stays busy after something was in flight.
_STAYS_BUSY = 2.0
# Seconds between two attempts to make a connection again.
_AGAIN = 1.0
# Seconds that a connection which is made again may take.
_PATIENCE_AGAIN = 3.0
# Seconds for which a link that was closed continues until the sent data have arrived.
_LINGER = 5.0
_LINGER_POLL = 0.01
# Connections that are made at once.
_CALLS = 16

_DOWN, _UP, _STALLED, _LEFT = range(4)


class Kept(Protocol):
    """The part of a link that the keeper uses."""

    def add(self, peer: int, index: int, descriptor: int, keys: ConnectionKeys) -> None:
        """Take a connected socket, and the keys that both its ends have."""

    def states(self) -> list[list[int]]:
        """Return for each rank the states of its connections."""

    def tend(self) -> int:
        """Do what is to be done between calls; return how much is not acknowledged."""

    def cut(self) -> None:
        """Close at once, even if sent data have not arrived."""


class Keeper:
    """Listens for the connections of higher ranks, and makes those to lower ones.

    ``start``, ``call`` and ``end`` may come from any thread. Its own thread takes calls, tends the link and says in the
    log which connections are lost and which are used again.

    Args:
        link: takes the connections.
        rank: this rank.
        size: number of ranks.
        count: connections to each other rank.
        secret: what the job's processes know.
        places: where to listen, and from where to call.
        congestion: the kernel's name of how TCP reacts to losses; None: the host's default.

    Attributes:
        addresses: for each place, host and port of each of its listeners.
    """

    def __init__(
        self,
        link: Kept,
        rank: int,
        size: int,
        count: int,
        secret: bytes,
        places: Sequence[Place],
        congestion: str | None,
    ) -> None:
        self._link = link
        self._rank, self._size, self._count, self._secret, self._places = rank, size, count, secret, places
        self._congestion = congestion
        self._lower: Sequence[Told] = ()
        made = [[_listener(place.interface, each, congestion) for each in place.addresses] for place in places]
        self._listeners = [listener for each in made for listener in each]
        self.addresses = [[listener.getsockname()[:2] for listener in each] for each in made]
        # A connection's number says its index and the rank that calls: only higher ranks do.
        numbers = [index * size + peer for index in range(count) for peer in range(rank + 1, size)]
        self._reception = Reception(self._listeners, secret, frozenset(numbers), rank)
        self._states: list[list[int]] = []
        self._is_watching = self._ended = False
        self._next_call = 0.0
        self._failed: Counter[tuple[int, int]] = Counter()
        self._calling: threading.Thread | None = None
        self._thread = threading.Thread(target=self._keep, name="fusionlayer sockets", daemon=True)

    def start(self, lower: Sequence[Told]) -> None:
        """Begin to take calls. ``lower``: the addresses of each lower rank, as it has them."""
        self._lower = lower
        for peer, theirs in enumerate(lower):
            if not ways(self._places, 0, theirs):
                mine = ", ".join(address for place in self._places for address in place.addresses)
                others = ", ".join(host for each in theirs for host, _ in each)
                raise LinkError(
                    peer,
                    f"rank {self._rank} at {mine} cannot call rank {peer} at {others}; expected two addresses of "
                    "IPv4, two global ones of IPv6, or two of one link: name other interfaces, by interfaces or "
                    "GLOO_SOCKET_IFNAME",
                )
        self._thread.start()

    def watch(self) -> None:
        """From here on say which connections are lost, and make them again."""
        self._states = self._link.states()
        self._is_watching = True

    def call(self, patience: float = PATIENCE) -> None:
        """Try once to make all connections to lower ranks that are missing or stalled; ``patience`` for each."""
        states = self._link.states()
        missing = [
            (peer, index)
            for peer in range(len(self._lower))
            for index in range(self._count)
            if states[peer][index] in (_DOWN, _STALLED)
        ]
        for start in range(0, len(missing), _CALLS):
            threads = [
                threading.Thread(target=self._call, args=(*pair, patience), name="fusionlayer call", daemon=True)
                for pair in missing[start : start + _CALLS]
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()

    def end(self) -> None:
        """Let the thread end once what was sent has arrived. It does not wait for that."""
        self._ended = True
        self._reception.wake()
        if not self._thread.is_alive():
            self._shut()

    def join(self, deadline: float) -> None:
        """Wait until the thread has ended."""
        if self._thread.is_alive():
            self._thread.join(max(deadline - time.monotonic(), 0))

    def forget(self) -> None:
        """Close this process's copies of the listeners, in a forked child."""
        for listener in self._listeners:
            listener.close()

    def _keep(self) -> None:
        until = time.monotonic() + _STAYS_BUSY
        while not self._ended:
            now = time.monotonic()
            for number, end, keys in self._reception.admit(_BUSY if now < until else _IDLE):
                self._link.add(number % self._size, number // self._size, end.detach(), keys)
            if self._link.tend() > 0:
                until = now + _STAYS_BUSY
            if self._is_watching:
                self._report()
                self._call_again()
        self._shut()
        last = time.monotonic() + _LINGER
        while self._link.tend() > 0 and time.monotonic() < last:
            time.sleep(_LINGER_POLL)
        self._link.cut()

    def _shut(self) -> None:
        self._reception.close()
        for listener in self._listeners:
            listener.close()

    def _report(self) -> None:
        """Say which connections are lost or stalled, and which are used again, where others of the pair continue."""
        before, self._states = self._states, self._link.states()
        for peer, (old, new) in enumerate(zip(before, self._states, strict=True)):
            if peer == self._rank or old == new or _UP not in new or _LEFT in new:
                continue
            for state, what in ((_DOWN, "lost"), (_STALLED, "stalled"), (_UP, "used again")):
                changed = [i for i in range(self._count) if old[i] != new[i] == state]
                if changed:
                    names = {self._places[i % len(self._places)].interface for i in changed} - {""}
                    over = f" over {', '.join(sorted(names))}" if names else ""
                    _logger.warning(
                        "rank %d: connections %s to rank %d%s are %s; %d of %d carry what is sent",
                        *(self._rank, changed, peer, over, what, new.count(_UP), self._count),
                    )

    def _call_again(self) -> None:
        """Try to make missing connections again, on a thread of its own: an interface that is down answers nothing."""
        now = time.monotonic()
        if now < self._next_call or self._count == 1 or (self._calling and self._calling.is_alive()):
            return
        self._next_call = now + _AGAIN
        if any(state in (_DOWN, _STALLED) for states in self._states[: len(self._lower)] for state in states):
            self._calling = threading.Thread(
                target=self.call, args=(_PATIENCE_AGAIN,), name="fusionlayer calls", daemon=True
            )
            self._calling.start()

    def _call(self, peer: int, index: int, patience: float) -> None:
        """Make one connection to a lower rank, or leave it for the next attempt."""
        until = time.monotonic() + patience
        found = ways(self._places, index, self._lower[peer])
        way = found[self._failed[peer, index] % len(found)]
        end = socket.socket(family_of(way.host), socket.SOCK_STREAM)
        try:
            _tie(end, way.interface, way.own, self._congestion)
            end.settimeout(patience)
            end.connect(_place(way.host, way.port))
            keys = introduce(end, self._secret, index * self._size + self._rank, until, peer)
            if keys and not self._ended:
                self._link.add(peer, index, end.detach(), keys)
        except OSError as error:
            self._failed[peer, index] += 1  # perhaps this way leads nowhere: the next attempt tries another
            _logger.debug("rank %d: no connection %d to rank %d yet: %s", self._rank, index, peer, error)
        finally:
            end.close()


def _listener(interface: str, address: str, congestion: str | None) -> socket.socket:
    """Return a listener on one address alone, and on one interface where it has a name."""
    listener = socket.socket(family_of(address), socket.SOCK_STREAM)
    try:
        _tie(listener, interface, address, congestion)
        listener.listen(1024)
    except OSError:
        listener.close()
        raise
    return listener


def _tie(end: socket.socket, interface: str, address: str, congestion: str | None) -> None:
    """Let a socket send from an address and over its interface, regardless of routes."""
    if congestion is not None:
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, congestion.encode())
    if interface:
        with suppress(PermissionError):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, interface.encode())
    end.bind(_place(address, 0))


def _place(address: str, port: int) -> tuple[str | int | bytes, ...]:
    """Return what ``bind`` and ``connect`` want: an address of IPv6 may name an interface, which has a number."""
    return socket.getaddrinfo(address, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)[0][4]
