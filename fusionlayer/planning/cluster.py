"""The ranks that a prediction is for: their number, links and cores."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..base.errors import ConfigError
from ..base.registry import nearest
from .connections import CONGESTION_CONTROLS, Connections, way_name
from .cost_model import AlphaBeta, Cost, LinkCost, parse_rate
from .profile import Profile
from .rates import least_time


@dataclass(frozen=True)
class Cluster:
    """The ranks of a job, as one of them sees them.

    Attributes:
        workers: number of ranks.
        between: link of a host, which its ranks share.
        per_host: ranks of a host; it divides ``workers``.
        inside: link between ranks of one host; needed if a host has several.
        cores: cores that a rank has for itself; less than one if ranks share them.
        threads: threads that a rank computes with.
        staging: seconds of copying this many bytes from the device to the host, and as many back, if the links carry
            the host's memory. A copy engine for each direction does it.
        connections: of a rank to each rank of another host, where they may carry less than the link; None: they fill
            it.
        two_shot: bytes of a ``two_shot`` on the slowest link, relative to equal shares.
        own: forms of the transport's own all-reduce, the fastest of which counts: "ring", and "tree" over NCCL.
    """

    workers: int
    between: LinkCost
    per_host: int = 1
    inside: LinkCost | None = None
    cores: float = 2.0
    threads: int = 1
    staging: Cost | None = None
    connections: Connections | None = None
    two_shot: float = 1.0
    own: tuple[str, ...] = ("ring",)

    def __post_init__(self) -> None:
        if self.workers < 1 or self.per_host < 1 or self.workers % self.per_host:
            raise ConfigError(f"{self.workers} workers, {self.per_host} on each host; expected a multiple, at least 1")
        if self.per_host > 1 and self.inside is None:
            raise ConfigError(f"{self.per_host} workers on a host, and no costs of a link inside one; measure it")
        if not (self.cores > 0 and self.threads >= 1):
            raise ConfigError(f"{self.cores} cores, {self.threads} threads of a rank; expected more than 0")

    @property
    def hosts(self) -> int:
        """Number of hosts."""
        return self.workers // self.per_host

    @property
    def within(self) -> LinkCost:
        """The link inside a host."""
        return self.between if self.inside is None else self.inside


@dataclass(frozen=True)
class Scenario:
    """A cluster to predict for, without its number of ranks.

    Attributes:
        rate: the rate of each host's link, in the words of tc; of the slowest, if ``rates`` are given.
        per_host: ranks of a host.
        cores: cores that each rank has for itself; None: as in the profile's measurement.
        latency: seconds of a message; None: as measured.
        curves: take measured curves instead of alpha-beta costs if the rate was measured.
        rtt: seconds of a round trip between hosts, in addition to the measured latency.
        loss: probability that a segment is dropped between hosts.
        congestion: control of TCP, a key of ``CONGESTION_CONTROLS``.
        connections: TCP connections to each other rank, of our own; None: gloo's one.
        rates: the rates of each host's link, where they differ. A ``two_shot`` has shares by them, as with the setting
            ``rates``.
        nodes: number of ranks of each node of a running job, for the choice of collectives; empty: ``per_host``.
    """

    rate: str
    per_host: int = 1
    cores: float | None = None
    latency: float | None = None
    curves: bool = False
    rtt: float = 0.0
    loss: float = 0.0
    congestion: str = "reno"
    connections: int | None = None
    rates: tuple[str, ...] = ()
    nodes: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        parse_rate(self.rate)
        if self.rates and parse_rate(self.rate) != min(map(parse_rate, self.rates)):
            raise ConfigError(f"rate={self.rate!r} with rates={self.rates!r}; expected the slowest of them")
        if not (0 <= self.rtt < math.inf and 0 <= self.loss < 1):
            raise ConfigError(
                f"rtt={self.rtt!r}, loss={self.loss!r}; expected seconds and a chance below 1, at least 0"
            )
        if self.congestion not in CONGESTION_CONTROLS:
            raise ConfigError(
                f"no formula for congestion control {self.congestion!r}; "
                f"{nearest(self.congestion, sorted(CONGESTION_CONTROLS))}"
            )
        if self.connections is not None and self.connections < 1:
            raise ConfigError(f"connections={self.connections}; expected 1 or more")
        if self.curves and self.is_distant:
            raise ConfigError("a round trip, loss and connections cannot be put into measured curves; leave out one")
        if self.curves and self.latency is not None:
            raise ConfigError("a given latency cannot be put into measured curves; leave out one of them")

    @property
    def is_distant(self) -> bool:
        """Whether the link differs from the measured one by more than its rate and latency."""
        return self.rtt > 0 or self.loss > 0 or self.connections is not None

    def node_sizes(self, workers: int) -> tuple[int, ...]:
        """Return how many ranks each node has, if their total fits."""
        return self.nodes or (self.per_host,) * (workers // self.per_host) or (workers,)

    def cluster(self, profile: Profile, workers: int) -> Cluster:
        """Return the cluster with this many ranks."""
        link = profile.link(self.rate, self.curves)
        connections = None
        if self.latency is not None:
            link = link.with_latency(self.latency)
        if self.is_distant:
            measured = link.latency
            link = link.at_distance(self.rtt, asks=self.connections is None)
            assert isinstance(link.exchange, AlphaBeta)
            connections = Connections(
                self.rtt + measured,
                self.loss,
                self.congestion,
                self.connections,
                8 / max(link.exchange.beta, 1e-300),
                profile.connections.get(way_name(self.rtt, self.loss, self.congestion)),
            )
        if self.per_host > 1 and profile.inside is None:
            raise ConfigError(f"{self.per_host} workers on a host, and the profile has no costs of a link inside one")
        cores = profile.machine.cores_per_worker if self.cores is None else self.cores
        inside = profile.inside.fitted() if profile.inside else None
        threads = profile.machine.threads
        return Cluster(
            workers,
            link,
            min(self.per_host, workers),
            inside,
            cores,
            threads,
            profile.staging,
            connections,
            self._two_shot(workers),
            ("ring", "tree") if profile.uses_nccl else ("ring",),
        )

    def _two_shot(self, workers: int) -> float:
        """Return the time of a ``two_shot`` with shares by rates, as a part of that with equal shares."""
        if not self.rates or workers <= 2:
            return 1.0
        if workers != len(self.rates) * self.per_host:
            raise ConfigError(
                f"{len(self.rates)} rates for {workers} workers, {self.per_host} on each host; give one for each host"
            )
        rates = [parse_rate(rate) for rate in self.rates for _ in range(self.per_host)]
        return least_time(rates) * min(rates) / (2 - 2 / workers)
