"""Accepts callers of a publisher: addresses, limits of number and rate, and log lines."""

from __future__ import annotations

import errno
import ipaddress
import logging
import resource
import selectors
import socket
import time
from dataclasses import dataclass

from ..base.errors import ConfigError
from ..transport.links.introduction import is_exhausted
from .address import Endpoint
from .frames import guard

__all__ = ["Door", "Refusals", "ConnectionLimits", "share"]

_logger = logging.getLogger("fusionlayer")

_MOST_FOLLOWERS, _MOST_STRANGERS = 1024, 64
# This many strangers are accepted at once, then this many a second: each costs the serving thread a tenth of a ms.
_STRANGERS_PER_SECOND = 200
_REST_SECONDS = 0.5
_LINE_SECONDS = 1.0
# Callers that are not accepted yet wait in the kernel in order, without descriptors: followers get their turn.
_BACKLOG = 4096
_TRIES = 16


@dataclass(frozen=True)
class ConnectionLimits:
    """A publisher's share of its process's file descriptors: at most half.

    Attributes:
        followers: connections to them.
        strangers: connections to callers that have proved nothing yet.
        end: descriptors from this number on are left to the training.
    """

    followers: int
    strangers: int
    end: int


def share() -> ConnectionLimits:
    """Return a publisher's share of the limit of ``ulimit -n``."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    limit = 1 << 30 if limit == resource.RLIM_INFINITY else limit
    strangers = max(1, min(_MOST_STRANGERS, limit // 16))
    return ConnectionLimits(max(1, min(_MOST_FOLLOWERS, limit // 2 - strangers)), strangers, limit - limit // 4)


class Refusals:
    """Logs refused callers: at most one line a second, with the number of those without a line.

    Attributes:
        count: of refused callers.
    """

    def __init__(self, place: Endpoint) -> None:
        self.count = 0
        self._place = place
        self._untold = 0
        self._next = 0.0

    def add(self, who: str, why: str) -> None:
        """Log a refused caller."""
        self.count += 1
        now = time.monotonic()
        if now < self._next:
            self._untold += 1
            return
        self._next = now + _LINE_SECONDS
        more = f"; {self._untold} more were sent away since the last line" if self._untold else ""
        self._untold = 0
        _logger.warning("%s: a caller from %s was sent away: %s%s", self._place, who, why, more)


class Door:
    """Listens at all addresses of a place, and accepts callers up to the number and rate of a share.

    Args:
        place: a host's name stands for all of its addresses, and "::" includes those of IPv4.

    Attributes:
        place: the same, with the port that the system has chosen.
        is_near: only this host can reach it.

    Raises:
        ConfigError: listening there is impossible.
    """

    def __init__(self, place: Endpoint) -> None:
        self._listeners = _listen(place)
        self.place = Endpoint(None, place.host, self._listeners[0].getsockname()[1])
        hosts = [str(end.getsockname()[0]).partition("%")[0] for end in self._listeners]
        self.is_near = all(ipaddress.ip_address(host).is_loopback for host in hosts)
        self._selector: selectors.BaseSelector | None = None
        self._is_open = False
        self._rests_until = 0.0
        self._credit, self._counted = float(_MOST_STRANGERS), time.monotonic()

    def __contains__(self, end: object) -> bool:
        return end in self._listeners

    def watch(self, selector: selectors.BaseSelector) -> None:
        """Register the listeners, now and after each rest."""
        self._selector = selector
        self.look()

    def look(self) -> float:
        """Open the door if its rest is over; return the seconds until then, 0 if it is open."""
        left = self._rests_until - time.monotonic()
        if left <= 0 and not self._is_open and self._selector:
            for end in self._listeners:
                self._selector.register(end, selectors.EVENT_READ)
            self._is_open = True
        return max(left, 0.0)

    def accept(self, listener: socket.socket) -> tuple[socket.socket, str] | None:
        """Return a caller and where it calls from; None if there is none, or it cannot be let in."""
        now = time.monotonic()
        self._credit = min(self._credit + (now - self._counted) * _STRANGERS_PER_SECOND, float(_MOST_STRANGERS))
        self._counted = now
        if self._credit < 1:
            self._rest(_REST_SECONDS / 10)
            return None
        try:
            end, address = listener.accept()
        except OSError as error:  # it has gone again
            if is_exhausted(error):
                self._rest(_REST_SECONDS)
            return None
        if end.fileno() >= share().end:
            end.close()
            self._rest(_REST_SECONDS)
            return None
        self._credit -= 1
        return guard(end), str(Endpoint(None, address[0], address[1])).removeprefix("tcp://")

    def refund(self) -> None:
        """Let one more in: a caller has proved to be a follower, and is no stranger."""
        self._credit += 1

    def close(self) -> None:
        """Listen no longer; a second call does nothing."""
        self._rest(0.0)
        self._selector = None
        for end in self._listeners:
            end.close()

    def _rest(self, seconds: float) -> None:
        """Accept no caller for a while: a listener with callers stays readable, and would keep a core busy."""
        self._rests_until = time.monotonic() + seconds
        if self._is_open and self._selector:
            for end in self._listeners:
                self._selector.unregister(end)
        self._is_open = False


def _listen(place: Endpoint) -> list[socket.socket]:
    """Return a listener for each address of a host, all at one port."""
    try:
        found = socket.getaddrinfo(place.host, place.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise _unusable(place, error) from error
    addresses = list(dict.fromkeys((family, address) for family, _, _, _, address in found))
    why: OSError | None = None
    for _ in range(1 if place.port else _TRIES):
        listeners: list[socket.socket] = []
        for family, address in addresses:
            port = listeners[0].getsockname()[1] if listeners else place.port
            both = family == socket.AF_INET6 and address[0] == "::" and socket.has_dualstack_ipv6()
            try:
                end = socket.create_server(
                    (address[0], port, *address[2:]), family=family, backlog=_BACKLOG, dualstack_ipv6=both
                )
            except OSError as error:
                why = error
                if error.errno in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                    continue  # a name may have addresses that this host lacks, such as ::1 where IPv6 is off
                break
            end.setblocking(False)
            listeners.append(guard(end))
        else:
            if listeners:
                return listeners
        for end in listeners:
            end.close()
    assert why is not None
    raise _unusable(place, why) from why


def _unusable(place: Endpoint, why: OSError) -> ConfigError:
    return ConfigError(
        f"publish: cannot listen at {place}: {why.strerror or why}; give an address of this host and a free port"
    )
