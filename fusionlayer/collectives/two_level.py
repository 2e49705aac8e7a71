"""``two_level``: sums inside nodes first and then between nodes, where every value is sent only once."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from ..base.seeds import derive_seed
from ..codecs import AgreeingCodec, Codec, TransformCodec, TwoLevelCodec
from ..transport import Transport
from ._base import check_pair, collective, split_evenly, sums_anew
from ._levels import (
    BETWEEN,
    INSIDE,
    Grid,
    TwoLevelHop,
    gather,
    node_grid,
    one_level,
    overlap,
    scatter,
    scatter_sums,
    slot_of,
)
from ._pieces import cut
from .two_shot import two_shot


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
    2. All-to-all inside nodes: a rank gets its node's messages for its own chunk and for its share of the chunks of
       other nodes' ranks. If nodes are equal these are the ranks with the same place in other nodes.
    3. Recode: for each of these chunks, the sum over the node becomes a message of ``codec``.
    4. All-to-all between nodes: sums go to the ranks that own the chunks. Each rank recodes the sum of its own chunk.
    5. All-gather between nodes, then inside them; all ranks decode the same bytes.

    Each node sends 2 (nodes - 1) / nodes of the tensor's message, regardless of the number of its ranks. A node of m of
    n ranks sends (n - m + m (nodes - 1)) / n if nodes are unequal (``Grid``). If there are no two levels this is
    ``two_shot``, on one node with ``codec.within``.

    Between more than 32 nodes of one size the messages of steps 4 and 5 go along rows of nodes and then between rows,
    as in ``grid``: as many bytes in fewer messages, four quantisations.

    Without ``residual`` the ranks sum transformed values and transform the result back once, at the end. With
    ``residual`` each loss goes to the residual of the rank that made it, so each recoding transforms back and forth.
    Other arguments are those of ``two_shot``. With ``piece``, messages between nodes of one piece are sent in the same
    exchange as messages inside nodes of the next piece.
    """
    check_pair("two_level", codec, transport.size)
    here, within = node_grid(transport), codec.within if isinstance(codec, TwoLevelCodec) else None
    if here is None:
        return two_shot(x, one_level(codec, transport), transport, seed=seed, residual=residual, out=out, piece=piece)
    sum_on(here, x, codec, within, transport, seed=seed, residual=residual, out=out, piece=piece)


def sum_on(
    here: Grid,
    x: Tensor,
    codec: Codec,
    within: Codec | None,
    transport: Transport,
    *,
    seed: int,
    residual: Tensor | None,
    out: Tensor | None,
    piece: int | None,
) -> None:
    """Sum over the rows of ``here``, then between them: ``two_level`` on any grid of all ranks.

    Args:
        here: the grid; nodes are its rows.
        within: encodes values inside rows; None: ``codec`` does.
        x, codec, transport, seed, residual, out, piece: as for ``two_level``.
    """
    if isinstance(codec, AgreeingCodec):
        codec = codec.agree(x, transport, seed=seed, residual=residual)
    out, size = x if out is None else out, transport.size
    coding = _Coding.of(codec, within or codec, raw=residual is None)
    how = _LevelSum(coding, transport, here, derive_seed(seed, transport.rank), x.dtype, x.device, residual)

    def run(index: int, part: slice) -> Iterator[TwoLevelHop]:
        chunk = split_evenly(part.stop - part.start, size, codec.block)
        chunks = _Chunks(part.start, chunk, chunk, part.stop)
        kept, mine = None if residual is None else residual[part], chunks.start(transport.rank)

        def encode(rows: Tensor) -> None:
            first = derive_seed(how.seed, 0)
            coding.within.encode_chunks(x[part], rows, chunk, seed=first, offset=part.start, residual=kept)

        received = yield from how.reduce(encode, chunks, slot_of(index))
        every, rows = how.memory(f"sums {slot_of(index)}", 2 * size, coding.between, chunk).split(size)
        coding.between.recode(
            received,
            every[here.place],
            coding.summed(chunks.length(transport.rank)),
            dtype=x.dtype,
            seed=derive_seed(how.seed, 2),
            offset=mine,
            residual=None if residual is None else residual[mine : mine + chunks.length(transport.rank)],
        )
        yield from gather(every, transport, here, slot_of(index))
        codec.decode_chunks(here.by_rank(every, rows), out[part], chunk)

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
        codec: the codec between nodes; ``codec.within`` is the codec inside nodes. A codec that agrees has done so
            already.
        transport: the ranks.
        here: ``node_grid(transport)``.
        seed: the seed of stochastic rounding; the same on all ranks.
        piece: elements of a row that are sent at a time; None: all.
    """
    numel = x.shape[1]
    padded = -(-numel // codec.block) * codec.block
    coding = _Coding.of(codec, codec.within if isinstance(codec, TwoLevelCodec) else codec, raw=True)
    how = _LevelSum(coding, transport, here, derive_seed(seed, transport.rank), x.dtype, x.device, None)

    def run(index: int, part: slice) -> Iterator[TwoLevelHop]:
        length = part.stop - part.start
        chunks = _Chunks(part.start, padded, length, transport.size * padded)

        def encode(rows: Tensor) -> None:
            first = derive_seed(how.seed, 0)
            if length == padded:
                return coding.within.encode_chunks(x.view(-1), rows, length, seed=first)
            for rank, row in enumerate(rows):
                coding.within.encode(x[rank, part], row, seed=first, offset=chunks.start(rank))

        received = yield from how.reduce(encode, chunks, slot_of(index))
        codec.decode_sum(received, out[part], dtype=x.dtype)

    parts = cut(numel, piece, codec.block)
    overlap([run(index, part) for index, part in enumerate(parts)], transport, x.device)


@dataclass(frozen=True)
class _Coding:
    """The codecs of one sum, which is made of values or of transformed values.

    Attributes:
        within: encodes values into messages inside nodes.
        sums: decodes these messages to the summands.
        between: encodes and decodes sums in messages between nodes.
        run: the length of a sum is a multiple of this many elements.
    """

    within: Codec
    sums: Codec
    between: Codec
    run: int = 1

    @classmethod
    def of(cls, codec: Codec, within: Codec, raw: bool) -> _Coding:
        """Return the codecs; with ``raw`` and if they can, transformed values are summed (SDP4Bit, section 3.3)."""
        if raw and not codec.header and isinstance(codec, TransformCodec) and isinstance(within, TransformCodec):
            return cls(within, within.untransformed, codec.untransformed, codec.transform_run)
        return cls(within, within, codec)

    def summed(self, numel: int) -> int:
        """Return how many elements the sum of messages of ``numel`` elements has."""
        return -(-numel // self.run) * self.run


class _Chunks(NamedTuple):
    """Places of the ranks' chunks: ``longest`` elements from ``first + rank * step`` on, none after ``end``."""

    first: int
    step: int
    longest: int
    end: int

    def start(self, rank: int) -> int:
        """Return the first element of a rank's chunk."""
        return min(self.first + rank * self.step, self.end)

    def length(self, rank: int) -> int:
        """Return the number of elements of a rank's chunk."""
        return min(self.longest, self.end - self.start(rank))


@dataclass(frozen=True)
class _LevelSum:
    """State that all pieces of one sum share.

    Attributes:
        coding: the codecs.
        transport: the ranks.
        here: the grid of the ranks.
        seed: the seed of this rank.
        dtype: the type of the elements.
        device: the device of the elements.
        residual: this rank's error feedback; None: none.
    """

    coding: _Coding
    transport: Transport
    here: Grid
    seed: int
    dtype: torch.dtype
    device: torch.device
    residual: Tensor | None

    def memory(self, name: str, rows: int, codec: Codec, numel: int) -> Tensor:
        """Return scratch memory (rows, nbytes) for messages of ``numel`` elements."""
        capacity = codec.wire(numel, self.dtype).capacity
        return self.transport.scratch(name, rows * capacity, self.device).view(rows, capacity)

    def reduce(
        self, encode: Callable[[Tensor], None], chunks: _Chunks, slot: int, across: Grid | None = None
    ) -> Generator[TwoLevelHop, None, Tensor]:
        """Yield the hops that send chunks to their owners; return every node's sum for this rank, (nodes, nbytes).

        Args:
            encode: writes this rank's message for each of the grid's ``members`` into a row of a tensor.
            chunks: the places of the chunks in the seed's sequence, and in ``residual``.
            slot: number of the scratch memory to use.
            across: the grid if messages are sums of nodes already.
        """
        here, between, longest = across or self.here, self.coding.between, chunks.longest
        within, sums_of, name = self.coding.within, self.coding.sums, f"{slot}"
        if across is not None:
            within, sums_of, name = between, between, f"across {slot}"
        size, ranks, share = len(here.members), len(here.node_ranks), len(here.share)
        rows, outgoing = self.memory(f"outgoing {name}", 2 * size, within, longest).split(size)
        incoming = self.memory(f"incoming {name}", ranks * share, within, longest).view(ranks, share, -1)
        encode(rows)
        yield scatter(here.in_order(rows, outgoing), incoming, self.transport, here, BETWEEN if across else INSIDE)

        def recode(sums: Tensor) -> None:
            row = 0
            for length, alike in groupby(map(chunks.length, here.share)):
                start, row = row, row + len(list(alike))
                between.recode_rows(
                    incoming[:, start:row],
                    sums[start:row],
                    self.coding.summed(length),
                    [chunks.start(owner) for owner in here.share[start:row]],
                    dtype=self.dtype,
                    source=sums_of,
                    seed=derive_seed(self.seed, 3 if across else 1),
                    residual=self.residual,
                )

        if here.across is not None:
            return (yield from self.reduce(recode, chunks, slot, here.across))
        recode(sums := self.memory(f"sums out {slot}", share, between, longest))
        received = self.memory(f"sums in {slot}", len(here.ranks), between, longest)
        yield scatter_sums(sums, received, self.transport, here)
        return received
