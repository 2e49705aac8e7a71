"""Collectives of many hops: a rank's schedule of messages to and from single ranks, and the code that runs it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import accumulate

from torch import Tensor

from ..base.seeds import derive_seed
from ..codecs import AgreeingCodec, Codec
from ..transport import Transport
from ._base import check_pair
from ._pieces import IN_FLIGHT, Piece, cut, pipeline

NOTHING = range(0)

# A tensor is cut into two segments if the messages of both have at least this many elements. Recoding a shorter message
# takes less time than the latency of one more message.
_SEGMENT_MESSAGE = 1 << 16


@dataclass(frozen=True)
class Hop:
    """The chunks that a rank sends and receives in one exchange.

    Attributes:
        to: rank that gets ``sends``.
        sends: chunks to send; may be empty.
        source: rank that ``recvs`` come from.
        recvs: chunks to receive; may be empty.
    """

    to: int
    sends: range
    source: int
    recvs: range


@dataclass(frozen=True)
class HopSchedule:
    """One rank's part in an all-reduce; all ranks have equally many hops.

    Attributes:
        chunks: number of chunks that the tensor is cut into.
        reduce: hops of partial sums. A rank sends a chunk at most once, and does not receive it afterwards.
        gather: hops of sums. The bytes that an owner encoded are sent unchanged.
    """

    chunks: int
    reduce: tuple[Hop, ...]
    gather: tuple[Hop, ...]

    @cached_property
    def own(self) -> list[int]:
        """The chunks that this rank owns: their sums end here, so it sends no partial sum of them."""
        sent = {chunk for hop in self.reduce for chunk in hop.sends}
        return [chunk for chunk in range(self.chunks) if chunk not in sent]

    @cached_property
    def depth(self) -> int:
        """The largest number of messages that this rank receives for one chunk in ``reduce``."""
        received = [chunk for hop in self.reduce for chunk in hop.recvs]
        return max(map(received.count, range(self.chunks)))


def balanced(part: slice, chunks: int, block: int) -> list[slice]:
    """Return ``chunks`` pieces of ``part`` that begin at multiples of ``block`` from its start.

    Their lengths differ by one block at most. Some are empty if there are fewer blocks than chunks.
    """
    blocks = -(-(part.stop - part.start) // block)
    ends = [min(part.start + blocks * i // chunks * block, part.stop) for i in range(chunks + 1)]
    return [slice(*ends[i : i + 2]) for i in range(chunks)]


def segments(numel: float, chunks: int) -> int:
    """Return the number of segments that ``numel`` elements are cut into if the caller gives no ``piece``."""
    return IN_FLIGHT if numel >= IN_FLIGHT * chunks * _SEGMENT_MESSAGE else 1


def multi_hop(
    x: Tensor,
    codec: Codec,
    transport: Transport,
    name: str,
    schedule: HopSchedule,
    *,
    seed: int,
    residual: Tensor | None,
    out: Tensor | None,
    piece: int | None,
) -> None:
    """Run ``schedule`` as the body of the collective ``name``, whose arguments are the others.

    Received messages of a chunk wait until the chunk is encoded. One call decodes all of them, adds this rank's values
    and encodes the sum, so no partial sum is ever in memory. Each rank encodes each element at most once: one residual
    covers all its quantisations, and it draws each random number of its seed once.
    """
    check_pair(name, codec, transport.size)
    numel, unit = x.numel(), schedule.chunks * codec.block
    parts = cut(numel, -(-numel // segments(numel, schedule.chunks)) if piece is None else piece, unit)
    if isinstance(codec, AgreeingCodec):
        lengths = [chunk.stop - chunk.start for part in parts for chunk in balanced(part, schedule.chunks, codec.block)]
        codec = codec.agree(x, transport, seed=seed, residual=residual, chunks=lengths)
    way = codec.arrangement if isinstance(codec, AgreeingCodec) else None
    out, seed = x if out is None else out, derive_seed(seed, transport.rank)
    if way is None:
        return _carry_out(x, out, residual, parts, codec, transport, schedule, seed)
    arranged = way.arrange(x)
    kept = None if residual is None else way.arrange(residual, centred=False)
    parts[-1] = slice(parts[-1].start, arranged.numel())  # ``arrange`` has filled up the last block
    _carry_out(arranged, arranged, kept, parts, codec, transport, schedule, seed)
    way.restore(arranged, out)
    if residual is not None and kept is not None:
        way.restore(kept, residual, centred=False)


def _carry_out(
    x: Tensor,
    out: Tensor,
    residual: Tensor | None,
    parts: Sequence[slice],
    codec: Codec,
    transport: Transport,
    schedule: HopSchedule,
    seed: int,
) -> None:
    """Sum ``x`` into ``out``, both in the order of sending, with this rank's ``seed``; pieces are pipelined."""

    def run(index: int, part: slice) -> Piece:
        chunks = balanced(part, schedule.chunks, codec.block)
        lengths = [chunk.stop - chunk.start for chunk in chunks]
        ends = [0, *accumulate(codec.wire(n, x.dtype).capacity if n else 0 for n in lengths)]
        slot = index % IN_FLIGHT
        mine = transport.scratch(f"outgoing {slot}", ends[-1], x.device)
        theirs = transport.scratch(f"incoming {slot}", schedule.depth * ends[-1], x.device)
        theirs = theirs.view(schedule.depth, ends[-1])
        received = [0] * len(chunks)

        def room(which: range) -> slice:
            return slice(ends[which.start], ends[which.stop])

        def encode(which: Iterable[int]) -> None:
            for i in which:
                chunk, message = chunks[i], mine[ends[i] : ends[i + 1]]
                feedback = None if residual is None else residual[chunk]
                if received[i]:
                    codec.recode(
                        theirs[: received[i], ends[i] : ends[i + 1]],
                        message,
                        lengths[i],
                        dtype=x.dtype,
                        x=x[chunk],
                        seed=seed,
                        offset=chunk.start,
                        residual=feedback,
                    )
                elif lengths[i]:
                    codec.encode(x[chunk], message, seed=seed, offset=chunk.start, residual=feedback)

        def decode(which: Iterable[int]) -> None:
            for i in which:
                if lengths[i]:
                    codec.decode(mine[ends[i] : ends[i + 1]], out[chunks[i]])

        for hop in schedule.reduce:
            encode(hop.sends)
            incoming = theirs[received[hop.recvs.start], room(hop.recvs)] if hop.recvs else mine[:0]
            yield partial(send_and_receive, transport, hop, mine[room(hop.sends)], incoming)
            for i in hop.recvs:
                received[i] += 1
        encode(schedule.own)
        # Every partial sum in ``mine`` has been sent by now, so sums of other ranks may overwrite it.
        for hop in schedule.gather:
            yield partial(send_and_receive, transport, hop, mine[room(hop.sends)], mine[room(hop.recvs)])
            decode(hop.recvs)
        decode(schedule.own)

    pipeline([run(index, part) for index, part in enumerate(parts)], transport, x.device)


def send_and_receive(transport: Transport, hop: Hop, outgoing: Tensor, incoming: Tensor) -> None:
    """Exchange the messages of a hop."""
    nothing = outgoing[:0]
    if hop.to == hop.source:
        return transport.exchange({hop.to: (outgoing, incoming)})
    transport.exchange({hop.to: (outgoing, nothing), hop.source: (nothing, incoming)})
