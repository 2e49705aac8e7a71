"""The work of a communication thread for a bucket in each collective: the codec's work and transfers, in order."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from ..base.errors import ConfigError
from ..collectives._hops import segments
from ..collectives.integer_sum import LARGEST
from .cluster import Cluster
from .cost_model import CodecCost, Cost, LinkCost


@dataclass(frozen=True)
class Phase:
    """A piece of work of a communication thread.

    Attributes:
        seconds: its length with cores to spare and the link for itself.
        cpu: its CPU seconds: all of it for a codec, a part for a transfer.
        link: name of the link that it keeps busy, or None.
        share: the share of that link, which it keeps busy by itself.
        sent: bytes that leave the host over its link.
    """

    seconds: float
    cpu: float
    link: str | None = None
    sent: float = 0.0
    share: float = 1.0


# ---- collectives ----------------------------------------------------------------------------------------------------


BETWEEN, _INSIDE = "between", "inside"
_TO_HOST, _FROM_HOST = "copies to the host", "copies from the host"
_HISTOGRAM_BYTES = 1024
_OMNIREDUCE_BLOCK = 256


def _work(cost: Cost, elements: float) -> Phase:
    seconds = cost(elements)
    return Phase(seconds, seconds)


def _transfer(
    cluster: Cluster,
    nbytes: float,
    seconds: float,
    latency: float,
    cpu: float,
    link: str,
    sent: float = 0.0,
    pair: float = 0.0,
) -> list[Phase]:
    """Return a transfer: first its latency, which keeps no link busy, then its time on the link.

    Of the ``sent`` bytes of a host, ``pair`` go from one rank to one other rank. If their connections are slower than
    the shared link, the link is partly busy; with shared connections all of it counts as busy.

    If messages are sent from the host's memory, a copy engine of the device first copies the rank's ``nbytes`` there,
    and another one copies as many back.
    """
    way = min(latency, seconds)
    used = min(cpu, seconds) / seconds if seconds else 0.0
    busy = taken = seconds - way
    if link == BETWEEN and cluster.connections is not None and busy > 0:
        taken = max(busy, cluster.connections.seconds(pair))
    shared = cluster.connections is not None and cluster.connections.shared
    share = 1.0 if shared or not taken else busy / taken
    phases = [Phase(way, way * used), Phase(taken, busy * used, link, sent, share)]
    if cluster.staging is None:
        return phases
    copying = cluster.staging(nbytes)
    return [Phase(copying, 0.0, _TO_HOST), *phases, Phase(copying, 0.0, _FROM_HOST)]


def exchange_phases(cluster: Cluster, nbytes: float) -> list[Phase]:
    """Return the transfer of a message of ``nbytes`` to every other rank, all in flight together."""
    return _exchange(cluster, nbytes, cluster.per_host - 1, cluster.workers - cluster.per_host)


def _exchange(cluster: Cluster, nbytes: float, near: float, far: float) -> list[Phase]:
    """Return the transfer from every rank to ``near`` ranks of its host and ``far`` others, all in flight together."""
    within, between = cluster.within, cluster.between
    crossing = cluster.per_host * far * nbytes
    overhead = near * within.overhead + far * between.overhead
    cpu = overhead + nbytes * (near * within.cpu_per_byte + far * between.cpu_per_byte)
    # The measured latency contains one message's overhead.
    more = overhead * max(0, near + far - 1) / max(1, near + far)
    seconds = max(within.exchange(near * nbytes), between.exchange(crossing)) + more
    own = (near + far) * nbytes
    if not far:
        return _transfer(cluster, own, seconds, within.latency + more, cpu, _INSIDE)
    return _transfer(cluster, own, seconds, between.latency + more, cpu, BETWEEN, crossing, nbytes)


def _relay(cluster: Cluster, nbytes: float, hops: int, transports_own: bool = False) -> list[Phase]:
    """Return the transfer of ``nbytes`` from every rank in ``hops`` messages, each after the one before.

    Ranks are placed host by host, so a host's link carries one rank's stream, and a message crosses it once on its way
    through all ranks.
    """
    crossing = cluster.hosts / cluster.workers if cluster.hosts > 1 else 0.0
    return _chain(cluster, nbytes, hops * (1 - crossing), hops * crossing, transports_own)


def _chain(cluster: Cluster, nbytes: float, near: float, far: float, transports_own: bool) -> list[Phase]:
    """Return a transfer in consecutive messages, ``near`` of them inside hosts and ``far`` between hosts."""
    # A measured all-reduce of two ranks contains two hops, a measured exchange one.
    measured_hops = 2 if transports_own else 1
    seconds = latency = cpu = 0.0
    for link, hops in ((cluster.within, near), (cluster.between, far)):
        if hops:
            seconds = max(seconds, (link.all_reduce if transports_own else link.exchange)(nbytes))
            latency += hops * (link.hop if transports_own else link.latency)
            per_byte = link.cpu_per_summed_byte if transports_own else link.cpu_per_byte
            cpu += hops * link.overhead + nbytes * per_byte * hops / (near + far)
    seconds += max(0.0, near + far - measured_hops) / max(near + far, 1) * latency
    if not far:
        return _transfer(cluster, nbytes, seconds, latency, cpu, _INSIDE)
    return _transfer(cluster, nbytes, seconds, latency, cpu, BETWEEN, nbytes, nbytes)


def _share(cluster: Cluster) -> float:
    return (cluster.workers - 1) / cluster.workers


def _dense(n: float, codec: CodecCost, cluster: Cluster, copy: Cost) -> list[Phase]:
    """The transport's own all-reduce; a lossy codec is a cast before and after it."""
    own = min((OWN[form](cluster, codec.nbytes(n)) for form in cluster.own), key=seconds_of)
    return own if codec.lossless else [_work(codec.encode, n), *own, _work(codec.decode, n)]


def _ring_sum(cluster: Cluster, nbytes: float) -> list[Phase]:
    return _relay(cluster, 2 * _share(cluster) * nbytes, 2 * (cluster.workers - 1), transports_own=True)


def _tree_sum(cluster: Cluster, nbytes: float) -> list[Phase]:
    """NCCL's two trees over hosts, each for half of the bytes, with a chain of the ranks inside a host.

    A host has children in one of the trees alone, so its link carries all bytes up and all of them down.
    """
    depth = (cluster.hosts - 1).bit_length()
    return _chain(cluster, 2 * nbytes, 2 * (cluster.per_host - 1), 2 * depth, transports_own=True)


OWN = {"ring": _ring_sum, "tree": _tree_sum}
"""Forms of the transport's own all-reduce, by name."""


def seconds_of(phases: Iterable[Phase]) -> float:
    """Return the seconds of all ``phases``, one after the other."""
    return sum(phase.seconds for phase in phases)


def _beside(work: Phase, transfers: list[Phase]) -> list[Phase]:
    """Return ``transfers`` with ``work`` done during them, and the rest of the work after them."""
    phases, left = [], work.seconds
    for phase in transfers:
        hidden = min(left, phase.seconds)
        if phase.seconds > 0:
            phases.append(replace(phase, cpu=phase.cpu + hidden))
        left -= hidden
    return [*phases, Phase(left, left)]


def _hops(n: float, first: float, chunks: int, codec: CodecCost, half: list[Phase]) -> list[Phase]:
    """Return hops of codes: encode ``first`` elements, then recode one chunk less than ``chunks``.

    With two segments, one is recoded while the other is sent.
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
    """Swap halves, quarters, ... of codes between ranks 1, 2, ... apart, and back.

    Ranks beyond a power of two send all they have before the first hop, and get the sum after the last.
    """
    steps = cluster.workers.bit_length() - 1
    inner, nbytes = 1 << steps, codec.nbytes(n)

    def swap(link: LinkCost, name: str, each: float, sharing: int) -> list[Phase]:
        messages = segments(n, inner)
        latency = messages * link.latency
        seconds = link.exchange(sharing * each) + latency - link.latency
        cpu = messages * link.overhead + each * link.cpu_per_byte
        return _transfer(cluster, each, seconds, latency, cpu, name, sharing * each if name == BETWEEN else 0.0, each)

    def across(each: float, ranks: int) -> list[Phase]:
        if cluster.hosts == 1:
            return swap(cluster.within, _INSIDE, each, 1)
        return swap(cluster.between, BETWEEN, each, min(ranks, cluster.per_host))

    half: list[Phase] = []
    for step in range(steps):
        each = nbytes / (2 << step)
        near = 2 << step <= cluster.per_host
        half += swap(cluster.within, _INSIDE, each, 1) if near else across(each, inner)
    if inner == cluster.workers:
        return _hops(n, n / 2, inner, codec, half)
    whole = across(nbytes, cluster.workers - inner)
    # Ranks that receive a message before the first hop recode instead of encoding for that hop.
    return [_work(codec.encode, n), *whole, _work(codec.recode, n), *_hops(n, 0, inner, codec, half), *whole]


def _one_shot(n: float, codec: CodecCost, cluster: Cluster, copy: Cost) -> list[Phase]:
    """All-gather of whole messages and a local sum; sparse gradients are sent like this too."""
    gather = exchange_phases(cluster, codec.nbytes(n))
    return [_work(codec.encode, n), *gather, _work(codec.sum, cluster.workers * n)]


def _oktopk(n: float, codec: CodecCost, cluster: Cluster, copy: Cost) -> list[Phase]:
    """Selections go to the owners of regions, and the sums that pass go from these to all ranks.

    Boundaries, sizes and histograms are exchanged in between. The codec ``oktopk`` keeps boundaries and histograms
    for this many sums that these cost next to nothing.
    """
    numbers = exchange_phases(cluster, 8)
    histogram = _ring_sum(cluster, _HISTOGRAM_BYTES)
    found = [] if codec.collective == "oktopk" else histogram
    piece = exchange_phases(cluster, codec.nbytes(n) / cluster.workers)
    reduced = [_work(codec.encode, n), *found, *numbers, *piece, _work(codec.decode, n)]
    return [*reduced, *(4 * found), *numbers, *piece, _work(codec.decode, n)]


def _two_shot(n: float, codec: CodecCost, cluster: Cluster, copy: Cost) -> list[Phase]:
    """All-to-all of pieces, sum, all-gather of sums."""
    exchange = exchange_phases(cluster, cluster.two_shot * codec.nbytes(n) / cluster.workers)
    return [_work(codec.encode, n), *exchange, _work(codec.recode, n), *exchange, _work(codec.decode, n)]


def _zipped(n: float, codec: CodecCost, cluster: Cluster, copy: Cost) -> list[Phase]:
    """All-to-all, sum, all-gather of messages in two parts each, which take more round trips than ``two_shot``."""
    exchange = [*exchange_phases(cluster, codec.nbytes(n) / cluster.workers), *exchange_phases(cluster, 1)]
    return [_work(codec.encode, n), *exchange, _work(codec.recode, n), *exchange, _work(codec.decode, n)]


def _integer_sum(n: float, codec: CodecCost, cluster: Cluster, copy: Cost) -> list[Phase]:
    """Exchange of a statistic, all-to-all of codes, sums of their integers, all-gather of these, one decoding."""
    for bits in (8, 12, 16):
        if cluster.workers * LARGEST < 1 << bits:
            break
    else:
        raise ConfigError(
            f"algorithm 'integer_sum' adds over at most {0xFFFF // LARGEST} ranks, these are "
            f"{cluster.workers}; choose another algorithm"
        )
    codes = exchange_phases(cluster, codec.nbytes(n) / cluster.workers)
    sums = exchange_phases(cluster, n * bits / 8 / cluster.workers)
    agreed = [*exchange_phases(cluster, 4), _work(codec.encode, n)]
    return [*agreed, *codes, _work(codec.sum, n), *sums, _work(codec.decode, n)]


def _low_rank(n: float, codec: CodecCost, cluster: Cluster, copy: Cost) -> list[Phase]:
    """All-reduces of left and of right factors; each has half of a message, as for a square matrix."""
    half = _ring_sum(cluster, codec.nbytes(n) / 2)
    return [_work(codec.encode, n), *half, *half, _work(codec.decode, n)]


def _omnireduce(n: float, codec: CodecCost, cluster: Cluster, copy: Cost) -> list[Phase]:
    """Two exchanges of a byte for each block select blocks; their values are sent around a ring in bf16."""
    size, nbytes = cluster.workers, codec.nbytes(n)
    chosen = nbytes / 2
    union = exchange_phases(cluster, n / _OMNIREDUCE_BLOCK / size)
    half = _relay(cluster, _share(cluster) * nbytes, (size - 1) * segments(chosen, size))
    # Choosing blocks counts as encoding, and summing them in the ring as recoding.
    return [_work(codec.encode, n), *union, *union, *_hops(chosen, 0, size, codec, half)]


def _two_level(n: float, codec: CodecCost, cluster: Cluster, copy: Cost) -> list[Phase]:
    """Sums of codes inside hosts, then between them, a piece for each rank; then both levels gather the sums."""
    ranks, hosts = cluster.per_host, cluster.hosts
    if hosts == 1 or ranks == 1:
        return _two_shot(n, replace(codec, bits=codec.nbytes_within(8) if hosts == 1 else codec.bits), cluster, copy)
    piece = n / ranks
    reduce = _exchange(cluster, codec.nbytes_within(piece), ranks - 1, 0)
    across = _exchange(cluster, codec.nbytes(piece) / hosts, 0, hosts - 1)
    gather = _exchange(cluster, codec.nbytes(piece), ranks - 1, 0)
    summed = [_work(codec.encode, n), *reduce, _work(codec.recode, n), *across, _work(codec.recode, piece)]
    return [*summed, *across, *gather, _work(codec.decode, n)]


def _grid(n: float, codec: CodecCost, cluster: Cluster, copy: Cost) -> list[Phase]:
    """Exchanges of sums along rows of about sqrt(workers) ranks, then between rows; the way back takes the same."""
    rows = round(math.sqrt(cluster.workers))
    if rows == 1:
        return _two_shot(n, codec, cluster, copy)
    row = cluster.workers / rows
    near, near_rows = min(cluster.per_host, row) - 1, rows - 1 if cluster.hosts == 1 else 0
    along = _exchange(cluster, codec.nbytes(n) / row, near, row - 1 - near)
    across = _exchange(cluster, codec.nbytes(n) / cluster.workers, near_rows, rows - 1 - near_rows)
    summed = [_work(codec.encode, n), *along, _work(codec.recode, n), *across, _work(codec.recode, n / row)]
    return [*summed, *across, *along, _work(codec.decode, n)]


ALGORITHMS: dict[str, Callable[[float, CodecCost, Cluster, Cost], list[Phase]]] = {
    "dense": _dense,
    "ring": _ring,
    "butterfly": _butterfly,
    "one_shot": _one_shot,
    "gather": _one_shot,  # its messages were encoded ahead
    "gather_v": _one_shot,
    "oktopk": _oktopk,
    "two_shot": _two_shot,
    "zipped": _zipped,
    "switched": _zipped,  # it costs at most that
    "integer_sum": _integer_sum,
    "low_rank": _low_rank,
    "omnireduce": _omnireduce,
    "two_level": _two_level,
    "grid": _grid,
}
"""Every collective by name: its phases for a bucket of this many elements.

They are here and not with the collectives, which know nothing of links and measured costs. A test compares the names
with the registered ones.
"""


def message_phases(
    algorithm: str, elements: float, codec: CodecCost, cluster: Cluster, copy: Cost, unpack: bool = True
) -> list[Phase]:
    """Return the work of a communication thread for a bucket of f32: pack, the collective, unpack."""
    if algorithm not in ALGORITHMS:
        raise ConfigError(f"unknown algorithm {algorithm!r}; expected one of: {', '.join(ALGORITHMS)}")
    if cluster.workers == 1:
        return []
    packing = _work(copy, elements)
    phases = [packing, *ALGORITHMS[algorithm](elements, codec, cluster, copy), *([packing] if unpack else [])]
    return [phase for phase in phases if phase.seconds > 0]
