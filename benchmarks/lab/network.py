"""What a lab is asked to be: hosts, and the links between them."""

from __future__ import annotations

import re
from dataclasses import dataclass

__all__ = ["CPU_BOUND", "Network", "Obstacle"]

CPU_BOUND = 1e9
"""Bits per second above which the cores of a machine, not the shaping, say how fast an emulated link is."""

_RATE_UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
_TIME_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}


class Obstacle(Exception):
    """Why a network cannot be made on this machine, in one line."""


@dataclass(frozen=True)
class Network:
    """Hosts and the links between them: each has one, ``eth0``, to a switch that joins them all.

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

    def __post_init__(self) -> None:
        if not 1 <= self.hosts <= 250:
            raise ValueError(f"hosts={self.hosts}; expected 1 to 250")
        if not 0 <= self.loss < 1:
            raise ValueError(f"loss={self.loss:g}; expected a chance from 0 to below 1, such as 0.01")
        if not 0 <= self.corruption <= 1:
            raise ValueError(f"corruption={self.corruption:g}; expected a chance from 0 to 1, such as 0.01")
        if self.congestion is not None and not re.fullmatch(r"[a-z0-9_-]{1,15}", self.congestion):
            raise ValueError(f"congestion={self.congestion!r}; expected the kernel's name of one, such as reno")
        rate, _ = self.bits_per_second, self.delay_seconds
        if rate is not None and rate > CPU_BOUND and not self.allow_cpu_bound:
            raise ValueError(
                f"rate={self.rate!r}; above 1gbit the cores of this machine limit an emulated link, so that times mean "
                "little; to measure nonetheless, allow it (allow_cpu_bound=True, --allow-cpu-bound)"
            )
        link = {"rate": self.rate, "delay": self.delay, "loss": self.loss, "corruption": self.corruption}
        asked = next((name for name, value in link.items() if value), None)
        if asked is not None and self.hosts == 1:
            raise ValueError(f"{asked}={link[asked]!r} with one host; a link needs two")
        if not self.isolated and self.hosts > 1:
            raise ValueError(f"hosts={self.hosts} without namespaces; more than one host needs them")

    @property
    def bits_per_second(self) -> float | None:
        """Rate of each link, both ways; None: not limited."""
        return _quantity("rate", self.rate, _RATE_UNITS, "a number with kbit, mbit or gbit, such as 100mbit")

    @property
    def delay_seconds(self) -> float:
        """Time that a frame takes from host to host, beyond that of its bits."""
        return _quantity("delay", self.delay, _TIME_UNITS, "a number with us, ms or s, such as 1ms") or 0.0

    def __str__(self) -> str:
        words = [f"{self.hosts} host{'s' if self.hosts > 1 else ''}"]
        words += [self.rate] if self.rate else []
        words += [f"{name} {value}" for name in ("delay", "loss", "corruption") if (value := getattr(self, name))]
        return ", ".join([*words, *([self.congestion] if self.congestion else [])])


def _quantity(name: str, text: str | None, units: dict[str, float], expected: str) -> float | None:
    if text is None:
        return None
    match = re.fullmatch(rf"(\d+(?:\.\d+)?)({'|'.join(units)})", text)
    if match is None or float(match[1]) <= 0:
        raise ValueError(f"{name}={text!r}; expected {expected}")
    return float(match[1]) * units[match[2]]
