"""The levels of ``two_level``: which rank passes which chunk on, and the exchanges inside nodes and between them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, reduce
from itertools import accumulate, chain, pairwise
from operator import or_

import torch
from torch import Tensor

from ..codecs import Codec, TwoLevelCodec
from ..transport import Transport
from ._pieces import IN_FLIGHT, Piece, pipeline


@dataclass(frozen=True)
class Grid:
    """The ranks, a row for each node, and the chunks that each passes on; rows may have different lengths.

    A tensor has one chunk for each rank, its owner. In every node one rank sums the node's messages for a chunk and
    sends the sum to the owner; later it receives the whole sum from the owner. In the owner's node that is the owner.
    In other nodes the ranks take turns, so each has as many chunks as the others, or one more.

    Attributes:
        ranks: ``ranks[a]`` has the ranks of node a.
        node: the row of this rank.
        local: the place of this rank in its row.
        members: all ranks, in the order of the chunks.
        across: the grid on which the ranks with this rank's place sum between nodes; None: they all exchange messages.
    """

    ranks: tuple[tuple[int, ...], ...]
    node: int
    local: int
    members: tuple[int, ...]
    across: Grid | None = None

    @property
    def node_ranks(self) -> tuple[int, ...]:
        """The ranks of this node."""
        return self.ranks[self.node]

    @cached_property
    def shares(self) -> tuple[tuple[int, ...], ...]:
        """For each rank of this node the owners of the chunks that it passes on, in the order of their nodes."""
        shares: list[list[int]] = [[] for _ in self.node_ranks]
        turn = 0
        for node, row in enumerate(self.ranks):
            for place, rank in enumerate(row):
                shares[place if node == self.node else turn % len(shares)].append(rank)
                turn += node != self.node
        return tuple(map(tuple, shares))

    @property
    def share(self) -> tuple[int, ...]:
        """The owners of the chunks that this rank passes on, itself included."""
        return self.shares[self.local]

    @cached_property
    def order(self) -> tuple[int, ...]:
        """All ranks, in the order of ``shares``: messages of one rank's share are contiguous."""
        return tuple(rank for share in self.shares for rank in share)

    @cached_property
    def blocks(self) -> tuple[slice, ...]:
        """The place of each rank's share in ``order``."""
        return tuple(slice(*ends) for ends in pairwise(accumulate(map(len, self.shares), initial=0)))

    @cached_property
    def place(self) -> int:
        """The place of this rank's own chunk in ``order``."""
        return self.order.index(self.node_ranks[self.local])

    def in_order(self, rows: Tensor, out: Tensor) -> Tensor:
        """Return ``out`` (ranks, nbytes), filled with ``rows``, messages in the order of ``members``, in ``order``."""
        return torch.index_select(rows, 0, self._index(rows.device, "order"), out=out)

    def by_rank(self, rows: Tensor, out: Tensor) -> Tensor:
        """Return ``out`` (ranks, nbytes), filled with ``rows``, messages in ``order``, in the order of ``members``."""
        return torch.index_select(rows, 0, self._index(rows.device, "ranks"), out=out)

    def _index(self, device: torch.device, which: str) -> Tensor:
        if (device, which) not in self._indices:
            places = {rank: place for place, rank in enumerate(self.members)}
            order = torch.tensor([places[rank] for rank in self.order], device="cpu")
            self._indices[device, which] = (order if which == "order" else order.argsort()).to(device)
        return self._indices[device, which]

    @cached_property
    def _indices(self) -> dict[tuple[torch.device, str], Tensor]:
        return {}

    @cached_property
    def cross_ranks(self) -> tuple[int, ...]:
        """The rank of each node that passes on this rank's chunk; in this node that is this rank."""
        before = sum(map(len, self.ranks[: self.node])) + self.local
        turns = [before - len(row) * (node < self.node) for node, row in enumerate(self.ranks)]
        turns[self.node] = self.local
        return tuple(row[turn % len(row)] for row, turn in zip(self.ranks, turns, strict=True))


def node_grid(transport: Transport) -> Grid | None:
    """Return the grid of the ranks, or None if there are no two levels: one node, or nodes of one rank."""
    return None if len(transport.nodes) in (1, transport.size) else _node_grid(transport.nodes, transport.rank)


@lru_cache(maxsize=64)
def _node_grid(nodes: tuple[tuple[int, ...], ...], rank: int) -> Grid:
    here = grid_of(nodes, rank)
    if len(nodes) <= MOST_NODES or len(set(map(len, nodes))) > 1:
        return here
    # Between many nodes of one size sums go in two steps, too: fewer messages for one more quantisation.
    return replace(here, across=grid_of(in_rows(here.cross_ranks), rank, here.cross_ranks))


def grid_of(rows: tuple[tuple[int, ...], ...], rank: int, members: tuple[int, ...] | None = None) -> Grid:
    """Return the grid of ``rows`` with ``rank`` in one of them; without ``members`` chunks are in rank order."""
    for node, row in enumerate(rows):
        if rank in row:
            return Grid(rows, node, row.index(rank), members or tuple(sorted(chain(*rows))))
    raise AssertionError(f"rank {rank} is in none of {rows}")


def in_rows(ranks: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Return ``ranks`` in about as many rows as a row has ranks; lengths of rows differ by one at most."""
    count = round(math.sqrt(len(ranks)))
    ends = pairwise(len(ranks) * row // count for row in range(count + 1))
    return tuple(tuple(ranks[start:stop]) for start, stop in ends)


MOST_NODES = 32
"""With at most this many nodes, ranks of different nodes send each other their sums in one exchange."""


def one_level(codec: Codec, transport: Transport) -> Codec:
    """Return the codec to use if there are no two levels: ``codec.within`` on one node, else ``codec`` itself."""
    return codec.within if isinstance(codec, TwoLevelCodec) and len(transport.nodes) == 1 else codec


INSIDE, BETWEEN = frozenset({"inside nodes"}), frozenset({"between nodes"})
"""The levels of a hop."""


@dataclass(frozen=True)
class TwoLevelHop:
    """One exchange of messages with some of the ranks; all ranks take part, also those without messages.

    Attributes:
        transport: the ranks.
        levels: ``INSIDE``, ``BETWEEN`` or both.
        messages: see ``Transport.exchange``; an empty one for this rank shows the device of ranks without messages.
    """

    transport: Transport
    levels: frozenset[str]
    messages: Mapping[int, tuple[Tensor, Tensor]]

    @classmethod
    def of(
        cls, transport: Transport, levels: frozenset[str], sends: Mapping[int, Tensor], recvs: Mapping[int, Tensor]
    ) -> TwoLevelHop:
        """Return the hop that sends ``sends[rank]`` to a rank; this rank's own message is copied at once."""
        nothing = next(iter(sends.values()))[:0]
        messages = {peer: (sends.get(peer, nothing), recvs.get(peer, nothing)) for peer in {**sends, **recvs}}
        send, recv = messages[transport.rank]
        messages[transport.rank] = nothing, nothing
        if send.data_ptr() != recv.data_ptr():
            recv.copy_(send)
        return cls(transport, levels, messages)

    def meets(self, other: TwoLevelHop) -> bool:
        """Return whether both hops have messages on the same level, so perhaps for the same rank."""
        return not self.levels.isdisjoint(other.levels)

    def __or__(self, other: TwoLevelHop) -> TwoLevelHop:
        return TwoLevelHop(self.transport, self.levels | other.levels, {**self.messages, **other.messages})

    def __call__(self) -> None:
        """Make the exchange."""
        self.transport.exchange(self.messages)


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


def scatter(
    outgoing: Tensor, incoming: Tensor, transport: Transport, here: Grid, levels: frozenset[str] = INSIDE
) -> TwoLevelHop:
    """Return the hop inside nodes that gives each rank the messages of its share.

    Args:
        outgoing: (ranks, nbytes), messages in ``order``.
        incoming: (ranks of this node, share, nbytes), receives the messages of each rank of this node.
        transport: the ranks.
        here: the grid of the ranks.
        levels: of the hop; with ``Grid.across`` all are between nodes.
    """
    sends = {peer: outgoing[block].view(-1) for peer, block in zip(here.node_ranks, here.blocks, strict=True)}
    recvs = dict(zip(here.node_ranks, incoming.flatten(1).unbind(0), strict=True))
    return TwoLevelHop.of(transport, levels, sends, recvs)


def scatter_sums(sums: Tensor, received: Tensor, transport: Transport, here: Grid) -> TwoLevelHop:
    """Return the hop between nodes that gives each rank every node's sum of its chunk.

    Args:
        sums: (share, nbytes), this node's sums.
        received: (nodes, nbytes), takes the sums of each node.
        transport: the ranks.
        here: the grid of the ranks.
    """
    sends = dict(zip(here.share, sums.unbind(0), strict=True))
    return TwoLevelHop.of(transport, BETWEEN, sends, dict(zip(here.cross_ranks, received.unbind(0), strict=True)))


def gather(
    every: Tensor, transport: Transport, here: Grid, slot: int, levels: frozenset[str] = INSIDE
) -> Iterator[TwoLevelHop]:
    """Yield the hops of an all-gather of the messages in ``every``: first between nodes, then inside them.

    ``every`` is (ranks, nbytes), in ``order``; this rank's message is in its place. ``slot`` is the number of the
    scratch memory to use, ``levels`` as in ``scatter``.
    """
    mine = every[here.blocks[here.local]]
    if here.across is None:
        sends = dict.fromkeys(here.cross_ranks, every[here.place])
        yield TwoLevelHop.of(transport, BETWEEN, sends, dict(zip(here.share, mine.unbind(0), strict=True)))
    else:
        sums = transport.scratch(f"sums across {slot}", mine.numel(), every.device).view_as(mine)
        sums[here.across.place].copy_(every[here.place])
        yield from gather(sums, transport, here.across, slot, BETWEEN)
        here.across.by_rank(sums, mine)
    recvs = {peer: every[block].view(-1) for peer, block in zip(here.node_ranks, here.blocks, strict=True)}
    yield TwoLevelHop.of(transport, levels, dict.fromkeys(here.node_ranks, mine.view(-1)), recvs)
