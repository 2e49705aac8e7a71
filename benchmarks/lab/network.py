"""What a lab is asked to be: hosts, and the links between them."""

from __future__ import annotations

import re
from dataclasses import dataclass

__all__ = ["CPU_BOUND", "MOST_INTERFACES", "Network", "Obstacle", "seconds_of"]

CPU_BOUND = 1e9
"""Bits per second above which the cores of a machine, not the shaping, say how fast an emulated link is."""

MOST_INTERFACES = 8
"""Interfaces that a host may have."""

_RATE_UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
_TIME_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}


class Obstacle(Exception):
    """Why a network cannot be made on this machine, in one line."""


@dataclass(frozen=True)
class Network:
    """Hosts and the links between them: each has one, ``eth0``, to a switch that joins them all, or several.

    Interfaces of one name, such as all ``eth1``, are joined by a switch of their own: they are a network of their own.

    Attributes:
        hosts: number of hosts, 1 to 250. One host has nothing but a loopback of its own.
        rate: of each host's link, both ways, such as "100mbit"; None: as fast as this machine can.
        isolated: hosts are network namespaces; False: one host, this machine as it is.
        delay: of every frame on its way between two hosts, such as "1ms" or "500us"; a round trip takes twice that.
        loss: chance of a frame to be lost between two hosts, 0 to 1 (exclusive).
        corruption: chance of a frame of more than 1200 bytes to have one bit of its payload flipped, 0 to 1. No
            checksum tells it: the receiving program gets wrong bytes.
        congestion: control of TCP in the hosts; "reno", which every Linux has, lets results of different machines be
            compared; None: what this machine uses. Without namespaces it is this machine's own.
        allow_cpu_bound: take a rate above 1gbit, although this machine's cores then limit it.
        reordering: chance of a frame to be held back for a millisecond, so that later ones overtake it, 0 to 1.
        interfaces: rates of ``eth0``, ``eth1`` and so on, which every host has; (): one interface, of ``rate``.
        rates: rate of each host's link, for hosts that differ; (): all have ``rate``.

    Raises:
        ValueError: no such network can be.
    """

    hosts: int = 2
    rate: str | None = None
    isolated: bool = True
    delay: str | None = None
    loss: float = 0.0
    corruption: float = 0.0
    congestion: str | None = "reno"
    allow_cpu_bound: bool = False
    reordering: float = 0.0
    interfaces: tuple[str, ...] = ()
    rates: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "interfaces", tuple(self.interfaces))  # JSON has lists
        object.__setattr__(self, "rates", tuple(self.rates))
        if not 1 <= self.hosts <= 250:
            raise ValueError(f"hosts={self.hosts}; expected 1 to 250")
        if not 0 <= self.loss < 1:
            raise ValueError(f"loss={self.loss:g}; expected a chance from 0 to below 1, such as 0.01")
        if not 0 <= self.corruption <= 1:
            raise ValueError(f"corruption={self.corruption:g}; expected a chance from 0 to 1, such as 0.01")
        if self.congestion is not None and not re.fullmatch(r"[a-z0-9_-]{1,15}", self.congestion):
            raise ValueError(f"congestion={self.congestion!r}; expected the kernel's name of one, such as reno")
        if not 0 <= self.reordering <= 1:
            raise ValueError(f"reordering={self.reordering:g}; expected a chance from 0 to 1, such as 0.01")
        _ = self.delay_seconds
        self._check_rates()
        link = {"rate": self.rate, "delay": self.delay, "loss": self.loss, "corruption": self.corruption}
        link |= {"reordering": self.reordering, "interfaces": self.interfaces, "rates": self.rates}
        asked = next((name for name, value in link.items() if value), None)
        if asked is not None and self.hosts == 1:
            raise ValueError(f"{asked}={link[asked]!r} with one host; a link needs two")
        if not self.isolated and self.hosts > 1:
            raise ValueError(f"hosts={self.hosts} without namespaces; more than one host needs them")

    def _check_rates(self) -> None:
        given = {"rate": self.rate, "interfaces": self.interfaces, "rates": self.rates}
        named = [name for name, value in given.items() if value not in (None, ())]
        if len(named) > 1:
            raise ValueError(f"{named[0]}={given[named[0]]!r} and {named[1]}={given[named[1]]!r}; give one of them")
        if len(self.interfaces) > MOST_INTERFACES:
            raise ValueError(f"{len(self.interfaces)} interfaces; expected at most {MOST_INTERFACES} for each host")
        if self.rates and len(self.rates) != self.hosts:
            raise ValueError(f"rates of {len(self.rates)} hosts, and hosts={self.hosts}; give one for each host")
        for name in named:
            texts = self.interfaces or self.rates or (self.rate or "",)
            fastest = max(texts, key=lambda text: _rate(name, text))
            if _rate(name, fastest) > CPU_BOUND and not self.allow_cpu_bound:
                raise ValueError(
                    f"{name}={fastest!r}; above 1gbit the cores of this machine limit an emulated link, so that times "
                    "mean little; to measure nonetheless, allow it (allow_cpu_bound=True, --allow-cpu-bound)"
                )

    @property
    def devices(self) -> tuple[str, ...]:
        """Names of the interfaces of every host of several, the loopback aside."""
        return tuple(f"eth{number}" for number in range(len(self.interfaces) or 1))

    @property
    def bits_per_second(self) -> float | None:
        """Rate of a host's interfaces together, both ways, of the slowest host; None: not limited."""
        if self.rates:
            return min(_rate("rates", text) for text in self.rates)
        if self.interfaces:
            return sum(_rate("interfaces", text) for text in self.interfaces)
        return None if self.rate is None else _rate("rate", self.rate)

    def rate_of(self, host: int, interface: int = 0) -> float | None:
        """Return the bits per second of a host's interface, both ways; None: not limited."""
        if self.interfaces:
            return _rate("interfaces", self.interfaces[interface])
        return _rate("rates", self.rates[host]) if self.rates else self.bits_per_second

    @property
    def delay_seconds(self) -> float:
        """Time that a frame takes from host to host, beyond that of its bits."""
        return 0.0 if self.delay is None else seconds_of("delay", self.delay)

    @property
    def impaired(self) -> bool:
        """Whether frames are delayed, lost, damaged or reordered, which bridges of the kernel do not do."""
        return bool(self.delay or self.loss or self.corruption or self.reordering)

    def __str__(self) -> str:
        words = [f"{self.hosts} host{'s' if self.hosts > 1 else ''}"]
        words += [self.rate] if self.rate else []
        words += [" + ".join(self.interfaces)] if self.interfaces else []
        words += [" | ".join(self.rates)] if self.rates else []
        words += [
            f"{name} {value}"
            for name in ("delay", "loss", "corruption", "reordering")
            if (value := getattr(self, name))
        ]
        return ", ".join([*words, *([self.congestion] if self.congestion else [])])


def seconds_of(name: str, text: str) -> float:
    """Return the seconds that ``text``, such as "1ms", says; ``name`` is what errors call it.

    Raises:
        ValueError: it says none, or 0.
    """
    return _quantity(name, text, _TIME_UNITS, "a number with us, ms or s, such as 1ms")


def _rate(name: str, text: str) -> float:
    return _quantity(name, text, _RATE_UNITS, "a number with kbit, mbit or gbit, such as 100mbit")


def _quantity(name: str, text: str, units: dict[str, float], expected: str) -> float:
    match = re.fullmatch(rf"(\d+(?:\.\d+)?)({'|'.join(units)})", text)
    if match is None or float(match[1]) <= 0:
        raise ValueError(f"{name}={text!r}; expected {expected}")
    return float(match[1]) * units[match[2]]
