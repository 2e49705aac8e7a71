"""The networks of the scoreboard: a rate and a round trip."""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass

from benchmarks.lab import Network

__all__ = ["LINKS", "Link"]


@dataclass(frozen=True)
class Link:
    """What joins the hosts.

    Attributes:
        rate: of each host's link, such as "100mbit".
        rtt: of a round trip between two hosts, such as "50ms".
    """

    rate: str
    rtt: str

    @classmethod
    def parse(cls, text: str) -> Link:
        """Return what ``RATE/RTT`` stands for, such as 100mbit/50ms, as a type of command-line arguments."""
        rate, _, rtt = text.partition("/")
        try:
            link = cls(rate, rtt)
            link.network(2)
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"{text!r}: {error}; expected RATE/RTT, such as 100mbit/50ms") from None
        return link

    @property
    def delay(self) -> str:
        """What a frame waits for on its way between two hosts: half of a round trip."""
        match = re.fullmatch(r"(\d+(?:\.\d+)?)(us|ms|s)", self.rtt)
        if match is None:
            raise ValueError(f"round trip {self.rtt!r}; expected a number with us, ms or s")
        return f"{float(match[1]) / 2:g}{match[2]}"

    @property
    def megabits(self) -> float:
        """The rate in Mbit/s."""
        return (self.network(2).bits_per_second or 0.0) / 1e6

    @property
    def words(self) -> str:
        """The link in words, such as "100 Mbit/s, 50 ms"."""
        rate = f"{self.megabits:g} Mbit/s" if self.megabits < 1000 else f"{self.megabits / 1000:g} Gbit/s"
        return f"{rate}, {self.trip}"

    @property
    def trip(self) -> str:
        """The round trip in words, such as "50 ms"."""
        return re.sub(r"(?<=\d)(?=[a-z])", " ", self.rtt)

    def network(self, hosts: int) -> Network:
        """Return the emulated network of so many hosts; ``ValueError`` if there can be none."""
        return Network(hosts, self.rate, delay=self.delay)

    def __str__(self) -> str:
        return f"{self.rate}/{self.rtt}"


LINKS = tuple(Link(rate, rtt) for rtt in ("1ms", "50ms") for rate in ("1gbit", "100mbit", "30mbit"))
