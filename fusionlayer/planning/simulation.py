"""An event model of one training step: a thread that computes, lanes that communicate, the cores and links they share.

Pure functions over plain numbers; nothing here runs, or knows, a model. ``docs/simulation.md`` has the assumptions.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from ..collectives._hops import segments
from ..errors import ConfigError
from .cost_model import CodecCost, Cost, LinkCost

__all__ = ["ALGORITHMS", "Cluster", "Compute", "Load", "Phase", "Step", "message_phases", "run_step"]


@dataclass(frozen=True)
class Cluster:
    """The ranks of a job, as one of them sees them.

    Attributes:
        workers: number of ranks.
        between: link of a host, which its ranks share.
        per_host: ranks of a host; they divide ``workers``.
        inside: link between ranks of one host; needed where there are several.
        cores: cores that a rank has for itself; less than one where ranks share them.
        threads: that a rank computes with.
    """

    workers: int
    between: LinkCost
    per_host: int = 1
    inside: LinkCost | None = None
    cores: float = 2.0
    threads: int = 1

    def __post_init__(self) -> None:
        if self.workers < 1 or self.per_host < 1 or self.workers % self.per_host:
            raise ConfigError(f"{self.workers} workers, {self.per_host} on each host; expected a multiple, at least 1")
        if self.per_host > 1 and self.inside is None:
            raise ConfigError(f"{self.per_host} workers on a host, and no cost of a link inside; measure one")
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
class Phase:
    """A piece of work of a communication thread.

    Attributes:
        seconds: that it takes with cores to spare and the link for itself.
        cpu: CPU seconds of it: all of it for a codec, a part for a transfer.
        link: that it keeps busy, by name; None: none.
        sent: bytes that the host's link carries away.
    """

    seconds: float
    cpu: float
    link: str | None = None
    sent: float = 0.0


# ---- collectives ----------------------------------------------------------------------------------------------------


_BETWEEN, _INSIDE = "between", "inside"
_HISTOGRAM_BYTES = 1024
_LARGEST_INTEGER = 30  # that a code of thc stands for


def _work(cost: Cost, elements: float) -> Phase:
    seconds = cost(elements)
    return Phase(seconds, seconds)


def _transfer(seconds: float, latency: float, cpu: float, link: str, sent: float = 0.0) -> list[Phase]:
    """A transfer is first on its way, which keeps no link busy, and then on the link."""
    way = min(latency, seconds)
    used = min(cpu, seconds) / seconds if seconds else 0.0
    return [Phase(way, way * used), Phase(seconds - way, (seconds - way) * used, link, sent)]


def _exchange(cluster: Cluster, nbytes: float) -> list[Phase]:
    """A message of ``nbytes`` to every other rank, all in flight together."""
    near, far = cluster.per_host - 1, cluster.workers - cluster.per_host
    within, between = cluster.within, cluster.between
    crossing = cluster.per_host * far * nbytes
    overhead = near * within.overhead + far * between.overhead
    cpu = overhead + nbytes * (near * within.cpu_per_byte + far * between.cpu_per_byte)
    # The measured latency has one message's overhead in it.
    more = overhead * max(0, cluster.workers - 2) / max(1, cluster.workers - 1)
    seconds = max(within.exchange(near * nbytes), between.exchange(crossing)) + more
    if not far:
        return _transfer(seconds, within.latency + more, cpu, _INSIDE)
    return _transfer(seconds, between.latency + more, cpu, _BETWEEN, crossing)


def _relay(cluster: Cluster, nbytes: float, hops: int, transports_own: bool = False) -> list[Phase]:
    """``nbytes`` sent by every rank in ``hops`` messages, each of which waits for the one before.

    Ranks are placed host by host, so a host's link carries one rank's stream.
    """
    link, name = (cluster.within, _INSIDE) if cluster.hosts == 1 else (cluster.between, _BETWEEN)
    # What was measured between two ranks has two hops in it if it is an all-reduce, one if it is an exchange.
    cost, measured_hops = (link.all_reduce, 2) if transports_own else (link.exchange, 1)
    seconds = cost(nbytes) + max(0, hops - measured_hops) * link.latency
    cpu = nbytes * link.cpu_per_byte + hops * link.overhead
    return _transfer(seconds, hops * link.latency, cpu, name, nbytes if name == _BETWEEN else 0.0)


def _share(cluster: Cluster) -> float:
    return (cluster.workers - 1) / cluster.workers


def _dense(n: float, codec: CodecCost, cluster: Cluster, copy: Cost) -> list[Phase]:
    """The transport's own ring all-reduce; a codec that is not lossless is a cast before and after it."""
    nbytes = 2 * _share(cluster) * codec.nbytes(n)
    ring = _relay(cluster, nbytes, 2 * (cluster.workers - 1), transports_own=True)
    return ring if codec.lossless else [_work(codec.encode, n), *ring, _work(codec.decode, n)]


def _beside(work: Phase, transfers: list[Phase]) -> list[Phase]:
    """Work that is done while ``transfers`` are under way, and after them what is left of it."""
    phases, left = [], work.seconds
    for phase in transfers:
        hidden = min(left, phase.seconds)
        if phase.seconds > 0:
            phases.append(replace(phase, cpu=phase.cpu + hidden))
        left -= hidden
    return [*phases, Phase(left, left)]


def _hops(n: float, first: float, chunks: int, codec: CodecCost, half: list[Phase]) -> list[Phase]:
    """Hops of codes: ``first`` elements are encoded, then a chunk's message is added for all ``chunks`` but one.

    Of two segments one is recoded while the other travels.
    """
    seconds = (chunks - 1) * codec.recode(n / chunks)
    recode = Phase(seconds, seconds)
    reduce = [*half, recode] if segments(n, chunks) == 1 else _beside(recode, half)
    return [_work(codec.encode, first), *reduce, *half, _work(codec.decode, n)]


def _ring(n: float, codec: CodecCost, cluster: Cluster, copy: Cost) -> list[Phase]:
    """Reduce-scatter and all-gather around a ring of codes, requantised at every hop."""
    size = cluster.workers
    half = _relay(cluster, _share(cluster) * codec.nbytes(n), (size - 1) * segments(n, size))
    return _hops(n, n / size, size, codec, half)


def _butterfly(n: float, codec: CodecCost, cluster: Cluster, copy: Cost) -> list[Phase]:
    """Halves, quarters, ... of codes between ranks 1, 2, ... apart and back; ranks beyond a power of two before it."""
    steps = cluster.workers.bit_length() - 1
    inner, nbytes = 1 << steps, codec.nbytes(n)

    def swap(link: LinkCost, name: str, each: float, sharing: int) -> list[Phase]:
        messages = segments(n, inner)
        latency = messages * link.latency
        seconds = link.exchange(sharing * each) + latency - link.latency
        cpu = messages * link.overhead + each * link.cpu_per_byte
        return _transfer(seconds, latency, cpu, name, sharing * each if name == _BETWEEN else 0.0)

    def across(each: float, ranks: int) -> list[Phase]:
        if cluster.hosts == 1:
            return swap(cluster.within, _INSIDE, each, 1)
        return swap(cluster.between, _BETWEEN, each, min(ranks, cluster.per_host))

    half: list[Phase] = []
    for step in range(steps):
        each = nbytes / (2 << step)
        near = 2 << step <= cluster.per_host
        half += swap(cluster.within, _INSIDE, each, 1) if near else across(each, inner)
    if inner == cluster.workers:
        return _hops(n, n / 2, inner, codec, half)
    whole = across(nbytes, cluster.workers - inner)
    # Those who have a message before the first hop have nothing to encode without one.
    return [_work(codec.encode, n), *whole, _work(codec.recode, n), *_hops(n, 0, inner, codec, half), *whole]


def _tree(n: float, codec: CodecCost, cluster: Cluster, copy: Cost) -> list[Phase]:
    """Two pipelined binary trees, each for one half: every rank is an inner node of one of them."""
    hops = 2 * math.ceil(math.log2(cluster.workers))
    tree = _relay(cluster, 2 * codec.nbytes(n), hops)
    return [_work(codec.encode, n), *tree, _work(codec.recode, n), _work(codec.decode, n)]


def _one_shot(n: float, codec: CodecCost, cluster: Cluster, copy: Cost) -> list[Phase]:
    """All-gather of whole messages and a local sum: also what sparse gradients travel by."""
    gather = _exchange(cluster, codec.nbytes(n))
    return [_work(codec.encode, n), *gather, _work(codec.sum, cluster.workers * n)]


def _oktopk(n: float, codec: CodecCost, cluster: Cluster, copy: Cost) -> list[Phase]:
    """Selections to the owners of regions, sums that pass from these to all; boundaries, sizes, histograms between."""
    numbers = _exchange(cluster, 8)
    histogram = _relay(cluster, 2 * _share(cluster) * _HISTOGRAM_BYTES, 2 * (cluster.workers - 1), transports_own=True)
    piece = _exchange(cluster, codec.nbytes(n) / cluster.workers)
    reduced = [_work(codec.encode, n), *histogram, *numbers, *piece, _work(codec.decode, n)]
    return [*reduced, *(4 * histogram), *numbers, *piece, _work(codec.decode, n)]


def _two_shot(n: float, codec: CodecCost, cluster: Cluster, copy: Cost) -> list[Phase]:
    """All-to-all of pieces, sum, all-gather of sums."""
    exchange = _exchange(cluster, codec.nbytes(n) / cluster.workers)
    return [_work(codec.encode, n), *exchange, _work(codec.recode, n), *exchange, _work(codec.decode, n)]


def _zipped(n: float, codec: CodecCost, cluster: Cluster, copy: Cost) -> list[Phase]:
    """All-to-all, sum, all-gather of messages that travel in two parts each: a round trip more than ``two_shot``."""
    exchange = [*_exchange(cluster, codec.nbytes(n) / cluster.workers), *_exchange(cluster, 1)]
    return [_work(codec.encode, n), *exchange, _work(codec.recode, n), *exchange, _work(codec.decode, n)]


def _integer_sum(n: float, codec: CodecCost, cluster: Cluster, copy: Cost) -> list[Phase]:
    """A statistic of all ranks, all-to-all of codes, sums of their integers, all-gather of these, decoded once."""
    for bits in (8, 12, 16):
        if cluster.workers * _LARGEST_INTEGER < 1 << bits:
            break
    else:
        raise ConfigError(
            f"algorithm 'integer_sum' adds over at most {0xFFFF // _LARGEST_INTEGER} ranks, these are "
            f"{cluster.workers}; choose another algorithm"
        )
    codes = _exchange(cluster, codec.nbytes(n) / cluster.workers)
    sums = _exchange(cluster, n * bits / 8 / cluster.workers)
    agreed = [*_exchange(cluster, 4), _work(codec.encode, n)]
    return [*agreed, *codes, _work(codec.sum, n), *sums, _work(codec.decode, n)]


def _low_rank(n: float, codec: CodecCost, cluster: Cluster, copy: Cost) -> list[Phase]:
    """All-reduces of left factors and of right ones, each half of a message; what a square of the elements has."""
    half = _relay(cluster, _share(cluster) * codec.nbytes(n), 2 * (cluster.workers - 1), transports_own=True)
    return [_work(codec.encode, n), *half, *half, _work(codec.decode, n)]


def _two_level(n: float, codec: CodecCost, cluster: Cluster, copy: Cost) -> list[Phase]:
    """Sums of codes within hosts, then between them, a piece for each rank; codes of the sums gathered likewise."""
    ranks, hosts = cluster.per_host, cluster.hosts

    def swap(link: LinkCost, name: str, peers: int, sharing: int, nbytes: float) -> list[Phase]:
        more = max(0, peers - 1) * link.overhead
        seconds = link.exchange(sharing * peers * nbytes) + more
        cpu = peers * (link.overhead + nbytes * link.cpu_per_byte)
        return _transfer(seconds, link.latency + more, cpu, name, ranks * peers * nbytes if name == _BETWEEN else 0.0)

    piece = n / ranks
    across = swap(cluster.between, _BETWEEN, hosts - 1, ranks, codec.nbytes(piece) / hosts)
    if hosts == 1 or ranks == 1:
        return _two_shot(n, replace(codec, bits=codec.nbytes_within(8) if hosts == 1 else codec.bits), cluster, copy)
    reduce = swap(cluster.within, _INSIDE, ranks - 1, 1, codec.nbytes_within(piece))
    gather = swap(cluster.within, _INSIDE, ranks - 1, 1, codec.nbytes(piece))
    summed = [_work(codec.encode, n), *reduce, _work(codec.recode, n), *across, _work(codec.recode, piece)]
    return [*summed, *across, *gather, _work(codec.decode, n)]


ALGORITHMS: dict[str, Callable[[float, CodecCost, Cluster, Cost], list[Phase]]] = {
    "dense": _dense,
    "ring": _ring,
    "butterfly": _butterfly,
    "tree": _tree,
    "one_shot": _one_shot,
    "gather": _one_shot,  # of messages that were encoded ahead
    "gather_v": _one_shot,
    "oktopk": _oktopk,
    "two_shot": _two_shot,
    "zipped": _zipped,
    "switched": _zipped,  # at most
    "integer_sum": _integer_sum,
    "low_rank": _low_rank,
    "two_level": _two_level,
}
"""Collectives by name: what each does for a bucket of so many elements."""


def message_phases(
    algorithm: str, elements: float, codec: CodecCost, cluster: Cluster, copy: Cost, unpack: bool = True
) -> list[Phase]:
    """Return what a communication thread does for a bucket of f32: pack, the collective, unpack.

    Args:
        algorithm: a key of ``ALGORITHMS``.
        elements: of the bucket.
        codec: its costs.
        cluster: the ranks.
        copy: CPU seconds by number of elements, of packing and of unpacking.
        unpack: results are copied into the gradients.
    """
    if algorithm not in ALGORITHMS:
        raise ConfigError(f"unknown algorithm {algorithm!r}; expected one of: {', '.join(ALGORITHMS)}")
    if cluster.workers == 1:
        return []
    packing = _work(copy, elements)
    phases = [packing, *ALGORITHMS[algorithm](elements, codec, cluster, copy), *([packing] if unpack else [])]
    return [phase for phase in phases if phase.seconds > 0]


# ---- a step ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Compute:
    """Seconds that a step's work takes alone, with all threads of the rank running.

    Attributes:
        forward: of the forward pass.
        backward: of the backward pass.
        optimizer: of the update, spread over buckets by their elements.
    """

    forward: float
    backward: float
    optimizer: float


@dataclass(frozen=True)
class Load:
    """A bucket, as the simulation sees it.

    Attributes:
        ready: seconds of backward after which its last gradient is there.
        used: seconds of forward after which its first parameter is needed.
        elements: of the bucket; they share out the optimizer's time.
        phases: what its lane does for it.
    """

    ready: float
    used: float
    elements: float
    phases: Sequence[Phase]


@dataclass(frozen=True)
class Step:
    """A simulated step.

    Attributes:
        seconds: from the start of backward to the start of the next.
        alone: the same without communication.
        communication: seconds of all phases, had each cores and link for itself.
        sent: bytes that a host's link carries away.
        spans: (start, end) of each bucket on its lane, seconds after the start of backward.
    """

    seconds: float
    alone: float
    communication: float
    sent: float
    spans: tuple[tuple[float, float], ...]


class _SimulatedWork(NamedTuple):
    """Takes ``seconds`` if the thread gets the ``cores`` and the ``link`` that it wants."""

    seconds: float
    cores: float
    link: str | None = None


class _Signal(NamedTuple):
    """Makes an event happen: (what, bucket)."""

    event: tuple[str, int]


class _Wait(NamedTuple):
    """Lasts until an event has happened."""

    event: tuple[str, int]


_Action = _SimulatedWork | _Signal | _Wait
_IDLE = _SimulatedWork(0.0, 0.0)


class _SimulatedThread:
    """A thread and what it has still to do; ``threads`` of the system that work alike count as one."""

    def __init__(self, actions: Iterable[_Action], threads: int = 1) -> None:
        self._actions = deque(actions)
        self._left = 0.0
        self.threads = threads
        self.work = _IDLE

    @property
    def ended(self) -> bool:
        """Whether nothing is left to do."""
        return self.work is _IDLE and not self._actions

    def settle(self, events: dict[tuple[str, int], float], now: float) -> bool:
        """Do what takes no time, up to the next work or a wait that is not over; return whether anything was done."""
        done = False
        while self.work is _IDLE and self._actions:
            action = self._actions[0]
            if isinstance(action, _Wait) and action.event not in events:
                break
            if isinstance(action, _Signal):
                events[action.event] = now
            elif isinstance(action, _SimulatedWork) and action.seconds > 0:
                self.work, self._left = action, action.seconds
            self._actions.popleft()
            done = True
        return done

    def time_left(self, speed: float) -> float:
        """Return seconds until the present work is done at a part ``speed`` of its full speed."""
        return self._left / speed

    def advance(self, speed: float, seconds: float) -> None:
        """Work for so long."""
        if seconds >= self.time_left(speed):
            self.work = _IDLE
        else:
            self._left -= seconds * speed


def run_step(
    compute: Compute,
    loads: Sequence[Load],
    *,
    cores: float = 2.0,
    threads: int = 1,
    lanes: int = 1,
    overlap_forward: bool = False,
) -> Step:
    """Return the step in which the buckets ``loads`` are sent in the order given.

    The computing thread goes through backward, update and forward. A bucket can be sent when its gradients are there
    and all buckets before it could. The lanes take buckets in turn; each sends one after the other. Transfers that use
    a link at once have equal parts of it; threads that want more cores than the rank has, fair shares of these.
    All buckets have arrived when the next backward begins, so that one step is like any other.

    Args:
        compute: the rank's work without communication.
        loads: its buckets.
        cores: cores of the rank, for all its threads together.
        threads: that it computes with.
        lanes: communication threads.
        overlap_forward: a bucket is waited for, and its parameters updated, when forward first needs them; otherwise
            all of them before the update.
    """
    computing = _SimulatedThread(_computation(compute, loads, overlap_forward), threads)
    every = [computing, *(_SimulatedThread(_lane(loads, lane, lanes)) for lane in range(lanes))]
    events: dict[tuple[str, int], float] = {}
    now = 0.0
    while True:
        while any([thread.settle(events, now) for thread in every]):
            pass
        if computing.ended:
            break
        busy = [thread for thread in every if thread.work is not _IDLE]
        speeds = _speeds(busy, cores)
        seconds = min(thread.time_left(speed) for thread, speed in zip(busy, speeds, strict=True))
        for thread, speed in zip(busy, speeds, strict=True):
            thread.advance(speed, seconds)
        now += seconds
    phases = [phase for load in loads for phase in load.phases]
    return Step(
        now,
        (compute.forward + compute.backward + compute.optimizer) * max(1.0, threads / cores),
        sum(phase.seconds for phase in phases),
        sum(phase.sent for phase in phases),
        tuple((events["started", i], events["arrived", i]) for i in range(len(loads))),
    )


def _computation(compute: Compute, loads: Sequence[Load], overlap_forward: bool) -> Iterator[_Action]:
    """Yield backward, update and forward; ready and used beyond the end of a pass count as its end."""
    done = 0.0
    for i in sorted(range(len(loads)), key=lambda i: loads[i].ready):
        until = min(loads[i].ready, compute.backward)
        yield _SimulatedWork(until - done, 1.0)
        yield _Signal(("ready", i))
        done = max(done, until)
    yield _SimulatedWork(compute.backward - done, 1.0)

    total = sum(load.elements for load in loads)
    done = 0.0
    if overlap_forward and total:
        for i in sorted(range(len(loads)), key=lambda i: loads[i].used):
            until = min(loads[i].used, compute.forward)
            yield _SimulatedWork(until - done, 1.0)
            yield _Wait(("arrived", i))
            yield _SimulatedWork(compute.optimizer * loads[i].elements / total, 1.0)
            done = max(done, until)
    else:
        yield from (_Wait(("arrived", i)) for i in range(len(loads)))
        yield _SimulatedWork(compute.optimizer, 1.0)
    yield _SimulatedWork(compute.forward - done, 1.0)


def _lane(loads: Sequence[Load], lane: int, lanes: int) -> Iterator[_Action]:
    for i in range(lane, len(loads), lanes):
        yield from (_Wait(("ready", before)) for before in range(max(0, i - lanes + 1), i + 1))
        yield _Signal(("started", i))
        for phase in loads[i].phases:
            if phase.seconds > 0:
                yield _SimulatedWork(phase.seconds, phase.cpu / phase.seconds, phase.link)
        yield _Signal(("arrived", i))


def _speeds(busy: Sequence[_SimulatedThread], cores: float) -> list[float]:
    """Return the part of its full speed that each thread has: max-min fair shares of cores, equal ones of links."""
    on_link = Counter(thread.work.link for thread in busy)
    parts = [1.0 if thread.work.link is None else 1.0 / on_link[thread.work.link] for thread in busy]
    wanted = [thread.work.cores * part for thread, part in zip(busy, parts, strict=True)]
    left, sharers = cores, sum(thread.threads for thread in busy)
    for i in sorted(range(len(busy)), key=wanted.__getitem__):
        given = min(wanted[i], left / sharers)
        if given < wanted[i]:
            parts[i] *= given / wanted[i]
        left -= given * busy[i].threads
        sharers -= busy[i].threads
    return parts
