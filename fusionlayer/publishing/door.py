"""Accepts callers of a publisher: addresses, and limits of number and rate."""

from __future__ import annotations

import errno
import ipaddress
import math
import resource
import selectors
import socket
from dataclasses import dataclass

from ..base.errors import ConfigError
from ..process.interfaces import with_port
from ..transport.links import gate
from .address import Endpoint
from .frames import guard

__all__ = ["Door", "ConnectionLimits", "share"]

_MOST_FOLLOWERS, _MOST_STRANGERS = 1024, 64
# This many strangers are accepted at once, then this many a second: each costs the serving thread a tenth of a ms.
_STRANGERS_PER_SECOND = 200.0
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


class Door(gate.Gate):
    """Listens at all addresses of a place, and accepts callers up to the number and rate of a share.

    Args:
        place: a host's name stands for all of its addresses, and "::" includes those of IPv4.
        selector: see ``Gate``.

    Attributes:
        place: the same, with the port that the system has chosen.
        is_near: only this host can reach it.

    Raises:
        ConfigError: listening there is impossible.
    """

    def __init__(self, place: Endpoint, selector: selectors.BaseSelector) -> None:
        super().__init__(_listen(place), selector, _MOST_STRANGERS, _STRANGERS_PER_SECOND)
        self.place = Endpoint(None, place.host, self._listeners[0].getsockname()[1])
        hosts = [str(end.getsockname()[0]).partition("%")[0] for end in self._listeners]
        self.is_near = all(ipaddress.ip_address(host).is_loopback for host in hosts)

    def let_in(self, listener: socket.socket) -> tuple[socket.socket, str] | None:
        """Return a caller and where it calls from; None if there is none, or it cannot be let in."""
        try:
            found = self.accept(listener)
        except OSError:
            return None
        if found is None:
            return None
        end, address = found
        if end.fileno() >= share().end:
            end.close()
            self.rest(gate.EXHAUSTED_SECONDS)
            return None
        return guard(end), with_port(*address[:2])

    def close(self) -> None:
        """Listen no longer; a second call does nothing."""
        self.rest(math.inf)
        for end in self._listeners:
            end.close()


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
