"""The network interfaces of this host, and its addresses for other hosts."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

_SIOCGIFADDR = 0x8915  # linux/sockios.h
# linux/if_addr.h: not an address yet (tentative), or never one (its duplicate was found); soon none any more.
_UNUSABLE, _PASSING = 0x48, 0x21
_LINK_LOCAL = 0x20  # net/ipv6.h
_IF_INET6 = Path("/proc/net/if_inet6")

# The interfaces on which this process may listen; empty: all.
_allowed: tuple[str, ...] = ()


def restrict(names: Sequence[str]) -> None:
    """Let ``own_address`` return addresses of these interfaces alone; none: of all."""
    global _allowed
    _allowed = tuple(names)


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


def addresses() -> dict[str, tuple[str, ...]]:
    """Return the addresses of this host by interface name: the IPv4 address, then those of IPv6, the best first.

    An address that is valid on one link alone is given only where the interface has no other, as fe80::1%eth0.
    Interfaces without an address are left out.
    """
    found: dict[str, tuple[str, ...]] = {name: (address,) for name, address in ipv4_addresses().items()}
    for name, others in _ipv6_addresses().items():
        found[name] = (*found.get(name, ()), *others)
    return found


def family_of(address: str) -> socket.AddressFamily:
    """Return the family of a numeric address."""
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def _ipv6_addresses() -> dict[str, list[str]]:
    """Return the IPv6 addresses of each interface that has any, the farthest-reaching and longest-lived first."""
    found: dict[str, list[tuple[bool, bool, str]]] = {}
    with suppress(OSError):  # this host has no IPv6
        for line in _IF_INET6.read_text().splitlines():
            digits, _, _, scope, flags, name = line.split()
            if int(flags, 16) & _UNUSABLE:
                continue
            is_local = int(scope, 16) == _LINK_LOCAL
            address = socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits))
            rank = is_local, bool(int(flags, 16) & _PASSING), f"{address}%{name}" if is_local else address
            found.setdefault(name, []).append(rank)
    far = {name: [each for each in ranks if not each[0]] or ranks for name, ranks in found.items()}
    return {name: [address for *_, address in sorted(ranks)] for name, ranks in far.items()}


def reachable_names() -> list[str]:
    """Return names and addresses of this host, the likeliest to be reachable first.

    The interface in GLOO_SOCKET_IFNAME comes before all others.
    """
    here = addresses()
    first = here.get(_chosen(), ())
    others = [address for found in here.values() for address in found]
    return [name for name in dict.fromkeys([*first, socket.gethostname(), *others]) if "%" not in name]


def own_address() -> str:
    """Return the address on which this host should listen for the job's other hosts; empty for all addresses.

    It is the address of the interface in GLOO_SOCKET_IFNAME, else MASTER_ADDR if it is one of this host's. With
    ``restrict`` it is one of the interfaces' that are allowed, the first one's if neither of the two is.
    """
    every = {name: [each for each in found if "%" not in each] for name, found in addresses().items()}
    here = {name: found for name, found in every.items() if found and (name in _allowed or not _allowed)}
    if _chosen() in here:
        return here[_chosen()][0]
    others = [address for found in here.values() for address in found if not is_loopback(address)]
    allowed = [here[name][0] for name in _allowed if name in here]
    meeting = next((address for address in _resolve(os.environ.get("MASTER_ADDR", "")) if address in others), "")
    return meeting or next(iter(allowed), "")


def allowed_address(host: str) -> str:
    """Return the address of a name that leads to this host, if ``restrict`` allows it; empty: listen on all."""
    here = [address for name, found in addresses().items() if name in _allowed for address in found]
    return next((address for address in _resolve(host) if address in here), "")


def is_loopback(host: str) -> bool:
    """Return whether a name or an address leads no farther than to the host that uses it."""
    # Not by a look-up of the name: many hosts give their own name a loopback address, and others find another one.
    return host in ("localhost", "::1") or host.startswith("127.")


def with_port(host: str, port: int) -> str:
    """Return host:port, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _chosen() -> str:
    return os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]


def _resolve(host: str) -> list[str]:
    if not host:
        return []
    try:
        return [str(place[0]) for *_, place in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)]
    except (OSError, UnicodeError):
        return []
