"""``two_level``: sums inside nodes first and then between nodes, where every value is sent only once."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import or_

import torch
from torch import Tensor

from ..base.seeds import derive_seed
from ..codecs import AgreeingCodec, Codec, TransformCodec, TwoLevelCodec
from ..transport import Transport
from ._base import check_pair, collective, split_evenly, sums_anew
from ._pieces import IN_FLIGHT, Piece, cut, pipeline
from .two_shot import two_shot

__all__ = [
    "Grid",
    "TwoLevelHop",
    "gather",
    "grid",
    "one_level",
    "overlap",
    "reduce_scatter",
    "room",
    "slot_of",
    "two_level",
]


@dataclass(frozen=True)
class Grid:
    """The ranks as a grid: one row for each node, all rows of one length.

    Attributes:
        ranks: ``ranks[a][b]`` is number b of node a.
        node: the row of this rank.
        local: the column of this rank.
    """

    ranks: tuple[tuple[int, ...], ...]
    node: int
    local: int

    @property
    def node_ranks(self) -> tuple[int, ...]:
        """The ranks of this node."""
        return self.ranks[self.node]

    @property
    def columns(self) -> tuple[int, ...]:
        """All ranks, column by column."""
        return tuple(rank for column in zip(*self.ranks, strict=True) for rank in column)

    @property
    def cross_ranks(self) -> tuple[int, ...]:
        """The ranks in the column of this rank, one in each node."""
        return tuple(row[self.local] for row in self.ranks)


def grid(transport: Transport) -> Grid | None:
    """Return the grid of the ranks, or None if there are no two levels: one node, or nodes of one rank or unequal size.

    The first call makes one exchange, so all ranks make it together.
    """
    nodes = transport.nodes
    if len(nodes) == 1 or len(nodes) == transport.size or len({len(node) for node in nodes}) > 1:
        return None
    for a, node in enumerate(nodes):
        if transport.rank in node:
            return Grid(nodes, a, node.index(transport.rank))
    raise AssertionError(f"rank {transport.rank} is in none of {nodes}")


def one_level(codec: Codec, transport: Transport) -> Codec:
    """Return the codec to use if there are no two levels: ``codec.within`` on one node, else ``codec`` itself."""
    return codec.within if isinstance(codec, TwoLevelCodec) and len(transport.nodes) == 1 else codec


@collective("two_level", takes=sums_anew, because="encodes partial sums anew, where nothing may be left out,")
def two_level(
    x: Tensor,
    codec: Codec,
    transport: Transport,
    *,
    seed: int = 0,
    residual: Tensor | None = None,
    out: Tensor | None = None,
    piece: int | None = None,
) -> None:
    """Sum inside nodes, then between them (SDP4Bit, section 3.2 and Algorithm 3; ZeRO++), three quantisations.

    1. Encode: ``codec.within`` encodes every chunk of ``x``; there is one chunk for each rank of the job.
    2. All-to-all inside nodes: a rank gets its node's messages for its own chunk and for the chunks of its
       ``cross_ranks``, the ranks with the same place in other nodes.
    3. Recode: for each of these chunks, the sum over the node becomes a message of ``codec``.
    4. All-to-all between cross ranks; each rank recodes the sum of its own chunk.
    5. All-gather between cross ranks, then inside nodes; all ranks decode the same bytes.

    Each node sends 2 (nodes - 1) / nodes of the tensor's message, whatever the number of its ranks. If there are no two
    levels this is ``two_shot``, on one node with ``codec.within``.

    Without ``residual`` the ranks sum transformed values and transform the result back once, at the end. With
    ``residual`` each loss goes to the residual of the rank that made it, so each recoding transforms back and forth.
    Other arguments are those of ``two_shot``. With ``piece``, messages between nodes of one piece are sent in the same
    exchange as messages inside nodes of the next piece.
    """
    check_pair("two_level", codec, transport.size)
    here = grid(transport)
    if here is None:
        return two_shot(x, one_level(codec, transport), transport, seed=seed, residual=residual, out=out, piece=piece)
    if isinstance(codec, AgreeingCodec):
        codec = codec.agree(x, transport, seed=seed, residual=residual)
    out, size = x if out is None else out, transport.size
    coding = _Coding.of(codec, raw=residual is None)
    seed = derive_seed(seed, transport.rank)

    def run(index: int, part: slice) -> Iterator[TwoLevelHop]:
        chunk = split_evenly(part.stop - part.start, size, codec.block)
        starts = [min(part.start + rank * chunk, part.stop) for rank in range(size + 1)]
        spans = [slice(*starts[rank : rank + 2]) for rank in range(size)]
        values = [x[span] for span in spans]
        feedback = None if residual is None else [residual[span] for span in spans]
        slot = slot_of(index)
        received = yield from _reduce(values, feedback, [s.start for s in spans], coding, transport, here, seed, slot)
        mine = spans[transport.rank]
        every = room(transport, here, f"sums {slot}", received.shape[1], x.device)
        coding.between.recode(
            received,
            every[here.local, here.node],
            coding.summed(mine.stop - mine.start),
            dtype=x.dtype,
            seed=derive_seed(seed, 2),
            offset=mine.start,
            residual=None if residual is None else residual[mine],
        )
        yield from gather(every, transport, here)
        for message, rank in zip(every.flatten(0, 1), here.columns, strict=True):
            part_out = out[spans[rank]]
            if len(part_out):
                codec.decode(message[: codec.wire(len(part_out), x.dtype).capacity], part_out)

    parts = cut(x.numel(), piece, size * codec.block)
    overlap([run(index, part) for index, part in enumerate(parts)], transport, x.device)


def reduce_scatter(
    x: Tensor, out: Tensor, codec: Codec, transport: Transport, here: Grid, *, seed: int = 0, piece: int | None = None
) -> None:
    """Fill ``out`` (n,) with the sum over ranks of row ``rank`` of their ``x`` (size, n), in two levels.

    Two quantisations: steps 1 to 4 of ``two_level``, with the last sum left as values.

    Args:
        x: contiguous, of one shape on all ranks; f32, bf16 or f16.
        out: of the type of ``x``, or f32.
        codec: the codec between nodes; ``codec.within`` is that inside them. A codec that agrees has done so already.
        transport: the ranks.
        here: ``grid(transport)``.
        seed: of stochastic rounding; the same on all ranks.
        piece: elements of a row that are sent at a time; None: all.
    """
    numel = x.shape[1]
    padded = -(-numel // codec.block) * codec.block
    coding, seed = _Coding.of(codec, raw=True), derive_seed(seed, transport.rank)

    def run(index: int, part: slice) -> Iterator[TwoLevelHop]:
        starts = [to * padded + part.start for to in range(transport.size)]
        rows = [row[part] for row in x]
        received = yield from _reduce(rows, None, starts, coding, transport, here, seed, slot_of(index))
        codec.decode_sum(received, out[part], dtype=x.dtype)

    parts = cut(numel, piece, codec.block)
    overlap([run(index, part) for index, part in enumerate(parts)], transport, x.device)


def room(transport: Transport, here: Grid, name: str, nbytes: int, device: torch.device) -> Tensor:
    """Return scratch memory (ranks of a node, nodes, nbytes) with room for a message of each rank.

    Entry [b, a] belongs to number b of node a.
    """
    ranks = len(here.node_ranks), len(here.ranks)
    return transport.scratch(name, ranks[0] * ranks[1] * nbytes, device).view(*ranks, nbytes)


@dataclass(frozen=True)
class TwoLevelHop:
    """One exchange of messages with some of the ranks.

    Attributes:
        transport: the ranks.
        messages: for each peer, the message to it and the room for the message from it.
    """

    transport: Transport
    messages: Mapping[int, tuple[Tensor, Tensor]]

    @classmethod
    def of(
        cls, transport: Transport, peers: Sequence[int], sends: Sequence[Tensor], recvs: Sequence[Tensor]
    ) -> TwoLevelHop:
        """Return the hop that sends ``sends[i]`` to rank ``peers[i]``; this rank's own message is copied at once."""
        messages = dict(zip(peers, zip(sends, recvs, strict=True), strict=True))
        mine = messages.pop(transport.rank, None)
        if mine is not None and mine[0].data_ptr() != mine[1].data_ptr():
            mine[1].copy_(mine[0])
        return cls(transport, messages)

    def meets(self, other: TwoLevelHop) -> bool:
        """Return whether both hops have messages for the same rank."""
        return not self.messages.keys().isdisjoint(other.messages)

    def __or__(self, other: TwoLevelHop) -> TwoLevelHop:
        return TwoLevelHop(self.transport, {**self.messages, **other.messages})

    def __call__(self) -> None:
        """Make the exchange; without messages there is none to make."""
        if not self.messages:
            return
        nothing = next(iter(self.messages.values()))[0][:0]
        sends, recvs = [nothing] * self.transport.size, [nothing] * self.transport.size
        for peer, (send, recv) in self.messages.items():
            sends[peer], recvs[peer] = send, recv
        self.transport.exchange(sends, recvs)


def overlap(pieces: Sequence[Iterator[TwoLevelHop]], transport: Transport, device: torch.device) -> None:
    """Run all ``pieces`` of a collective; computation, hops inside nodes and hops between nodes overlap.

    Pieces are dealt in turn to two streams, each of which has two pieces in flight. Hops of these two pieces are sent
    in one exchange if one is inside nodes and the other between them. Meanwhile the calling thread computes pieces of
    the other stream.
    """
    streams = [pieces[first::IN_FLIGHT] for first in range(min(IN_FLIGHT, len(pieces)))]
    pipeline([_stream(stream) for stream in streams], transport, device)


def slot_of(index: int) -> int:
    """Return the number of the scratch memory of piece ``index``; no other piece in flight has the same."""
    return index % (_OF_STREAM * IN_FLIGHT)


_OF_STREAM = 2
"""Pieces of a stream that are in flight: one on each level."""


def _stream(pieces: Sequence[Iterator[TwoLevelHop]]) -> Piece:
    """Yield the hops of all ``pieces``, in order; hops that do not meet are yielded as one.

    Which hops are joined depends on the pieces alone, so all ranks make the same exchanges.
    """
    rest = iter(pieces)
    under_way: list[tuple[Iterator[TwoLevelHop], TwoLevelHop]] = []
    while True:
        while len(under_way) < _OF_STREAM and (piece := next(rest, None)) is not None:
            under_way += _onward([piece])
        if not under_way:
            return
        (_, hop), *others = under_way
        leaving = [under_way[0], *(each for each in others if not each[1].meets(hop))]
        yield reduce(or_, (hop for _, hop in leaving))
        waiting = under_way[len(leaving) :]
        under_way = [*_onward([piece for piece, _ in leaving]), *waiting]


def _onward(pieces: Sequence[Iterator[TwoLevelHop]]) -> list[tuple[Iterator[TwoLevelHop], TwoLevelHop]]:
    """Compute each piece up to its next hop; return the pieces that have one, each with its hop."""
    return [(piece, hop) for piece in pieces if (hop := next(piece, None)) is not None]


def gather(every: Tensor, transport: Transport, here: Grid) -> Iterator[TwoLevelHop]:
    """Yield the hops of an all-gather of the messages in ``every``: first between nodes, then inside them.

    ``every`` is memory of ``room``, in which this rank's message is in its place.
    """
    own = every[here.local]
    yield TwoLevelHop.of(transport, here.cross_ranks, [own[here.node]] * len(here.cross_ranks), own.unbind(0))
    yield TwoLevelHop.of(transport, here.node_ranks, [own.view(-1)] * len(here.node_ranks), every.flatten(1).unbind(0))


@dataclass(frozen=True)
class _Coding:
    """The codecs of one sum, which is made of values or of transformed values.

    Attributes:
        within: encodes values into messages inside nodes.
        sums: decodes these messages to the summands.
        between: encodes and decodes sums in messages between nodes.
        run: the length of a sum is a multiple of so many elements.
    """

    within: Codec
    sums: Codec
    between: Codec
    run: int = 1

    @classmethod
    def of(cls, codec: Codec, raw: bool) -> _Coding:
        """Return the codecs; with ``raw`` and if they can, transformed values are summed (SDP4Bit, section 3.3)."""
        within = codec.within if isinstance(codec, TwoLevelCodec) else codec
        if raw and not codec.header and isinstance(codec, TransformCodec) and isinstance(within, TransformCodec):
            return cls(within, within.untransformed, codec.untransformed, codec.transform_run)
        return cls(within, within, codec)

    def summed(self, numel: int) -> int:
        """Return how many elements the sum of messages of ``numel`` elements has."""
        return -(-numel // self.run) * self.run


def _reduce(
    values: Sequence[Tensor],
    feedback: Sequence[Tensor] | None,
    starts: Sequence[int],
    coding: _Coding,
    transport: Transport,
    here: Grid,
    seed: int,
    slot: int,
) -> Generator[TwoLevelHop, None, Tensor]:
    """Send ``values[r]`` on its way to rank r; return the messages (nodes, nbytes) of each node's sum for this rank.

    Args:
        values: flat tensors, one for each rank.
        feedback: residual of each of them.
        starts: place of each in the sequence of the seed's numbers.
        coding: the codecs.
        transport: the ranks.
        here: the grid of the ranks.
        seed: the seed of this rank.
        slot: number of the scratch memory to use.
    """
    dtype, device = values[0].dtype, values[0].device
    nodes, node_ranks = len(here.ranks), len(here.node_ranks)
    longest = max(len(part) for part in values)

    def memory(name: str, rows: int, codec: Codec) -> Tensor:
        capacity = codec.wire(longest, dtype).capacity
        return transport.scratch(f"{name} {slot}", rows * nodes * capacity, device).view(rows, nodes, capacity)

    outgoing, incoming = (memory(name, node_ranks, coding.within) for name in ("outgoing", "incoming"))
    for b in range(node_ranks):
        for a, row in enumerate(here.ranks):
            part = values[row[b]]
            if not len(part):
                continue
            message = outgoing[b, a, : coding.within.wire(len(part), dtype).capacity]
            coding.within.encode(
                part,
                message,
                seed=derive_seed(seed, 0),
                offset=starts[row[b]],
                residual=None if feedback is None else feedback[row[b]],
            )
    yield TwoLevelHop.of(transport, here.node_ranks, outgoing.flatten(1).unbind(0), incoming.flatten(1).unbind(0))
    sent, received = (memory(name, 1, coding.between)[0] for name in ("sums out", "sums in"))
    for a, peer in enumerate(here.cross_ranks):
        coding.between.recode(
            incoming[:, a],
            sent[a],
            coding.summed(len(values[peer])),
            dtype=dtype,
            source=coding.sums,
            seed=derive_seed(seed, 1),
            offset=starts[peer],
            residual=None if feedback is None else feedback[peer],
        )
    yield TwoLevelHop.of(transport, here.cross_ranks, sent.unbind(0), received.unbind(0))
    return received
