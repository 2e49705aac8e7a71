"""How connections of our own are made: over which interfaces, and how many."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from dataclasses import dataclass

from ..config import Config
from ..errors import ConfigError
from ..interfaces import ipv4_addresses, own_address

__all__ = ["SocketOptions", "chosen", "places"]


@dataclass(frozen=True)
class SocketOptions:
    """The settings ``interfaces`` and ``connections``, and whether they count at all.

    Attributes:
        connections: TCP connections to each other rank, over all interfaces together.
        interfaces: names of this host's interfaces, over which connections are dealt out in turn. Empty: one that the
            other ranks can reach.
        congestion: the kernel's name of how TCP reacts to losses, such as "bbr"; None: what this host uses.
        only_if_faster: take the place of gloo, and of no other library, where a measurement finds them faster.

    Raises:
        ConfigError: this host has no such interface, or does not let this process use that congestion control.
    """

    connections: int = 4
    interfaces: tuple[str, ...] = ()
    congestion: str | None = None
    only_if_faster: bool = False

    def __post_init__(self) -> None:
        here = ipv4_addresses()
        for name in self.interfaces:
            if name not in here:
                raise ConfigError(
                    f"interfaces={list(self.interfaces)}: {name!r} is no interface of this host with an IPv4 address; "
                    f"expected some of: {', '.join(here)}"
                )
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
    """Return how the settings want connections to be made; None: by torch's libraries.

    Raises:
        ConfigError: this host has no such interface.
    """
    if settings.transport not in ("sockets", "auto"):
        return None
    return SocketOptions(
        settings.connections, settings.interfaces, settings.congestion, only_if_faster=settings.transport == "auto"
    )


def places(options: SocketOptions, alone: bool) -> list[tuple[str, str]]:
    """Return interfaces and addresses to listen on and to call from; an empty name leaves the interface to the system.

    Args:
        options: the settings.
        alone: whether all ranks are on this host.
    """
    here = ipv4_addresses()
    if options.interfaces:
        return [(name, here[name]) for name in options.interfaces]
    return [("", "127.0.0.1" if alone else own_address() or _outward())]


def _outward() -> str:
    """Return the address from which this host reaches MASTER_ADDR, else the first that is not its own alone."""
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((os.environ.get("MASTER_ADDR", ""), 9))  # sends nothing
        address: str = probe.getsockname()[0]
        if not address.startswith("127."):
            return address
    return next((address for address in ipv4_addresses().values() if not address.startswith("127.")), "127.0.0.1")
