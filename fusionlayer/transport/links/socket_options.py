"""How connections of our own are made: over which interfaces, and how many."""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

from ...base import libraries
from ...base.config import Config
from ...base.errors import ConfigError
from ...process.interfaces import addresses, family_of, is_loopback, own_address

Told = Sequence[Sequence[tuple[str, int]]]
"""For each rank, the announced host and port of each of its listeners."""


class Place(NamedTuple):
    """The listening addresses of a rank, and its source addresses.

    Attributes:
        interface: its name; empty: whichever the routes prefer.
        addresses: the addresses of this host, the preferred one first.
    """

    interface: str
    addresses: tuple[str, ...]


class Way(NamedTuple):
    """How a connection may be made: over an interface, from an address of this host, to a listener of a peer."""

    interface: str
    own: str
    host: str
    port: int


@dataclass(frozen=True)
class SocketOptions:
    """The settings ``interfaces`` and ``connections``, and whether they count at all.

    Attributes:
        connections: TCP connections to each other rank, over all interfaces together.
        interfaces: names of this host's interfaces, among which connections are distributed in turn. Empty: one that
            the other ranks can reach.
        congestion: the kernel's name of how TCP reacts to losses, such as "bbr"; None: the host's default.
        authenticate: whether each frame carries a tag that only the job's ranks can make; None: where ranks are on
            several hosts.
        encrypt: whether all is encrypted, and so authenticated too, by TLS 1.3.
        only_if_faster: take the place of gloo, and of no other library, where a measurement finds them faster.

    Raises:
        ConfigError: this host has no such interface, does not let this process use that congestion control, or has no
            library that encrypts.
    """

    connections: int = 4
    interfaces: tuple[str, ...] = ()
    congestion: str | None = None
    authenticate: bool | None = None
    encrypt: bool = False
    only_if_faster: bool = False

    def __post_init__(self) -> None:
        here = addresses()
        for name in self.interfaces:
            if name not in here:
                raise ConfigError(
                    f"interfaces={list(self.interfaces)}: {name!r} is no interface of this host with an address; "
                    f"expected some of: {', '.join(here)}"
                )
        if self.encrypt and not libraries.cpu().fl_link_can_encrypt():
            raise ConfigError("encrypt=True: needs OpenSSL 3, libssl.so.3; install it, such as by apt install libssl3")
        if self.congestion is not None:
            with socket.socket() as probe:
                try:
                    probe.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, self.congestion.encode())
                except OSError as error:
                    raise ConfigError(
                        f"congestion={self.congestion!r}: {error.strerror}; expected one that "
                        "/proc/sys/net/ipv4/tcp_allowed_congestion_control names"
                    ) from None


def chosen(settings: Config) -> SocketOptions | None:
    """Return how the settings want connections to be made; None: by torch's libraries."""
    if settings.transport not in ("sockets", "auto"):
        return None
    return SocketOptions(
        settings.connections,
        settings.interfaces,
        settings.congestion,
        settings.authenticate,
        settings.encrypt,
        only_if_faster=settings.transport == "auto",
    )


def places(options: SocketOptions, alone: bool) -> list[Place]:
    """Return where to listen and from where to call."""
    here = addresses()
    if options.interfaces:
        return [Place(name, _one_of_each_family(here[name])) for name in options.interfaces]
    own = [address for each in here.values() for address in each]
    loopback = "::1" if "::1" in own and "127.0.0.1" not in own else "127.0.0.1"
    if alone:
        return [Place("", (loopback,))]
    first = here.get(os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0], ())
    first = first or tuple(filter(None, [own_address()])) or tuple(_outward())
    first = first or next((each for each in here.values() if not is_loopback(each[0])), (loopback,))
    # A host that has only the other family may call: its address is on the same interface.
    others = [address for each in here.values() if not set(each).isdisjoint(first) for address in each]
    return [Place("", _one_of_each_family([*first, *others]))]


def _one_of_each_family(given: Sequence[str]) -> tuple[str, ...]:
    """Return the first address of each family, in the order of ``given``."""
    first: dict[socket.AddressFamily, str] = {}
    for address in given:
        first.setdefault(family_of(address), address)
    return tuple(first.values())


def listeners(told: Sequence[Sequence[Sequence[Any]]]) -> Told:
    """Return the listeners of a rank, as it has announced them."""
    found = [[(str(ipaddress.ip_address(host)), range(1 << 16)[port]) for host, port in place] for place in told]
    if not found or not all(found):
        raise ValueError("a rank has no listener")
    return found


def ways(mine: Sequence[Place], index: int, theirs: Told) -> list[Way]:
    """Return the ways to make connection ``index``, the preferred one first.

    They are between the two interfaces in turn, or between any two if these have no address family in common.
    """
    turn = list(_between(mine[index % len(mine)], theirs[index % len(theirs)]))
    return turn or [way for place in mine for each in theirs for way in _between(place, each)]


def _between(place: Place, theirs: Sequence[tuple[str, int]]) -> Iterator[Way]:
    """Yield pairs of addresses that can connect. An address of one link needs the name of its interface."""
    for host, port in theirs:
        for own in place.addresses:
            link = own.partition("%")[2]
            if family_of(host) == family_of(own) and bool(link) == host.startswith("fe80:"):
                yield Way(place.interface, own, f"{host}%{link}" if link else host, port)


def _outward() -> Iterator[str]:
    """Yield the addresses from which this host reaches MASTER_ADDR, unless it does so within itself."""
    master = os.environ.get("MASTER_ADDR")
    with suppress(OSError):
        for family, kind, _, _, place in socket.getaddrinfo(master, 9, type=socket.SOCK_DGRAM) if master else ():
            with suppress(OSError), socket.socket(family, kind) as probe:
                probe.connect(place)  # sends nothing
                address: str = probe.getsockname()[0]
                if not is_loopback(address) and not address.startswith("fe80:"):
                    yield address
