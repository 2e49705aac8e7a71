"""The network interfaces of this host, and the addresses by which other hosts may reach it."""

from __future__ import annotations

import fcntl
import os
import socket
import struct

__all__ = ["ipv4_addresses", "own_address", "reachable_names"]

_SIOCGIFADDR = 0x8915  # linux/sockios.h


def ipv4_addresses() -> dict[str, str]:
    """Return the IPv4 addresses of this host by interface name. Interfaces without one are left out."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:
                continue  # this interface has no IPv4 address
            found[name] = socket.inet_ntoa(answer[20:24])
    return found


def reachable_names() -> list[str]:
    """Return names and addresses of this host, the likeliest to be reachable first.

    The interface that GLOO_SOCKET_IFNAME names comes before all others.
    """
    addresses = ipv4_addresses()
    chosen = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    first = [addresses[chosen]] if chosen in addresses else []
    return list(dict.fromkeys([*first, socket.gethostname(), *addresses.values()]))


def own_address() -> str:
    """Return the address on which this host should listen for the job's other hosts; empty for all addresses.

    It is that of the interface that GLOO_SOCKET_IFNAME names, else MASTER_ADDR if that is one of this host's.
    """
    addresses = ipv4_addresses()
    chosen = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    if chosen in addresses:
        return addresses[chosen]
    try:
        meeting = socket.gethostbyname(os.environ.get("MASTER_ADDR", ""))
    except OSError:
        return ""
    return meeting if meeting in addresses.values() and not meeting.startswith("127.") else ""
