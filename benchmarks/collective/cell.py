"""What one set of worker processes measures, and what comes out of it."""

from __future__ import annotations

from dataclasses import dataclass, field

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

    @property
    def world(self) -> int:
        """Number of workers."""
        return self.hosts * self.workers

    @property
    def network(self) -> str:
        """The network in words."""
        return "loopback" if self.rate is None else f"{self.rate}, {self.hosts} hosts"


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
    """

    operation: str
    codec: str
    size: int
    bus_factor: float
    calls: int
    seconds: list[float] = field(default_factory=list)
    sent: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)

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
