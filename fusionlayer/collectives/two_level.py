"""``two_level``: sums inside nodes first and then between nodes, where every value is sent only once."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from ..base.seeds import derive_seed
from ..codecs import AgreeingCodec, Codec, TransformCodec, TwoLevelCodec
from ..transport import Transport
from ._base import check_pair, collective, split_evenly, sums_anew
from ._levels import Grid, TwoLevelHop, gather, grid, one_level, overlap, room, scatter, scatter_sums, slot_of
from ._pieces import cut
from .two_shot import two_shot

__all__ = ["reduce_scatter", "two_level"]


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

    Each node sends 2 (nodes - 1) / nodes of the tensor's message, whatever the number of its ranks. A node of m of n
    ranks sends (n - m + m (nodes - 1)) / n if nodes are unequal (``Grid``). If there are no two levels this is
    ``two_shot``, on one node with ``codec.within``.

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
            every[here.place],
            coding.summed(mine.stop - mine.start),
            dtype=x.dtype,
            seed=derive_seed(seed, 2),
            offset=mine.start,
            residual=None if residual is None else residual[mine],
        )
        yield from gather(every, transport, here)
        for message, rank in zip(every, here.order, strict=True):
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
    longest = max(len(part) for part in values)

    def memory(name: str, rows: int, codec: Codec) -> Tensor:
        capacity = codec.wire(longest, dtype).capacity
        return transport.scratch(f"{name} {slot}", rows * capacity, device).view(rows, capacity)

    outgoing = memory("outgoing", len(values), coding.within)
    incoming = memory("incoming", len(here.node_ranks) * len(here.share), coding.within)
    for message, owner in zip(outgoing, here.order, strict=True):
        part = values[owner]
        if not len(part):
            continue
        coding.within.encode(
            part,
            message[: coding.within.wire(len(part), dtype).capacity],
            seed=derive_seed(seed, 0),
            offset=starts[owner],
            residual=None if feedback is None else feedback[owner],
        )
    incoming = incoming.view(len(here.node_ranks), len(here.share), -1)
    yield scatter(outgoing, incoming, transport, here)
    sums = memory("sums out", len(here.share), coding.between)
    received = memory("sums in", len(here.ranks), coding.between)
    for number, owner in enumerate(here.share):
        coding.between.recode(
            incoming[:, number],
            sums[number],
            coding.summed(len(values[owner])),
            dtype=dtype,
            source=coding.sums,
            seed=derive_seed(seed, 1),
            offset=starts[owner],
            residual=None if feedback is None else feedback[owner],
        )
    yield scatter_sums(sums, received, transport, here)
    return received
