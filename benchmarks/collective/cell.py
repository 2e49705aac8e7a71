"""What one set of worker processes measures, and what comes out of it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from benchmarks.lab import Network

__all__ = ["Cell", "Row", "in_words"]


@dataclass(frozen=True)
class Cell:
    """The same workers on the same network.

    Attributes:
        rate: of each host's link, as ``Network`` takes it; None: one host's loopback.
        hosts: number of hosts.
        workers: number of workers on each host.
        sizes: bytes of f32 that a worker brings to a call.
        rounds: how often each operation has its turn.
        codecs: names of codecs.
        collectives: names of collectives.
        mpi: workers are started by mpirun, and MPI takes part.
        turn_seconds: how long a turn goes on, of calls in a row; 0: one call.
        delay: of every frame, as ``Network`` takes it.
        loss: chance of a frame to be lost.
        congestion: control of TCP.
        interfaces: rates of each host's interfaces, in place of ``rate``.
        functions: names of functions of ``fusionlayer``, which take codecs.
        connections: numbers of TCP connections of our own, each of which the functions are tried over, beside gloo;
            "16/bbr" is 16 connections with a congestion control of their own, "16/tls" are encrypted.
        only: regular expression that an operation's name must match somewhere to be measured.
        most_seconds: an operation whose turns would take longer in all rounds has fewer of them. Where one alone does,
            the first, which is a warm-up otherwise, is the only one.
    """

    rate: str | None
    hosts: int
    workers: int
    sizes: tuple[int, ...]
    rounds: int
    codecs: tuple[str, ...]
    collectives: tuple[str, ...]
    mpi: bool = False
    turn_seconds: float = 0.1
    delay: str | None = None
    loss: float = 0.0
    congestion: str = "reno"
    interfaces: tuple[str, ...] = ()
    functions: tuple[str, ...] = ()
    connections: tuple[str, ...] = ()
    only: str = ""
    most_seconds: float = math.inf

    @property
    def world(self) -> int:
        """Number of workers."""
        return self.hosts * self.workers

    @property
    def network(self) -> str:
        """The network in words."""
        if self.rate is None and not self.interfaces:
            return "loopback"
        words = [self.rate or "+".join(self.interfaces)]
        words += [f"{2e3 * delay:g} ms" for delay in [self.lab().delay_seconds] if delay]
        words += [f"{self.loss:.3g} lost, {self.congestion}"] if self.loss else []
        return f"{', '.join(words)}, {self.hosts} hosts"

    def lab(self, isolated: bool = True) -> Network:
        """Return the network; ``isolated`` as it has it."""
        link = {"delay": self.delay, "loss": self.loss, "congestion": self.congestion}
        return Network(self.hosts, self.rate, isolated, interfaces=self.interfaces, **link)  # type: ignore[arg-type]


@dataclass
class Row:
    """One operation on one size: a figure for each round, and each figure is that of one call.

    Attributes:
        operation: what was called.
        codec: what travelled; "" where the operation takes no codec.
        size: bytes of f32 that a worker brings to a call; of an all-gather, what it gets.
        bus_factor: what bandwidth by ``size`` is multiplied with to be that of the wire if nothing is compressed.
        calls: number of calls in a turn.
        seconds: until the last worker had its result.
        sent: bytes that the network device of a host has sent, headers included, at the host that sent most.
        cpu_seconds: of all threads of a worker, at the worker that took most.
        against: the operation whose time is compared with this one's; "": ``YARDSTICK``, if both send as much.
    """

    operation: str
    codec: str
    size: int
    bus_factor: float
    calls: int
    seconds: list[float] = field(default_factory=list)
    sent: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)
    against: str = ""

    @property
    def name(self) -> str:
        """Operation and codec."""
        return f"{self.operation} {self.codec}".rstrip()


def in_words(size: int) -> str:
    """Return a number of bytes as people write it: 65536 is "64 KB"."""
    for unit, worth in (("MB", 1 << 20), ("KB", 1 << 10)):
        if size >= worth:
            return f"{size / worth:g} {unit}"
    return f"{size} B"
